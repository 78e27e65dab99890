"""Plays one worker's part of a plan: each request leaves at its absolute due time, whatever became of the others.

Three things are called at due times: `timerfd` wakes the loop, every socket callback polls the schedule before it
reads, and so does the collector between two observations. None of them parses, composes or writes when there is time
to do so earlier or later: bytes are composed a little ahead, answers are read when they are over.

It never skips, delays or repeats an arrival to save itself: a player that cannot keep up shows it in its send lag.
"""

import heapq
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import gevent
import orjson

from harness import plan_file
from harness.drivers.collector import Collector
from harness.drivers.connection import Endpoint, Exchange
from harness.drivers.pool import Pool
from harness.drivers.stream import Reply
from harness.drivers.timer import Nap, Slices, Timer
from harness.model import Outcome, Request, Tag

EARLY_S = 20e-6  # what falls due this soon is sent now: arming a timer for it takes as long
TICK_S = 0.25  # between two rounds of composing ahead and of collecting
AHEAD_S = 0.75
AHEAD_BYTES = 32 << 20
COMPOSE_COST_S = 200e-6  # of a request of a few thousand tokens
MOST_NAP_S = 0.0025
NAPS_PER_GAP = 4  # two tokens that waited unread together would share the later one's stamp
MEASURE_S = 1.0 - TICK_S
DRAIN_S = 1.0  # for answers still open when the run is asked to stop
WARM_LIMIT_S = 5.0
MOST_WARM = 512
_FOR_EVER = float("inf")


@dataclass(frozen=True, slots=True)
class Played:
    """What became of the plan: `why` is "finished" or "asked"."""

    sent: int
    done: int
    open: int
    why: str


