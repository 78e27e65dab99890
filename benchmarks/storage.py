"""What it costs to keep a million observations: CPU and memory of the log's writer, and what reading them back gives.

Run as a process of its own (`python -m benchmarks.storage`), so that its memory is the writer's alone; prints JSON.
"""

import json
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from harness.log import Blocks, ObservationLog
from harness.model import Observation, Outcome, Tag

COUNT, GAPS = 1_000_000, 31


def observations(count: int) -> Iterator[Observation]:
    """Finished streamed requests with latencies that all differ and 31 gaps each."""
    gaps = tuple(0.010 + 0.0001 * k for k in range(GAPS))
    for index in range(count):
        due = index * 0.001
        end = due + 0.360 + (index * 7919 % count) / count
        times = (due, due, due + 0.05, due + 0.05, end, end)
        yield Observation(index, *times, 16, 32, 200, Outcome.OK, Tag.STREAMED, gaps_s=gaps)


def measure(count: int, folder: Path) -> dict[str, float]:
    """CPU us an observation (net of making it), memory grown in MB, and the worst error of P50, P95, P99 read back."""
    start = time.process_time()
    for _ in observations(count):
        pass
    making_s = time.process_time() - start
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    log = ObservationLog(folder / "log.worker-0.bin")
    start = time.process_time()
    for seen in observations(count):
        log.append(seen)
    log.close()
    writing_s = time.process_time() - start - making_s
    grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb
    return {
        "samples": count,
        "cpu_us_per_sample": 1e6 * writing_s / count,
        "rss_growth_mb": grown_kb / 1024,
        "percentile_error": _percentile_error(count, folder / "log.worker-0.bin"),
        "file_mb": (folder / "log.worker-0.bin").stat().st_size / 1e6,
    }


def _percentile_error(count: int, path: Path) -> float:
    damage: list[str] = []
    read = np.concatenate([records["ended_s"] - records["due_s"] for records, _ in Blocks(path).new(damage)])
    if damage or len(read) != count:
        raise RuntimeError(f"{len(read)} of {count} observations came back: {damage}")
    true = np.array([seen.ended_s - seen.due_s for seen in observations(count)])
    ranks = [50, 95, 99]
    got, want = (np.percentile(values, ranks, method="inverted_cdf") for values in (read, true))
    return float(np.abs(got / want - 1).max())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        json.dump(measure(int(sys.argv[1]) if len(sys.argv) > 1 else COUNT, Path(folder)), sys.stdout)
