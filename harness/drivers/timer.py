"""When the loop wakes: at an absolute moment, to tens of microseconds, and not for every byte.

Every timer of an epoll loop is a thousand times coarser than a `timerfd` on CLOCK_MONOTONIC, which is watched like any
socket. Linux only.
"""

import ctypes
import os
import time
from collections.abc import Callable
from typing import Any

import gevent
from gevent.monkey import get_original

_LIBC = ctypes.CDLL(None, use_errno=True)
_CLOCK_MONOTONIC, _TFD_TIMER_ABSTIME = 1, 1
_READ = 1
_SLICE_S = 0.001
_PATIENCE = 4  # times its own cost, a piece may wait: a schedule that is always near must not stop the work
_TURN_S = 0.0005  # not 0, which gives other greenlets a turn but not the sockets
_WAKE_S = 100e-6  # what waking takes: no nap ends later than this before the next due moment
_sleep = get_original("time", "sleep")  # locust makes of time.sleep a greenlet's


class Timer:
    """Calls back once for each moment it was armed for; arming it again replaces the moment."""

    def __init__(self, loop: Any, callback: Callable[[], None]) -> None:
        self._fd = _LIBC.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._callback = callback
        self._spec = (ctypes.c_long * 4)()  # interval s, ns; value s, ns
        self._watcher = loop.io(self._fd, _READ)
        self._watcher.start(self._expired)

    def arm(self, at_s: float) -> None:
        """Wake at this monotonic moment; at once when it has passed."""
        self._spec[2], self._spec[3] = divmod(max(1, int(at_s * 1e9)), 10**9)
        if _LIBC.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, self._spec, None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def _expired(self) -> None:
        os.read(self._fd, 8)
        self._callback()

    def close(self) -> None:
        self._watcher.stop()
        self._watcher.close()
        os.close(self._fd)


class Slices:
    """Work of a greenlet beside a schedule, in pieces: no socket waits for more than a millisecond of it, and no piece
    begins that would keep the schedule waiting, if some patience helps.

    `poll` is the schedule's, `room_s` how long until it wants to be polled next.
    """

    def __init__(self, poll: Callable[[], None], room_s: Callable[[], float]) -> None:
        self._poll, self._room_s = poll, room_s
        self._began_s, self._patience_s = time.monotonic(), 0.0

    def cut(self, cost_s: float) -> None:
        """Called before each piece, of some `cost_s`: polls the schedule, and lets the sockets have their turn."""
        self._poll()
        self._patience_s += _PATIENCE * cost_s
        if time.monotonic() - self._began_s > _SLICE_S:
            self._turn()
        while self._patience_s > 0 and self._room_s() < cost_s:
            self._patience_s -= self._turn()

    def _turn(self) -> float:
        left_s = time.monotonic()
        gevent.sleep(_TURN_S)
        self._began_s = time.monotonic()
        return self._began_s - left_s


class Nap:
    """Lets a loop sleep a moment before it looks for ready sockets, so that one wake-up finds several.

    For loops whose sockets are stamped by the kernel: what waits unread is dated truly. `limit_s` says each time how
    long the loop may sleep at most, by which it holds its other appointments.
    """

    def __init__(self, loop: Any, limit_s: Callable[[], float]) -> None:
        self._limit_s = limit_s
        self._watcher = loop.prepare()

    def _before_looking(self) -> None:
        nap_s = self._limit_s() - _WAKE_S
        if nap_s > _WAKE_S:
            _sleep(nap_s)

    def start(self) -> None:
        self._watcher.start(self._before_looking)

    def stop(self) -> None:
        self._watcher.stop()

    def close(self) -> None:
        self._watcher.stop()
        self._watcher.close()
