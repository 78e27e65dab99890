"""A process that takes what others need: a core, or memory. It gives it back with its life, and its life is short.

    python -m harness.chaos.pressure core --for 20s --permit FILE
    python -m harness.chaos.pressure memory --size 2GiB --floor 1GiB --for 20s --permit FILE

It runs by a permit, and the kernel ends it when its time is over. Memory is taken step by step and written to; a step
that would leave less available than the floor is the last that is not taken.
"""

import argparse
import mmap
import signal
import sys
from pathlib import Path

import psutil

from harness import units
from harness.chaos import permit

STEP_BYTES = 32 * 2**20


def main() -> int:
    """Press until killed; 1 when there is no permit."""
    parser = argparse.ArgumentParser(prog="python -m harness.chaos.pressure", description="Take a core, or memory.")
    parser.add_argument("what", choices=("core", "memory"))
    parser.add_argument("--size", type=units.size, default=0, help="of memory")
    parser.add_argument("--floor", type=units.size, default=0, help="of memory that stays available")
    parser.add_argument("--for", dest="for_s", type=units.duration, required=True, help="how long")
    parser.add_argument("--permit", type=Path, required=True, help="a permit, without which it does not begin")
    asked = parser.parse_args()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, asked.for_s)
    try:
        permit.claim(asked.permit)
    except permit.Revoked:
        return 1
    if asked.what == "core":
        while True:
            pass
    held = take(asked.size, asked.floor)
    while held is not None:
        signal.pause()
    return 0


def take(size_bytes: int, floor_bytes: int) -> mmap.mmap:
    """Memory of that size, as much of it touched as the floor lets us."""
    held = mmap.mmap(-1, size_bytes)
    for start in range(0, size_bytes, STEP_BYTES):
        end = min(start + STEP_BYTES, size_bytes)
        if psutil.virtual_memory().available - (end - start) < floor_bytes:
            break
        held[start:end] = b"\xa5" * (end - start)
    return held


if __name__ == "__main__":
    sys.exit(main())
