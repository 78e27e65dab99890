"""A process that may run only while a file is there, and holds a lock on it for as long as it lives.

Who starts the process makes the file first; who must end it, then or later, this process or another, removes the file.
The kernel drops the lock with the process, so nobody guesses from a pid whether it lives, and a process that is still
starting when its permit is taken away finds none and ends: whichever comes first, it is over.
"""

import contextlib
import fcntl
import json
import os
import signal
import time
from pathlib import Path

from harness import processes

_POLL_S = 0.02


class Revoked(Exception):  # noqa: N818 -- an outcome, not an error
    """There is no permit, or another process has it."""


def grant(path: Path) -> None:
    """Make the permit. Raises FileExistsError when it was granted before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))


def claim(path: Path) -> None:
    """Take the permit for this process and for as long as it lives. Raises Revoked."""
    try:
        held = os.open(path, os.O_RDWR)
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (FileNotFoundError, BlockingIOError):
        raise Revoked from None
    if not os.fstat(held).st_nlink:
        raise Revoked
    me = os.getpid()
    os.pwrite(held, json.dumps({"pid": me, "started": processes.started(me)}).encode(), 0)


def revoke(path: Path, limit_s: float = 5.0) -> None:
    """End the process that holds the permit, if one does, and remove the permit; nothing to do without one.

    Raises TimeoutError when the process is still there at the limit, and leaves the permit.
    """
    try:
        held = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return
    try:
        deadline_s = time.monotonic() + limit_s
        while not _locked(held):
            holder = os.pread(held, 4096, 0).decode()
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"the process {holder} of {path} does not end")
            _kill(holder)
            time.sleep(_POLL_S)
        path.unlink(missing_ok=True)
    finally:
        os.close(held)


def _locked(held: int) -> bool:
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _kill(holder: str) -> None:
    """SIGKILL the holder, once it has said who it is and if it is still the same process."""
    if holder:
        who = json.loads(holder)
        if processes.lives(who["pid"], who["started"]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(who["pid"], signal.SIGKILL)
