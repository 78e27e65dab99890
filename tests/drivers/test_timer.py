"""When the loop wakes: how long a nap is, and when there is none."""

from types import SimpleNamespace

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


class Clock:
    """A monotonic clock that work and turns move on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.turns = 0.0, 0
        monkeypatch.setattr(timer, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        monkeypatch.setattr(timer, "gevent", SimpleNamespace(sleep=self.turn))

    def turn(self, _: float) -> None:
        self.turns += 1
        self.now_s += 0.001


def test_no_piece_begins_just_before_a_due_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece that does not fit before the schedule wants the loop waits until it does."""
    clock = Clock(monkeypatch)
    due_s = [0.0001, 0.0105]
    slices = timer.Slices(lambda: None, lambda: min(due for due in due_s if due >= clock.now_s) - clock.now_s)
    slices.cut(0.0004)
    assert clock.turns == 1
    slices.cut(0.0004)
    assert clock.turns == 1


def test_a_schedule_that_is_always_near_does_not_stop_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patience is a few times what the pieces cost, all together, whatever the schedule asks."""
    clock = Clock(monkeypatch)
    slices = timer.Slices(lambda: None, lambda: 0.0)
    for _ in range(1000):
        slices.cut(0.0001)
    assert clock.turns <= 1000 * 4 * 0.0001 / 0.001 + 1
