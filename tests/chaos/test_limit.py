"""Steps that hang."""

import signal
import time

import pytest

from harness.chaos.limit import limited


def test_a_step_that_hangs_is_ended_though_it_swallows_every_exception() -> None:
    """Its own `except Exception` cannot keep it going."""
    with pytest.raises(TimeoutError, match=r"the probe did not end within 0\.05 s"), limited(0.05, "the probe"):
        while True:
            try:
                time.sleep(60)  # the hang itself, as in the next test: the limit must cut it short
            except Exception:
                continue


def test_a_step_that_swallows_even_that_is_interrupted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bare except holds out once, not for ever."""
    monkeypatch.setattr("harness.chaos.limit.AGAIN_S", 0.05)
    with pytest.raises(TimeoutError), limited(0.05, "the probe"):
        try:
            time.sleep(60)
        except BaseException:
            time.sleep(60)


def test_after_a_step_in_time_nothing_fires_and_the_handler_is_as_before() -> None:
    """The timer is off, and who used SIGALRM before has it again."""
    before = signal.getsignal(signal.SIGALRM)
    with limited(60, "the probe"):
        pass
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) is before


def test_other_exceptions_pass_through() -> None:
    """What a step raises by itself is told as it is."""
    with pytest.raises(ZeroDivisionError), limited(60, "the probe"):
        raise ZeroDivisionError
