"""When a run has seen enough: too many requests failed for too long, and what was broken is to be mended at once.

It counts answers that have reached the disk. A request that only hangs counts once its time limit has ended it.
"""

from pathlib import Path

import numpy as np

from harness.log import Blocks
from harness.model import Outcome
from harness.scenario import Abort

LEAST = 20  # requests, below which a share says little
_FINE = (Outcome.OK, Outcome.REJECTED_AS_EXPECTED, Outcome.CANCELLED_BY_US, Outcome.OPEN)


class Budget:
    """What ended how, lately, in one run's observations."""

    def __init__(self, limit: Abort, run_dir: Path) -> None:
        self._limit, self._run_dir = limit, run_dir
        self._blocks: dict[Path, Blocks] = {}
        self._ended_s, self._bad = np.zeros(0), np.zeros(0, dtype=bool)

    def spent(self, now_s: float) -> str:
        """Why the run is to be stopped; "" while it may go on. `now_s` is the run's own time."""
        since_s = now_s - self._limit.for_s
        self._read(since_s)
        n, bad = len(self._bad), int(self._bad.sum())
        if since_s < 0 or n < LEAST or bad < self._limit.bad_share * n:
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
