"""The machine: who runs on which core, what CPU a process tree used, and who else used the cores meanwhile.

A figure is only as good as the quiet it was taken in. `Meter` reads CPU of the client's whole tree and, over the same
span, what the hypervisor stole and what strangers used of the two cores. It judges nothing: `goals.py` decides what
noise excuses. Linux only, from /proc.
"""

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

SERVER_CORE, CLIENT_CORE = 0, 1
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_REALTIME_PRIORITY = 10


@dataclass(frozen=True)
class Usage:
    """What happened on the machine in a span of `wall_s`.

    `cpu_s` is user + system time of the client's tree; `stolen_s` the hypervisor's steal and `foreign_s` what others
    ran, both on the two cores; `run_delay_s` is how long the client's threads were ready and not running.
    """

    wall_s: float
    cpu_s: float
    stolen_s: float
    foreign_s: float
    run_delay_s: float

    @property
    def noise_s(self) -> float:
        return self.stolen_s + self.foreign_s


class Meter:
    """Measures a tree of processes between two calls of `read`. `known` are our other processes: no strangers."""

    def __init__(self, root: int, known: Iterable[int]) -> None:
        self.root, self.known = root, (*known, os.getpid())

    def read(self) -> tuple[float, float, float, float, float]:
        """The raw counters now: moment, CPU of the tree, steal, CPU of all on the cores less ours, run-queue delay."""
        pids = tree(self.root)
        cpu_s = sum(_cpu_s(pid) for pid in pids)
        busy_s, stolen_s = _cores()
        ours_s = cpu_s + sum(_cpu_s(pid) for pid in self.known)
        return time.monotonic(), cpu_s, stolen_s, busy_s - ours_s, sum(_run_delay_s(pid) for pid in pids)

    def between(self, start: tuple[float, ...], end: tuple[float, ...]) -> Usage:
        wall_s, cpu_s, stolen_s, foreign_s, delay_s = (b - a for a, b in zip(start, end, strict=True))
        return Usage(wall_s, cpu_s, stolen_s, max(0.0, foreign_s), max(0.0, delay_s))


def tree(root: int) -> list[int]:
    """A process and all its living descendants; empty when it is gone."""
    try:
        process = psutil.Process(root)
        return [root, *(child.pid for child in process.children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def busiest(root: int, over_s: float = 0.5) -> int:
    """The process of a tree that uses most CPU from now on for `over_s`: while traffic flows, the one that sends."""
    before = {pid: _ran_s(pid) for pid in tree(root)}
    time.sleep(over_s)
    return max(before, key=lambda pid: _ran_s(pid) - before[pid])


def have_two_cores() -> bool:
    return {SERVER_CORE, CLIENT_CORE} <= os.sched_getaffinity(0)


@contextmanager
def realtime(pids: Iterable[int]) -> Iterator[None]:
    """Run the processes ahead of all others (SCHED_FIFO), for short windows. Raises PermissionError unless root."""
    threads = [int(task.name) for pid in pids for task in _tasks(pid)]
    for thread in threads:
        _schedule(thread, os.SCHED_FIFO, _REALTIME_PRIORITY)
    try:
        yield
    finally:
        for thread in threads:
            _schedule(thread, os.SCHED_OTHER, 0)


def _schedule(thread: int, policy: int, priority: int) -> None:
    try:
        os.sched_setscheduler(thread, policy, os.sched_param(priority))
    except ProcessLookupError:
        pass  # it ended meanwhile


def _tasks(pid: int) -> list[Path]:
    try:
        return list(Path(f"/proc/{pid}/task").iterdir())
    except FileNotFoundError:
        return []


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ["0"] * 20


def _cpu_s(pid: int) -> float:
    """User and system time, with that of the children it has waited for: what they used is not lost when they end."""
    return sum(int(ticks) for ticks in _stat(pid)[11:15]) * _TICK_S


def _cores() -> tuple[float, float]:
    """(busy, stolen) seconds of the two cores since boot."""
    busy = stolen = 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *ticks = line.split()
        if name in (f"cpu{SERVER_CORE}", f"cpu{CLIENT_CORE}"):
            user, nice, system, _idle, _iowait, _irq, _softirq, steal = (int(t) for t in ticks[:8])
            busy, stolen = busy + user + nice + system, stolen + steal
    return busy * _TICK_S, stolen * _TICK_S


def _ran_s(pid: int) -> float:
    return _schedstat_s(pid, 0)


def _run_delay_s(pid: int) -> float:
    return _schedstat_s(pid, 1)


def _schedstat_s(pid: int, field: int) -> float:
    """Time of all living threads: on a core (field 0), or ready and waiting for one (1)."""
    total_ns = 0
    for task in _tasks(pid):
        try:
            total_ns += int((task / "schedstat").read_text().split()[field])
        except (FileNotFoundError, ProcessLookupError):
            continue
    return total_ns / 1e9