class Player:
    """One worker's player. `lines` are its requests as the plan has them, in the order in which they fall due."""

    def __init__(
        self,
        lines: Sequence[bytes],
        wire: Callable[[Request], bytes],
        endpoints: Sequence[Endpoint],
        time_limit_s: float,
        collector: Collector,
    ) -> None:
        self._lines, self._wire, self._time_limit_s, self._collector = lines, wire, time_limit_s, collector
        self._next_line = 0
        self._ahead: deque[Exchange] = deque()  # composed, not yet due
        self._ahead_bytes = 0
        self._hang_ups: list[tuple[float, int, Exchange]] = []  # a heap: the plan's cancelling clients
        self._origin_s = self._armed_s = _FOR_EVER
        self._asked = self._dropped = False
        self._failure: OSError | None = None
        self.sent = 0
        loop = gevent.get_hub().loop
        self.pool = Pool(endpoints, loop, self.poll, collector.take)
        self._timer, self._nap = Timer(loop, self._wake), Nap(loop, self._idle_s)

    def warm(self) -> None:
        """Open the connections that the busiest second needs, half as many again, before the run begins."""
        dues = [orjson.loads(line)["due_s"] for line in self._lines]
        self.pool.warm(min(MOST_WARM, 4 + int(1.5 * busiest_second(dues))), gevent.sleep, WARM_LIMIT_S)

    def stop(self) -> None:
        """Send nothing that falls due from now on; `play` returns within a second or so."""
        self._asked = True

    def play(self, origin_s: float) -> Played:
        """Play from `origin_s` (monotonic) to the last answer. Raises OSError when this machine cannot go on."""
        self._origin_s = origin_s
        self._collector.begin(origin_s)
        self._look_ahead()
        self._schedule()
        end_s, measured_s = _FOR_EVER, time.monotonic()
        while self._failure is None:
            self._nap.start()
            gevent.sleep(TICK_S)
            self._nap.stop()
            now_s = time.monotonic()
            self.pool.set_clock()
            if self._asked and not self._dropped:
                self._drop_the_rest()
                end_s = now_s + DRAIN_S
            elif self._all_sent and end_s == _FOR_EVER:
                end_s = now_s + 2 * self._time_limit_s  # a first byte at the limit, and silence for as long again
            if (self._all_sent and not self.pool.in_flight) or now_s > end_s:
                return self._finish()
            self._look_ahead()
            self._collector.work(self._slices(), TICK_S)
            self.pool.sweep(now_s, self._time_limit_s)
            if now_s - measured_s > MEASURE_S:
                self._collector.measure(self._gauges())
                measured_s = now_s
        self._finish()  # nothing that was measured is lost
        raise self._failure

    def _finish(self) -> Played:
        left_open = self.pool.in_flight
        self._timer.close()
        self._nap.close()
        self.pool.abandon()
        self._collector.work(self._slices(), _FOR_EVER)
        self._collector.measure(self._gauges())
        why = "asked" if self._asked else "finished"
        return Played(sent=self.sent, done=self.sent - left_open, open=left_open, why=why)

    # The schedule ------------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Send what has fallen due. Costs a clock reading when nothing has."""
        if time.monotonic() >= self.pool.next_s:
            try:
                self._fire()
            except OSError as error:  # raised in a callback it would only be printed
                self._failure, self.pool.next_s = error, _FOR_EVER

    def _slices(self) -> Slices:
        return Slices(self.poll, self._room_s)

    def _room_s(self) -> float:
        return self.pool.next_s - time.monotonic()

    def _wake(self) -> None:
        self._armed_s = _FOR_EVER
        self.poll()
        self._schedule()

    def _idle_s(self) -> float:
        """How long nobody needs the loop: not past the next due moment, and not while a connection presses."""
        if self.pool.pressing or not self.pool.in_flight:
            return 0.0
        nap_s = min(MOST_NAP_S, self._collector.gap_s / NAPS_PER_GAP)
        return min(nap_s, self._room_s())

    def _schedule(self) -> None:
        """Wake in time for what is next. A timer armed for something already done costs less than arming it anew."""
        due_s = self._origin_s + self._ahead[0].request.due_s - EARLY_S if self._ahead else _FOR_EVER
        next_s = self.pool.next_s = min(due_s, self._hang_ups[0][0] if self._hang_ups else _FOR_EVER)
        if next_s < self._armed_s:
            self._armed_s = next_s
            self._timer.arm(next_s)

    def _fire(self) -> None:
        now_s = time.monotonic() + EARLY_S
        while self._ahead and self._origin_s + self._ahead[0].request.due_s <= now_s:
            exchange = self._ahead.popleft()
            self._ahead_bytes -= len(exchange.wire)
            self._send(exchange)
            if not self._ahead:
                self._compose_next()
            now_s = time.monotonic() + EARLY_S
        while self._hang_ups and self._hang_ups[0][0] <= now_s:
            _, _, exchange = heapq.heappop(self._hang_ups)
            if exchange.carrier is not None:
                exchange.reply.tags |= Tag.GAVE_UP
                exchange.carrier.hang_up(Outcome.CANCELLED_BY_US, time.monotonic())
        self._schedule()

    def _send(self, exchange: Exchange) -> None:
        self.sent += 1
        self.pool.carry(exchange)
        if exchange.request.give_up_s is not None:
            hang_up_s = exchange.reply.sent_s + exchange.request.give_up_s
            heapq.heappush(self._hang_ups, (hang_up_s, exchange.request.index, exchange))

    # Ahead of the schedule ---------------------------------------------------------------------------------------

    def _look_ahead(self) -> None:
        """Compose what falls due soon, at least the next request, within a bound of memory."""
        slices, horizon_s = self._slices(), time.monotonic() + AHEAD_S - self._origin_s
        while self._next_line < len(self._lines) and (
            not self._ahead or (self._ahead[-1].request.due_s < horizon_s and self._ahead_bytes < AHEAD_BYTES)
        ):
            slices.cut(COMPOSE_COST_S)
            self._compose_next()

    def _compose_next(self) -> None:
        if self._next_line < len(self._lines):
            request = plan_file.read_request(self._lines[self._next_line])
            self._next_line += 1
            exchange = Exchange(request, self._wire(request), Reply())
            self._ahead_bytes += len(exchange.wire)
            self._ahead.append(exchange)

    @property
    def _all_sent(self) -> bool:
        return not self._ahead and self._next_line >= len(self._lines)

    def _drop_the_rest(self) -> None:
        """Asked to stop: what was due until now is sent, the rest never."""
        self.poll()
        self._dropped = True
        self._ahead.clear()
        self._next_line = len(self._lines)
        self._schedule()

    def _gauges(self) -> dict[str, float]:
        return {
            "player.in_flight": self.pool.in_flight,
            "player.sent": self.sent,
            "player.done": self.sent - self.pool.in_flight,
            "player.connections": self.pool.connections,
            "player.resent": self.pool.resent,
        }


def busiest_second(dues_s: Sequence[float]) -> int:
    """The most arrivals within any one second."""
    most = first = 0
    for last, due_s in enumerate(dues_s):
        while due_s - dues_s[first] >= 1.0:
            first += 1
        most = max(most, last - first + 1)
    return most
