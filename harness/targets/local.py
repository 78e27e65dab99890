"""The local stack as a target: processes under supervisord, brought up and taken down through its own door.

The harness and the stack share a target file and a command line, never code. This module starts no engine itself. What
faults need to know of the stack's processes is here too; what is done to them is theirs.
"""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from harness import processes
from harness.model import EXIT_INTERRUPTED, UsageError
from harness.targets import url
from harness.targets.base import Target
from harness.targets.supervisord import Supervisord

DOOR = (sys.executable, "-m", "reference_stack.local")
PROFILES = (sys.executable, "-m", "reference_stack.profiles")
STATE = Path(".stack")
_ADMIN_DISTANCE = 4  # the port of Envoy's admin, counted from the gateway's
_STACK, _PROGRAM = "HARNESS_STACK", "SUPERVISOR_PROCESS_NAME"  # in the environment of all that a program starts
_POLL_S = 0.05

Process = tuple[int, int]  # pid and start: a pid alone may be somebody else's by now


def door(verb: str, *arguments: str) -> int:
    """Pass a verb (`up`, `down`, `status`, `logs`) to the stack; its exit code."""
    return subprocess.run([*DOOR, verb, *arguments], check=False).returncode


def profiles(*arguments: str) -> int:
    """Pass a question about engine profiles (`check`, `explain`, `suggest`, `args`) to the stack; its exit code."""
    return subprocess.run([*PROFILES, *arguments], check=False).returncode


def up(target_file: Path) -> bool:
    """Bring the stack up and wait until it serves. True when this call started it; False when it was up already.

    Raises UsageError when it cannot: the stack's own sentence (a port in use, an engine not installed). Raises
    KeyboardInterrupt when the user interrupted the stack's start; it has then taken itself down.
    """
    there = subprocess.run([*DOOR, "status"], capture_output=True, check=False).returncode == 0
    asked = [*DOOR, "up", "--target", str(target_file)]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    if done.returncode == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines() or ["it said nothing"]
        raise UsageError(f"the local stack did not come up: {said[-1]}")
    return not there


def down() -> None:
    """Take the stack of this directory down, and everything it started; out of reach of a terminal's Ctrl-C."""
    subprocess.run([*DOOR, "down"], capture_output=True, check=True, start_new_session=True)


def admin_url(target: Target) -> str:
    """Where the gateway's Envoy is asked for statistics and told runtime values."""
    parts = urlsplit(target.url)
    return f"http://{parts.hostname}:{(parts.port or 80) + _ADMIN_DISTANCE}"


# Its processes ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Program:
    """A program of the stack as it is now, and where it serves; `pid` and `started` are 0 when it has no process."""

    name: str
    url: str
    pid: int
    started: int

    @property
    def process(self) -> Process:
        return self.pid, self.started


class Stack:
    """The stack with this state directory. All but `is_up` raise OSError when its supervisord is not there."""

    def __init__(self, state: Path = STATE) -> None:
        self.state = state.resolve()
        self._supervisord = Supervisord(self.state)

    def is_up(self) -> bool:
        try:
            return bool(self._supervisord.programs())
        except OSError:
            return False

    def replicas(self, target: Target) -> list[Program]:
        """The replicas in the order of the target file."""
        return [self.program(f"engine-{number}", url) for number, url in enumerate(target.engines)]

    def program(self, name: str, url: str) -> Program:
        """A program by its name. A pid that has no living process is no pid: supervisord may learn of a death late."""
        _, pid = self._supervisord.programs().get(name, ("", 0))
        started = processes.started(pid) if pid else None
        return Program(name, url, pid, started) if started else Program(name, url, 0, 0)

    def said(self, name: str) -> str:
        """What supervisord says of a program: RUNNING, BACKOFF ..., which is no evidence that it serves."""
        return self._supervisord.programs().get(name, ("", 0))[0]

    def ensure(self, name: str) -> None:
        """Have it started if it is not, at once also when supervisord lets it wait for its next try."""
        state = self.said(name)
        if state == "BACKOFF":
            self._supervisord.stop(name)
        if state not in ("RUNNING", "STARTING"):
            self._supervisord.start(name)

    def tree(self, program: Program) -> list[Process]:
        """Every living process of a program: its descendants, its group, and those that left both but bear its mark."""
        found: dict[int, int] = {}
        with contextlib.suppress(psutil.NoSuchProcess):
            leader = psutil.Process(program.pid)
            found = {one.pid: processes.started(one.pid) or 0 for one in [leader, *leader.children(recursive=True)]}
        for pid in psutil.pids():
            with contextlib.suppress(OSError, psutil.Error):
                if os.getpgid(pid) == program.pid or self._marked(pid, program.name):
                    found[pid] = processes.started(pid) or 0
        return [(pid, started) for pid, started in found.items() if started]

    def _marked(self, pid: int, name: str) -> bool:
        environment = psutil.Process(pid).environ()
        return environment.get(_STACK) == str(self.state) and environment.get(_PROGRAM) == name


def wait_for_answer(target: Target, stack: Stack, program: Program, limit_s: float) -> tuple[Program, float] | None:
    """The process of this program that first answers a completion at its URL, and when (time.monotonic).

    None when none does within the limit, or the stack is gone.
    """
    for _ in ticks(limit_s):
        with contextlib.suppress(OSError):
            now = stack.program(program.name, program.url)
            if now.pid and url.serves(target, now.url) and processes.lives(*now.process):
                return now, time.monotonic()
        if not stack.is_up():
            break
    return None


def ticks(limit_s: float) -> Iterator[float]:
    """Now, and again every moment until the limit; yields the seconds so far."""
    start_s = time.monotonic()
    while (gone_s := time.monotonic() - start_s) <= limit_s:
        yield gone_s
        time.sleep(_POLL_S)
