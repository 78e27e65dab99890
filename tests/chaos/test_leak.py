"""How a leak steps: to its aim, above its floor, no faster than asked, and no further than the device gives."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as some

from harness.chaos import leak
from harness.chaos.leak import OutOfMemory

GIB = 2**30


class Card:
    """A device of 16 GiB in memory, which may refuse before it is full."""

    simulated = True

    def __init__(self, others=0, refuses_above=16 * GIB, total=16 * GIB):
        self.total, self.others, self.refuses_above, self.mine, self.least_free = total, others, refuses_above, 0, total

    def memory(self):
        return self.total - self.others - self.mine, self.total

    def take(self, size_bytes):
        if self.mine + size_bytes > self.refuses_above:
            raise OutOfMemory
        self.mine += size_bytes
        self.least_free = min(self.least_free, self.memory()[0])


def lines(card, aim, step=GIB, floor=0, ticks=1000):
    return list(leak.leak(card, aim, step, floor, map(float, range(ticks))))


def test_the_last_step_is_what_is_left():
    """An aim that is no multiple of the step is met exactly, and every line says what was held and free."""
    card = Card()
    said = lines(card, aim=int(2.5 * GIB))
    assert [line["held_bytes"] / GIB for line in said] == [1, 2, 2.5, 2.5]
    assert [line.get("free_bytes", 0) / GIB for line in said] == [16, 15, 14, 0]
    assert said[-1]["stopped"] == "all is held" and card.mine == int(2.5 * GIB)


def test_it_waits_at_the_floor_and_goes_on():
    """At its floor it says once that it waits; when others give memory back it takes that, to its aim."""
    card = Card(others=12 * GIB)
    ticking = leak.leak(card, 8 * GIB, GIB, 2 * GIB, map(float, itertools.count()))
    assert [next(ticking)["held_bytes"] // GIB for _ in range(2)] == [1, 2]
    assert "floor" in next(ticking)["waiting"]
    card.others = 0
    rest = list(ticking)
    assert rest[-1]["stopped"] == "all is held" and card.mine == 8 * GIB
    assert not any("waiting" in line for line in rest)


def test_waiting_is_said_once():
    """However long it waits, it says so once."""
    assert [line["waiting"] for line in lines(Card(others=16 * GIB), aim=GIB, ticks=50)] == [
        "any more would leave less free than the floor"
    ]


def test_the_last_step_before_the_floor_is_cut():
    """With room for less than a step it takes that much, in whole grains, and waits."""
    card = Card(others=13 * GIB - 1)
    said = lines(card, aim=8 * GIB, step=2 * GIB, ticks=5)
    assert [line["held_bytes"] for line in said] == [2 * GIB, 3 * GIB, 3 * GIB]


def test_the_first_refusal_is_the_last():
    """It keeps what it has at the first allocation that is refused, and asks for no more."""
    card = Card(refuses_above=3 * GIB)
    said = lines(card, aim=8 * GIB)
    assert said[-1] == {"at_s": 3.0, "free_bytes": 13 * GIB, "held_bytes": 3 * GIB, "stopped": "out of memory"}
    assert card.mine == 3 * GIB


SIZES = some.integers(0, 64).map(lambda mib: mib * 2**20)


@given(others=SIZES, aim=SIZES.filter(bool), step=SIZES.filter(bool), floor=SIZES)
def test_limits_hold(others, aim, step, floor):
    """It never holds more than its aim, never leaves less than its floor, and gets all there is room for."""
    card = Card(others, refuses_above=64 * 2**20, total=64 * 2**20)
    said = lines(card, aim, step, floor, ticks=200)
    assert card.mine <= aim
    assert card.least_free >= floor or card.mine == 0
    room = max(0, 64 * 2**20 - others - floor)
    assert card.mine == aim or room - card.mine < min(step, aim - card.mine, leak.GRAIN_BYTES)
    held = [line["held_bytes"] for line in said]
    assert all(0 <= later - earlier <= step for earlier, later in itertools.pairwise([0, *held]))


def test_ticks_are_never_made_up_for(monkeypatch):
    """After a step that took three periods the next tick is a whole period later, not at once."""
    now = [100.0]
    monkeypatch.setattr(leak.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(leak.time, "sleep", lambda pause_s: now.__setitem__(0, now[0] + pause_s))
    ticking = leak.every(1.0)
    assert [next(ticking), next(ticking)] == [0.0, 1.0]
    now[0] += 3.5
    assert next(ticking) == 4.5
    assert next(ticking) == 5.5


@pytest.mark.parametrize(("text", "of_total"), [("10%", 1.6 * GIB), ("512MiB", GIB / 2), ("0%", 0)])
def test_amounts(text, of_total):
    """A limit is a size, or a share of the device."""
    assert leak._amount(text)(16 * GIB) == int(of_total)
