"""The local stack as a target: processes under supervisord, brought up and taken down through its own door.

The harness and the stack share a target file and a command line, never code. This module starts no engine itself.
"""

import subprocess
import sys
from pathlib import Path

from harness.model import UsageError

DOOR = (sys.executable, "-m", "reference_stack.local")


def door(verb: str, *arguments: str) -> int:
    """Pass a verb (`up`, `down`, `status`, `logs`) to the stack; its exit code."""
    return subprocess.run([*DOOR, verb, *arguments], check=False).returncode


def running(target_file: Path) -> bool:
    """Whether every process of this target's stack runs."""
    asked = [*DOOR, "status", "--target", str(target_file)]
    return subprocess.run(asked, capture_output=True, check=False).returncode == 0


def up(target_file: Path) -> bool:
    """Bring the stack up and wait until it serves. True when this call started it; False when it was up already.

    Raises UsageError when it cannot: the stack's own sentence (a port in use, an engine not installed).
    """
    if running(target_file):
        return False
    asked = [*DOOR, "up", "--target", str(target_file)]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines() or ["it said nothing"]
        raise UsageError("the local stack did not come up: " + said[-1].removeprefix("stack: "))
    return True


def down(target_file: Path) -> None:
    """Take the stack down, and everything it started."""
    subprocess.run([*DOOR, "down", "--target", str(target_file)], capture_output=True, check=False)
