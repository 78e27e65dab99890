"""A child that does not outlive its parent. Linux tells it by a signal; what died before it could ask is asked too."""

import ctypes
import os
import signal

CONDUCTOR = "HARNESS_CONDUCTOR"  # the variable that tells a child the pid of the conductor that started it
_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """SIGTERM this process when `parent`, which started it, dies, however it dies; at once when it already has."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


def conductor() -> int:
    """The pid of the conductor, as it was told to its children; our own parent's where none is told."""
    return int(os.environ.get(CONDUCTOR, os.getppid()))
