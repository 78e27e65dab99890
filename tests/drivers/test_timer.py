"""When the loop wakes: how long a nap is, and when there is none."""

import gevent
import pytest

from harness.drivers import timer
from harness.drivers.timer import Nap


def naps(monkeypatch: pytest.MonkeyPatch, limit_s: float) -> list[float]:
    """The naps that a loop takes on its way to a greenlet that waits."""
    taken: list[float] = []
    monkeypatch.setattr(timer, "_sleep", taken.append)
    nap = Nap(gevent.get_hub().loop, lambda: limit_s)
    nap.start()
    gevent.sleep(0.01)
    nap.close()
    return taken


def test_a_nap_ends_before_the_next_appointment(monkeypatch: pytest.MonkeyPatch) -> None:
    """However soon the loop is needed, it sleeps for less than that."""
    taken = naps(monkeypatch, 0.001)
    assert taken
    assert all(0 < nap_s < 0.001 for nap_s in taken)


@pytest.mark.parametrize("limit_s", [-1.0, 0.0, 0.0001])
def test_a_loop_that_is_needed_now_takes_no_nap(monkeypatch: pytest.MonkeyPatch, limit_s: float) -> None:
    """Waking takes as long as so short a nap."""
    assert naps(monkeypatch, limit_s) == []
