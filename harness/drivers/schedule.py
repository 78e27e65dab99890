"""What is to be sent next: at the plan's own moments, and so long after the end of another request.

Requests are composed a little before they fall due, within a bound of memory, and those that wait for another's end as
soon as it has come. Knows no sockets and no clock: moments are seconds from the run's origin, the player says when a
request is over. It drops and moves nothing by itself.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import orjson

from harness import plan_file
from harness.drivers.connection import Exchange
from harness.model import Request

AHEAD_BYTES = 32 << 20  # of requests that are composed and not yet due
SOON_S = 0.5  # what falls due sooner than the next looks ahead would come to it
_FOR_EVER = float("inf")


class Schedule:
    """`lines` are requests as the plan has them, in the order in which they fall due, but for those that come after
    another; `compose` makes a request ready to be sent. `busiest` is the most requests without a group that fall due
    within one second."""

    def __init__(self, lines: Sequence[bytes], compose: Callable[[Request], Exchange]) -> None:
        self._compose = compose
        self._dated: list[tuple[float, int, Request]] = []  # a heap: what has a moment, and is not composed
        self._ahead: list[tuple[float, int, Exchange]] = []  # a heap: what is composed
        self._ahead_bytes = 0
        self._followers: dict[int, list[bytes]] = {}  # what waits for the end of a request, by its index
        self._left: Counter[int | None] = Counter()  # requests of each group that are not over
        planned, dues_s = [], []
        for line in lines:
            value = orjson.loads(line)
            if (group := value.get("group")) is None:
                dues_s.append(value["due_s"])
            else:
                self._left[group] += 1
            if (after := value.get("after")) is None:
                planned.append(line)
            else:
                self._followers.setdefault(after, []).append(line)
        self.busiest = busiest_second(dues_s)
        self._planned = iter(planned)
        self._read_on()

    @property
    def dated(self) -> bool:
        """Whether anything has a moment at which it falls due."""
        return bool(self._dated or self._ahead)

    @property
    def waiting(self) -> bool:
        """Whether anything waits for the end of another request."""
        return bool(self._followers)

    @property
    def next_s(self) -> float:
        """When the next request falls due."""
        ahead_s = self._ahead[0][0] if self._ahead else _FOR_EVER
        return min(ahead_s, self._dated[0][0]) if self._dated else ahead_s

    def pop(self) -> Exchange:
        """The request that falls due next; composed only now if there was no time or no room for it before."""
        if self._dated and not (self._ahead and self._ahead[0][:2] < self._dated[0][:2]):
            self._compose_next()
        _, _, exchange = heapq.heappop(self._ahead)
        self._ahead_bytes -= len(exchange.wire)
        return exchange

    def look_ahead(self, horizon_s: float, cut: Callable[[], None]) -> None:
        """Compose what falls due before `horizon_s` while there is room, and one at least. `cut` comes before each."""
        while self._dated and self._dated[0][0] < horizon_s and self._ahead_bytes < AHEAD_BYTES:
            cut()
            self._compose_next()
        self.refill(horizon_s)

    def refill(self, horizon_s: float) -> None:
        """Have one request ready at least, if any falls due so soon: there was no room for more."""
        if not self._ahead and self._dated and self._dated[0][0] < horizon_s:
            self._compose_next()

    def ended(self, request: Request, at_s: float) -> bool:
        """A request of a group is over, or will never be sent: what waits for that has its moment now.

        True when nothing is left of the group.
        """
        for line in self._followers.pop(request.index, ()):
            follower = plan_file.read_request(line)
            due_s = at_s + follower.think_s
            heapq.heappush(self._dated, (due_s, follower.index, replace(follower, due_s=due_s)))
            while self._dated and self._dated[0][0] < at_s + SOON_S:
                self._compose_next()
        self._left[request.group] -= 1
        return not self._left[request.group]

    def drop(self) -> list[Request]:
        """Forget all that is to come; tells which requests still waited for another's end, in the plan's order."""
        waited = [plan_file.read_request(line) for lines in self._followers.values() for line in lines]
        self._planned = iter(())
        self._dated.clear()
        self._ahead.clear()
        self._followers.clear()
        return sorted(waited, key=lambda request: request.index)

    def _compose_next(self) -> None:
        if self._dated:
            _, _, request = heapq.heappop(self._dated)
            if request.after is None:
                self._read_on()
            exchange = self._compose(request)
            self._ahead_bytes += len(exchange.wire)
            heapq.heappush(self._ahead, (request.due_s, request.index, exchange))

    def _read_on(self) -> None:
        """The plan's next line: it is the earliest of those that have not been read."""
        if (line := next(self._planned, None)) is not None:
            request = plan_file.read_request(line)
            heapq.heappush(self._dated, (request.due_s, request.index, request))


def busiest_second(dues_s: Sequence[float]) -> int:
    """The most arrivals within any one second."""
    most = first = 0
    for last, due_s in enumerate(dues_s):
        while due_s - dues_s[first] >= 1.0:
            first += 1
        most = max(most, last - first + 1)
    return most
