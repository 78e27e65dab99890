"""The processes of a stack, found by themselves: what is left when supervisord can no longer say.

A process belongs to a stack when its environment carries the stack's mark, when it is in the session that supervisord
led, or when a process that belongs started it. psutil compares start times, so a pid used again is never hit.
"""

import contextlib
import os
import time
from pathlib import Path

import psutil

from reference_stack.local.supervisor import MARK

PATIENCE_S = 3.0


def of_stack(state: Path) -> list[psutil.Process]:
    """Every living process of the stack with this state directory; never the caller or what it descends from."""
    me = psutil.Process()
    spared = {process.pid for process in (me, *me.parents())}
    session = _session(state)
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if _alive(process) and (os.getsid(process.pid) == session or _marked(process, state)):
                found |= {one.pid: one for one in (process, *process.children(recursive=True))}
    return [process for pid, process in found.items() if pid not in spared and _alive(process)]


def _session(state: Path) -> int | None:
    """The session that supervisord leads or led; None when its pid has gone to a stranger, after a reboot for one."""
    try:
        pid = int((state / "supervisord.pid").read_text())
        leader = psutil.Process(pid)
        stranger = _alive(leader) and not _marked(leader, state)
    except (OSError, ValueError, psutil.AccessDenied):
        return None
    except psutil.NoSuchProcess:
        stranger = False  # the leader is dead; its members keep the number from being used again
    return None if stranger else pid


def _marked(process: psutil.Process, state: Path) -> bool:
    return process.environ().get(MARK) == str(state)


def _alive(process: psutil.Process) -> bool:
    """Whether it runs; a zombie does not, and there may be nobody to reap it."""
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def end(processes: list[psutil.Process]) -> None:
    """SIGTERM, then SIGKILL for those that stay."""
    for act in (psutil.Process.terminate, psutil.Process.kill):
        for process in filter(_alive, processes):
            with contextlib.suppress(psutil.Error):
                act(process)
        wait_gone(processes, PATIENCE_S)


def wait_gone(processes: list[psutil.Process], limit_s: float) -> None:
    """Return when none of them lives, or at the limit."""
    deadline = time.monotonic() + limit_s
    while any(map(_alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.02)


def listening_on(port: int) -> int | None:
    """The pid of the process that listens on a TCP port, as far as we may know."""
    with contextlib.suppress(psutil.AccessDenied):
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port:
                return connection.pid
    return None
