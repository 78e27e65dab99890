"""What a player worker says of itself once a second: whether it had the processor when it wanted it.

A late player makes any stack look slow. The judge reads these before it believes a latency.
"""

import time
from pathlib import Path

_SCHEDSTAT, _STAT = Path("/proc/self/schedstat"), Path("/proc/stat")


class Health:
    """Shares since the last call: of one core used, of wall time spent runnable but not running, stolen from us."""

    def __init__(self) -> None:
        self._last = _counters()

    def shares(self) -> dict[str, float]:
        now, last = _counters(), self._last
        self._last = now
        wall_s = max(now[0] - last[0], 1e-9)
        return {
            "player.cpu_share": (now[1] - last[1]) / wall_s,
            "player.run_delay_share": (now[2] - last[2]) / wall_s,
            "player.steal_share": (now[3] - last[3]) / max(now[4] - last[4], 1),
        }


def _counters() -> tuple[float, float, float, int, int]:
    """(wall s, CPU s of this process, run-queue delay s of its main thread, machine's stolen jiffies, all jiffies)."""
    delay_ns = int(_SCHEDSTAT.read_text().split()[1])
    jiffies = [int(field) for field in _STAT.read_text().split("\n", 1)[0].split()[1:9]]
    return time.monotonic(), time.process_time(), delay_ns * 1e-9, jiffies[7], sum(jiffies)
