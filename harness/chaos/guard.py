"""The dead man's switch: a process that takes one fault back when nobody else does.

    python -m harness.chaos.guard RECORD

It lives in a session of its own and listens on a pipe whose other end only the fault's owner holds. The pipe's end (the
owner died, however it died), the fault's time, or an order has it undo the fault by its record. Only the owner's word
that the fault is proven gone disarms it. It reads the record, the fault and the target before it says that it is armed,
so that it needs nothing of a disk or a directory later. It cannot outlive the machine: `harness heal` is for that.
"""

import contextlib
import itertools
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from harness.chaos import undo
from harness.chaos.fault import Refused, Unproven
from harness.chaos.journal import Journal
from harness.log import Log
from harness.model import EXIT_UNSAFE

ARMED_LIMIT_S = 30.0  # imports, on a busy machine
ORDER_LIMIT_S = undo.TRIES * (undo.UNDO_LIMIT_S + undo.UNDONE_LIMIT_S + undo.PAUSE_S) + undo.LOCK_LIMIT_S
LEAVE_LIMIT_S = 5.0
LOOK_S = 1.0  # a child of the owner may hold the pipe open: the owner itself is looked at too
ARMED, REFUSED, HEALED, FAILED = "armed", "refused", "healed", "failed"  # what a guard says, the first word of a line
UNDO, DISARM = "undo", "disarm"  # what it is told


class _Pipe:
    """Lines from a pipe, each awaited with a limit."""

    def __init__(self, fd: int) -> None:
        self._fd, self._held = fd, b""

    def line(self, limit_s: float) -> str | None:
        """The next line; None when none came in time. Raises EOFError at the pipe's end."""
        limit = time.monotonic() + limit_s
        while b"\n" not in self._held:
            ready, _, _ = select.select([self._fd], [], [], max(0.0, limit - time.monotonic()))
            if not ready:
                return None
            if not (piece := os.read(self._fd, 4096)):
                raise EOFError
            self._held += piece
        line, _, self._held = self._held.partition(b"\n")
        return line.decode(errors="replace")


# The owner's side -------------------------------------------------------------------------------------------------


class Guard:
    """A guard of this process's own. Raises Refused unless it is armed: it could not take the fault back."""

    def __init__(self, record: Path) -> None:
        self.word = ""  # what it said last, once that ends its watch
        self._process = subprocess.Popen(
            [sys.executable, "-m", "harness.chaos.guard", str(record)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert self._process.stdin and self._process.stdout
        self._orders, self._pipe = self._process.stdin.fileno(), _Pipe(self._process.stdout.fileno())
        try:
            self._wait_until_armed()
        except BaseException:
            self._process.kill()  # nothing is broken yet
            self._process.wait()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def _wait_until_armed(self) -> None:
        limit, said = time.monotonic() + ARMED_LIMIT_S, "nothing"
        with contextlib.suppress(EOFError):
            while (line := self._pipe.line(max(0.0, limit - time.monotonic()))) is not None:
                if line == ARMED:
                    return
                said = line.removeprefix(REFUSED).strip() or said
        raise Refused(f"no guard could be armed; it said: {said}")

    def watches(self, limit_s: float = 0.0) -> bool:
        """Whether it still stands by after that long; False as soon as it took the fault back, gave up or died."""
        limit = time.monotonic() + limit_s
        try:
            while not self.word:
                line = self._pipe.line(max(0.0, limit - time.monotonic()))
                if line is None:
                    return True
                self.word = line if line.startswith((HEALED, FAILED)) else ""
        except EOFError:
            self.word = "died"
        return False

    @property
    def healed(self) -> bool:
        """Whether it took the fault back and proved it."""
        return not self.watches() and self.word.startswith(HEALED)

    def order(self) -> bool:
        """Have it take the fault back now; whether it did, and proved it."""
        self._tell(UNDO)
        self.watches(ORDER_LIMIT_S)
        return self.healed

    def disarm(self) -> None:
        """The fault is proven gone: tell it so."""
        self._tell(DISARM)

    def leave(self) -> None:
        """Wait until it is gone, too."""
        try:
            self._process.wait(LEAVE_LIMIT_S)
        except subprocess.TimeoutExpired:  # it has nothing left to do
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                pipe.close()

    def _tell(self, order: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._orders, f"{order}\n".encode())


# The guard's side -------------------------------------------------------------------------------------------------


class _Watch:
    """One fault under guard."""

    def __init__(self, path: Path) -> None:
        self.path, self.record = path, undo.read(path)
        self.fault, self.target = self.record.revived()
        self._pipe, self._asked = _Pipe(sys.stdin.fileno()), False
        # From here on by the clock that nobody sets: the record, which outlives a boot, can only have wall time.
        self._limit_s = _boot_s() + self.record.deadline_wall_s - time.time()
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._terminated)

    def _terminated(self, number: int, _: FrameType | None) -> None:
        self._asked = True

    def until(self) -> str:
        """Wait; why the fault must be taken back, or nothing when it need not be."""
        while (left_s := self._limit_s - _boot_s()) > 0:
            try:
                told = self._pipe.line(min(LOOK_S, left_s))
            except EOFError:
                return "parent gone"
            if told == DISARM:
                return ""
            if told == UNDO or self._asked:
                return "order"
            if not self.record.owner_lives:
                return "parent gone"
        return "ttl"

    def disarmed(self) -> bool:
        """Whether the owner took the fault back while we waited for our turn."""
        with contextlib.suppress(EOFError):
            while (told := self._pipe.line(0.0)) is not None:
                if told == DISARM:
                    return True
        return False

    def take_back(self, why: str) -> int:
        """Undo, prove, say so; the exit code. What cannot be written down is done all the same."""
        journal = Journal(self.record.fault, _log(self.record.run_dir), _path(self.record.run_dir))
        with contextlib.suppress(OSError):
            if why != "order":
                journal.note("aborted", why=why)
            journal.note("healing", why=why)
        try:
            evidence = undo.mend(self.fault, self.target, self.record.aim.state)
            undo.remove(self.path)
        except (Unproven, OSError) as error:
            _say(f"{FAILED} {error}")
            with contextlib.suppress(OSError):
                journal.note("unproven", step="undone", why=f"{error}; by hand: {self.record.aim.undo}")
            return EXIT_UNSAFE
        with contextlib.suppress(OSError):
            journal.note("healed", why=why, evidence=evidence)
        _say(f"{HEALED} {why}")
        return 0


def _boot_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)  # goes on while the machine sleeps, as a fault does


def _path(run_dir: str | None) -> Path | None:
    return Path(run_dir) if run_dir else None


def _log(run_dir: str | None) -> Log | None:
    """A log of our own in the run's directory; none when there is no run, or no room."""
    if run_dir is None:
        return None
    for number in itertools.count(1):
        path = Path(run_dir) / f"log.guard-{number}.jsonl"
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o644))
            return Log(path)
        except FileExistsError:
            continue
        except OSError:
            break
    return None


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # nobody listens any more
        os.write(sys.stdout.fileno(), f"{line}\n".encode())


def main() -> int:
    """Guard the fault of one record until it is disarmed or the fault is taken back."""
    try:
        watch = _Watch(Path(sys.argv[1]))
    except Exception as error:  # whatever it is, the owner must not inject
        _say(f"{REFUSED} {error}")
        return 1
    _say(ARMED)
    why = watch.until()
    if not why:
        return 0
    with undo.held(watch.path):
        return 0 if watch.disarmed() else watch.take_back(why)


if __name__ == "__main__":
    sys.exit(main())
