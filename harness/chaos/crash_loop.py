"""A process that ends each new process of one program of the local stack as soon as it is there.

    python -m harness.chaos.crash_loop --stack .stack --program engine-0 --for 20s --permit FILE

So the program comes up bad for that long, and supervisord tries again and again. It runs by a permit, and the kernel
ends it a little after its time whatever it waits for: the program is then as good as it ever was.
"""

import argparse
import contextlib
import os
import signal
import sys
from pathlib import Path

from harness import processes, units
from harness.chaos import permit
from harness.targets.local import Stack, ticks

GRACE_S = 5.0


def main() -> int:
    """Kill until the time is over; 1 when there is no permit."""
    parser = argparse.ArgumentParser(prog="python -m harness.chaos.crash_loop", description="Keep a program crashing.")
    parser.add_argument("--stack", type=Path, required=True, help="the stack's state directory")
    parser.add_argument("--program", required=True, help="which of its programs")
    parser.add_argument("--for", dest="for_s", type=units.duration, required=True, help="how long")
    parser.add_argument("--permit", type=Path, required=True, help="a permit, without which it does not begin")
    asked = parser.parse_args()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, asked.for_s + GRACE_S)
    try:
        permit.claim(asked.permit)
    except permit.Revoked:
        return 1
    stack = Stack(asked.stack)
    for _ in ticks(asked.for_s):
        with contextlib.suppress(OSError):  # a stack that is down has nothing to kill, and may come back
            kill(stack, asked.program)
    return 0


def kill(stack: Stack, name: str) -> None:
    """Kill what runs of the program now."""
    program = stack.program(name, "")
    for pid, started in stack.tree(program) if program.pid else []:
        if processes.lives(pid, started):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
