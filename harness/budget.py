"""When a run has seen enough: what was broken is to be mended at once, for too many requests failed, or a GPU is full.

It counts answers that have reached the disk. A request that only hangs counts once its time limit has ended it. Memory
is what the watcher read last; where it reads nothing, nothing is known, and the run goes on.
"""

import math
from pathlib import Path

import numpy as np

from harness.log import Blocks, Lines
from harness.model import Outcome, Reading
from harness.scenario import Abort

LEAST = 20  # requests, below which a share says little
_FINE = (Outcome.OK, Outcome.REJECTED_AS_EXPECTED, Outcome.CANCELLED_BY_US, Outcome.OPEN)


class Budget:
    """What ended how, lately, in one run's observations, and how full its GPUs are."""

    def __init__(self, limit: Abort, run_dir: Path) -> None:
        self._limit, self._run_dir = limit, run_dir
        self._blocks: dict[Path, Blocks] = {}
        self._ended_s, self._bad = np.zeros(0), np.zeros(0, dtype=bool)
        self._watched, self._memory = Lines(run_dir / "log.watch.jsonl"), dict[str, dict[str, float]]()

    def spent(self, now_s: float) -> str:
        """Why the run is to be stopped; "" while it may go on. `now_s` is the run's own time."""
        return self._failures(now_s) or self._fullness()

    def _failures(self, now_s: float) -> str:
        since_s = now_s - self._limit.for_s
        self._read(since_s)
        n, bad = len(self._bad), int(self._bad.sum())
        if self._limit.bad_share is None or since_s < 0 or n < LEAST or bad < self._limit.bad_share * n:
            return ""
        return f"{bad:,} of {n:,} requests of the last {self._limit.for_s:g} s failed"

    def _read(self, since_s: float) -> None:
        ended_s, bad = [self._ended_s], [self._bad]
        for path in sorted(self._run_dir.glob("log.*.bin")):
            for seen, _ in self._blocks.setdefault(path, Blocks(path)).new():
                ended_s.append(seen["ended_s"])
                bad.append(~np.isin(seen["outcome"], _FINE))
        ends_s = np.concatenate(ended_s)
        lately = ends_s >= since_s
        self._ended_s, self._bad = ends_s[lately], np.concatenate(bad)[lately]

    def _fullness(self) -> str:
        if self._limit.gpu_memory is None or not self._watched.path.exists():
            return ""
        for one in self._watched.new():
            if isinstance(one, Reading) and one.name.startswith("gpu."):
                self._memory.setdefault(one.labels["gpu"], {})[one.name] = one.value
        for gpu, last in self._memory.items():
            free_bytes, total_bytes = last.get("gpu.free_bytes", math.nan), last.get("gpu.total_bytes", math.nan)
            if free_bytes <= (1 - self._limit.gpu_memory) * total_bytes:  # never, of what is not a number
                taken = 1 - free_bytes / total_bytes
                return f"{taken:.1%} of the memory of {gpu} was taken; from {self._limit.gpu_memory:.0%} on, a run ends"
        return ""
