"""What is due next, and what waits for another's end: no sockets, no clock."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from harness import plan_file
from harness.drivers import schedule as schedules
from harness.drivers.connection import Exchange
from harness.drivers.schedule import Schedule, busiest_second
from harness.drivers.stream import Reply
from harness.model import Request, Window

ASKED = Request(index=0, due_s=0.0, class_name="chat", raw=True, group=1)


def made(requests: Sequence[Request], size: int = 10) -> tuple[Schedule, list[int]]:
    """A schedule, and the indexes of what it has composed so far."""
    composed: list[int] = []

    def compose(request: Request) -> Exchange:
        composed.append(request.index)
        return Exchange(request, bytes(size), Reply())

    header = plan_file.PlanHeader("s", 0, len(requests), (Window("steady", 0, 1),), 1.0)
    return Schedule(list(plan_file.lines(header, requests))[1:], compose), composed


def request(index: int, due_s: float, **more: Any) -> Request:
    return replace(ASKED, index=index, due_s=due_s, **more)


def popped(schedule: Schedule) -> list[tuple[int, float]]:
    """All that has a moment, in the order in which it falls due."""
    found = []
    while schedule.dated:
        due_s = schedule.next_s
        exchange = schedule.pop()
        assert exchange.request.due_s == due_s
        found.append((exchange.request.index, due_s))
    return found


def test_the_plan_s_moments_come_in_their_order() -> None:
    """Composed ahead or not, what falls due first comes first."""
    requests = [request(k, k / 10) for k in range(9)]
    schedule, composed = made(requests)
    schedule.look_ahead(0.45, lambda: None)
    assert composed == [0, 1, 2, 3, 4]
    assert popped(schedule) == [(k, k / 10) for k in range(9)]
    assert schedule.next_s == float("inf")


def test_what_comes_after_another_waits_for_its_end() -> None:
    """It falls due so long after the real end, whatever moment the capture had for it."""
    schedule, composed = made([request(0, 0.0), request(1, 0.2, after=0, think_s=1.5), request(2, 5.0, group=2)])
    schedule.look_ahead(10, lambda: None)
    assert composed == [0, 2]
    first = schedule.pop().request
    assert (schedule.next_s, schedule.waiting) == (5.0, True)
    assert schedule.ended(first, 2.0) is False
    assert (schedule.next_s, schedule.waiting) == (3.5, False)
    assert popped(schedule) == [(1, 3.5), (2, 5.0)]


def test_what_falls_due_at_once_is_composed_at_once() -> None:
    """A short think time leaves no round of looking ahead in between; a long one does."""
    requests = [request(0, 0.0), request(1, 0, after=0, think_s=0.1), request(2, 0, after=0, think_s=9)]
    schedule, composed = made(requests)
    schedule.ended(schedule.pop().request, 1.0)
    assert composed == [0, 1]


def test_the_end_of_a_group_is_told_once() -> None:
    """A group is over with the last of its requests, in whatever order they end."""
    schedule, _ = made([request(k, 0.0, group=k % 2) for k in range(4)])
    requests = [schedule.pop().request for _ in range(4)]
    random.Random(3).shuffle(requests)
    left = {0: 2, 1: 2}
    for one in requests:
        left[one.group or 0] -= 1
        assert schedule.ended(one, 1.0) is (left[one.group or 0] == 0)


def test_memory_is_bounded_and_nothing_comes_late_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past the bound nothing more is composed ahead, but what falls due is."""
    monkeypatch.setattr(schedules, "AHEAD_BYTES", 25)
    schedule, composed = made([request(k, k / 10) for k in range(9)])
    schedule.look_ahead(10, lambda: None)
    assert composed == [0, 1, 2]
    assert [index for index, _ in popped(schedule)] == list(range(9))


def test_at_least_the_next_request_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """However large it is; what is far off has time."""
    monkeypatch.setattr(schedules, "AHEAD_BYTES", 0)
    schedule, composed = made([request(0, 0.0), request(1, 0.1), request(2, 200.0)])
    schedule.look_ahead(1.0, lambda: None)
    assert composed == [0]
    schedule.pop()
    schedule.refill(1.0)
    assert composed == [0, 1]
    schedule.pop()
    schedule.refill(1.0)
    assert composed == [0, 1]


def test_what_was_dropped_never_comes_and_what_waited_is_told() -> None:
    """Forgetting the rest leaves nothing due, and says which requests never got a moment."""
    schedule, _ = made([request(0, 0.0), request(3, 1.0, after=2), request(2, 1.0, after=0), request(4, 9.0)])
    first = schedule.pop().request
    assert [one.index for one in schedule.drop()] == [2, 3]
    schedule.ended(first, 1.0)
    assert not schedule.dated
    assert schedule.drop() == []


def test_only_requests_without_a_group_want_connections_of_everybody() -> None:
    """The busiest second counts them alone."""
    free = [request(k, k / 10, group=None) for k in range(3)]
    assert made([*free, *[request(k, 0.0) for k in range(3, 9)]])[0].busiest == 3


def test_the_busiest_second_is_found_between_whole_seconds() -> None:
    """The pool is opened for the most arrivals that any one second holds."""
    assert busiest_second([0.0, 0.9, 1.0, 1.1, 1.89, 5.0]) == 4
    assert busiest_second([]) == 0
