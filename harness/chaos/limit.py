"""A step of a fault that hangs is ended: no fault stays because a probe waits for ever.

The kernel's timer interrupts whatever the main thread does, so that nothing of the step goes on behind our back, as it
would in a thread that was given up. The main thread only; it refuses others with ValueError.
"""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

AGAIN_S = 1.0


class _Over(BaseException):
    """No Exception: a step that swallows those would swallow its own end."""


def _over(number: int, _: FrameType | None) -> None:
    raise _Over


@contextlib.contextmanager
def limited(limit_s: float, what: str) -> Iterator[None]:
    """Raises TimeoutError when the block takes longer; a block that holds out is interrupted again every second."""
    before = signal.signal(signal.SIGALRM, _over)
    try:
        signal.setitimer(signal.ITIMER_REAL, limit_s, AGAIN_S)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except _Over:
        raise TimeoutError(f"{what} did not end within {limit_s:g} s") from None
    finally:
        signal.signal(signal.SIGALRM, before)
