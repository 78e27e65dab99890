"""Who a process is: its pid and the moment it started, for the kernel gives pids again. A zombie is dead."""

from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_STATE, _STARTED = 0, 19  # fields 3 and 22 of /proc/PID/stat, counted after the name in brackets
_DEAD = ("Z", "X")


def started(pid: int) -> int | None:
    """The start of a living process in the kernel's ticks since boot; None when there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[_STATE] in _DEAD else int(fields[_STARTED])


def lives(pid: int, since: int) -> bool:
    """Whether the process that had this pid and this start is still alive."""
    return started(pid) == since


def boot_id() -> str:
    """The same for as long as this machine stays up; pids and starts say nothing across it."""
    return BOOT_ID.read_text().strip()
