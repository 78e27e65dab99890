"""A replay keeps the captured times at any speed: every gap, and the whole, by the clock of a server that logs both.

Judged within the run: a drift is a share of it, and the error of a gap may be 5 ms, as is promised of a quiet machine,
or on a busier one three times what a plain sleep was wrong by at the same time.
"""

import threading
import time
from pathlib import Path

import numpy as np
import pytest
from running import harness, run_dir_of, verdict

from benchmarks.ours import target
from benchmarks.replays import DRIFT_LIMIT, GAP_ERROR_LIMIT_S, moments_s, punctuality, scenario, write
from benchmarks.server import TRUTH, TimedServer, Timing
from benchmarks.trial import Load

pytestmark = pytest.mark.e2e

SLEEPS_PER_S = 40
TIMING = Timing(ttft_s=0.05, itl_s=0.01, chunks=8)


class Sleeper(threading.Thread):
    """Sleeps to moments of its own while the block runs; then `log` says when it woke, as a server would."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._over = threading.Event()
        self.woke_s: list[float] = []

    def run(self) -> None:
        start_s = time.monotonic()
        while not self._over.is_set():
            due_s = start_s + len(self.woke_s) / SLEEPS_PER_S
            time.sleep(max(0.0, due_s - time.monotonic()))
            self.woke_s.append(time.monotonic())

    def __enter__(self) -> "Sleeper":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join(10)

    @property
    def log(self) -> np.ndarray:
        table = np.zeros(len(self.woke_s), dtype=TRUTH)
        table["id"], table["read_s"] = np.arange(len(self.woke_s)).astype("U"), self.woke_s
        return table


@pytest.mark.parametrize(("speed", "seconds"), [(1.0, 8.0), (2.0, 5.0), (0.5, 10.0)])
def test_a_replay_keeps_its_times(tmp_path: Path, speed: float, seconds: float) -> None:
    """At x1, x2 and x0.5 the server sees the captured gaps, scaled, and no drift; the verdict's own figures agree."""
    at_s = moments_s(Load(30, seconds), speed)
    write(tmp_path / "recording.jsonl", at_s, TIMING)
    (tmp_path / "replay.yaml").write_text(scenario(speed))
    with TimedServer(TIMING) as server, Sleeper() as sleeper:
        (tmp_path / "target.yaml").write_text(target(server.url))
        done = harness("run", "replay.yaml", "--target", "target.yaml", cwd=tmp_path)
        seen = punctuality(server.log(), at_s, speed)
    replay = verdict(run_dir_of(done.stdout, tmp_path))["tables"]["replay"]  # type: ignore[index]
    slept = punctuality(sleeper.log, np.arange(len(sleeper.woke_s)) / SLEEPS_PER_S, 1.0)
    limit_s = max(GAP_ERROR_LIMIT_S, 3 * np.quantile(slept.gap_error_s, 0.99))
    assert np.quantile(seen.gap_error_s, 0.99) < limit_s, done.stdout
    assert replay["gap_error_p99_s"] < limit_s
    assert max(seen.drift, replay["drift_share"]) < DRIFT_LIMIT, done.stdout
    assert np.median(seen.gap_error_s) < 0.05 * seconds / len(at_s)
