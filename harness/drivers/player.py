"""Plays one worker's part of a plan: each request leaves at its absolute due time, whatever became of the others.

The one exception is the plan's: what comes after another request falls due so long after that one's end.

Three things are called at due times: `timerfd` wakes the loop, every socket callback polls the schedule before it
reads, and so does the collector between two observations. None of them parses, composes or writes when there is time
to do so earlier or later: bytes are composed a little ahead, answers are read when they are over.

It never skips, delays or repeats an arrival to save itself: a player that cannot keep up shows it in its send lag. What
the plan's own cap of requests in flight has it leave out is recorded as never sent, and counted.
"""

import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import gevent

from harness.drivers.collector import Collector
from harness.drivers.connection import Endpoint, Exchange
from harness.drivers.pool import Pool
from harness.drivers.schedule import Schedule
from harness.drivers.stream import Reply
from harness.drivers.timer import Nap, Slices, Timer
from harness.model import Request

EARLY_S = 20e-6  # what falls due this soon is sent now: arming a timer for it takes as long
TICK_S = 0.25  # between two rounds of composing ahead and of collecting
AHEAD_S = 0.75
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
    """One worker's player. `lines` are its requests as the plan has them, in the order in which they fall due; of more
    than `in_flight_cap` at once it sheds those that fall due last."""

    def __init__(
        self,
        lines: Sequence[bytes],
        wire: Callable[[Request], bytes],
        endpoints: Sequence[Endpoint],
        time_limit_s: float,
        collector: Collector,
        in_flight_cap: float = _FOR_EVER,
    ) -> None:
        self._wire, self._time_limit_s, self._collector = wire, time_limit_s, collector
        self._in_flight_cap = in_flight_cap
        self._closings: list[tuple[float, int, bool, Exchange]] = []  # a heap: clients that hang up, or close one side
        self._origin_s = self._armed_s = _FOR_EVER
        self._asked = self._dropped = False
        self._failure: OSError | None = None
        self.sent = self.shed = 0
        loop = gevent.get_hub().loop
        self.pool = Pool(endpoints, loop, self.poll, self._over)
        self._schedule = Schedule(lines, self._compose)
        self._timer, self._nap = Timer(loop, self._wake), Nap(loop, self._idle_s)

    def warm(self) -> None:
        """Open the connections that the busiest second needs, half as many again, before the run begins.

        Groups open their own, each when its first request is near.
        """
        if self._schedule.busiest:
            self.pool.warm(min(MOST_WARM, 4 + int(1.5 * self._schedule.busiest)), gevent.sleep, WARM_LIMIT_S)

    def stop(self) -> None:
        """Send nothing that falls due from now on; `play` returns within a second or so."""
        self._asked = True

    def play(self, origin_s: float) -> Played:
        """Play from `origin_s` (monotonic) to the last answer. Raises OSError when this machine cannot go on."""
        self._origin_s = origin_s
        self._collector.begin(origin_s)
        self._look_ahead()
        self._arm()
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
            elif self._schedule.dated:
                end_s = _FOR_EVER
            elif end_s == _FOR_EVER:
                end_s = now_s + 2 * self._time_limit_s  # a first byte at the limit, and silence for as long again
            if not (self._schedule.dated or self.pool.in_flight) or now_s > end_s:
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
        never_due = self._schedule.drop()
        self.pool.abandon()
        if self._failure is None:
            for request in never_due:
                self._collector.take(Exchange(request, b"", Reply()))
        self._timer.close()
        self._nap.close()
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
        self._arm()

    def _idle_s(self) -> float:
        """How long nobody needs the loop: not past the next due moment, not while a connection presses, and never when
        the end of an answer may date another request."""
        if self.pool.pressing or not self.pool.in_flight or self._schedule.waiting:
            return 0.0
        nap_s = min(MOST_NAP_S, self._collector.gap_s / NAPS_PER_GAP)
        return min(nap_s, self._room_s())

    def _arm(self) -> None:
        """Wake in time for what is next. A timer armed for something already done costs less than arming it anew."""
        due_s = self._origin_s + self._schedule.next_s - EARLY_S
        next_s = self.pool.next_s = min(due_s, self._closings[0][0] if self._closings else _FOR_EVER)
        if next_s < self._armed_s:
            self._armed_s = next_s
            self._timer.arm(next_s)

    def _fire(self) -> None:
        now_s = time.monotonic() + EARLY_S
        while self._origin_s + self._schedule.next_s <= now_s:
            self._send(self._schedule.pop())
            now_s = time.monotonic() + EARLY_S
            self._schedule.refill(now_s + AHEAD_S - self._origin_s)
        while self._closings and self._closings[0][0] <= now_s:
            _, _, gives_up, exchange = heapq.heappop(self._closings)
            if (connection := exchange.carrier) is not None:
                (connection.give_up if gives_up else connection.half_close)()
        self._arm()

    def _send(self, exchange: Exchange) -> None:
        if self.pool.in_flight >= self._in_flight_cap:
            self.shed += 1
            self._over(exchange)
            return
        self.sent += 1
        self.pool.carry(exchange)
        request, sent_s = exchange.request, exchange.reply.sent_s
        if request.give_up_s is not None:
            heapq.heappush(self._closings, (sent_s + request.give_up_s, request.index, True, exchange))
        if request.half_close_s is not None:
            heapq.heappush(self._closings, (sent_s + request.half_close_s, request.index, False, exchange))

    def _over(self, exchange: Exchange) -> None:
        """A request is over, or will never be sent: what comes after it falls due from then on."""
        self._collector.take(exchange)
        request, reply = exchange.request, exchange.reply
        if request.group is not None:
            ended_s = reply.ended_s if reply.ended_s == reply.ended_s else time.monotonic()
            if self._schedule.ended(request, ended_s - self._origin_s):
                self.pool.leave(request.group)
            self._arm()

    # Ahead of the schedule ---------------------------------------------------------------------------------------

    def _look_ahead(self) -> None:
        slices, horizon_s = self._slices(), time.monotonic() + AHEAD_S - self._origin_s
        self._schedule.look_ahead(horizon_s, lambda: slices.cut(COMPOSE_COST_S))

    def _compose(self, request: Request) -> Exchange:
        if request.group is not None:
            try:
                self.pool.stand_by(request.group)
            except OSError as error:
                self._failure = error
        return Exchange(request, self._wire(request), Reply())

    def _drop_the_rest(self) -> None:
        """Asked to stop: what was due until now is sent, the rest never."""
        self.poll()
        self._dropped = True
        self._schedule.drop()
        self._arm()

    def _gauges(self) -> dict[str, float]:
        return {
            "player.in_flight": self.pool.in_flight,
            "player.sent": self.sent,
            "player.done": self.sent - self.pool.in_flight,
            "player.connections": self.pool.connections,
            "player.resent": self.pool.resent,
            "player.shed": self.shed,
        }
