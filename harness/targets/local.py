"""The local stack as a target: processes under supervisord, brought up and taken down through its own door.

The harness and the stack share a target file and a command line, never code. This module starts no engine itself.
"""

import subprocess
import sys
from pathlib import Path

from harness.model import EXIT_INTERRUPTED, UsageError

DOOR = (sys.executable, "-m", "reference_stack.local")


def door(verb: str, *arguments: str) -> int:
    """Pass a verb (`up`, `down`, `status`, `logs`) to the stack; its exit code."""
    return subprocess.run([*DOOR, verb, *arguments], check=False).returncode


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
