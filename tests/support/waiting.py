"""Waiting for what a test is about, with a limit: nothing here sleeps for a time and hopes."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
PAUSE_S = 0.05


def until(true: Callable[[], T], what: str | Callable[[], str], limit_s: float = 30.0) -> T:
    """The first value that counts as true; AssertionError with `what`, said or asked for then, when the limit passes
    first."""
    end_s = time.monotonic() + limit_s
    while not (value := true()):
        if time.monotonic() > end_s:
            raise AssertionError(f"{what if isinstance(what, str) else what()}: not within {limit_s:g} s")
        time.sleep(PAUSE_S)  # between two looks; the limit is what ends the waiting
    return value
