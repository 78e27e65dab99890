"""The connections of one player: opened before the run, kept, and never a limit.

An open loop needs as many connections as there are answers still to come; a pool that made a request wait would hide
the very slowness that is being measured. So an idle connection is used when there is one (the one used last: it is the
least likely to be closed by the server), a new one is opened when there is none, and a small reserve is opened ahead.
"""

import time
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

from harness.drivers.connection import Connection, Endpoint, Exchange
from harness.model import Outcome, Tag

_AT_ONCE = 32  # handshakes in flight while warming up: more overflow a server's backlog and take a second each
_LINGER_S = 1.0  # for the end of a message whose stream has said [DONE]


class Pool:
    """Carries exchanges on connections. `poll` is the schedule's, wanted at `next_s`; `over` is told of every request
    that has ended."""

    def __init__(
        self, endpoints: Sequence[Endpoint], loop: Any, poll: Callable[[], None], over: Callable[[Exchange], None]
    ) -> None:
        self._endpoints, self._loop = cycle(endpoints), loop
        self.poll, self._over = poll, over
        self.next_s = float("inf")
        self.pressing: set[Connection] = set()
        self.set_clock()
        self._idle: dict[Connection, None] = {}  # in the order of their last use
        self._all: set[Connection] = set()
        self._opening: set[Connection] = set()  # ahead of need
        self._reserve = self.in_flight = self.resent = 0

    @property
    def connections(self) -> int:
        return len(self._all)

    def set_clock(self) -> None:
        """Compare the clocks, many times a second: what the wall clock is set or slewed by in between is an error of
        the moments received, and of no other."""
        self.wall_ahead_s = time.clock_gettime_ns(time.CLOCK_REALTIME) * 1e-9 - time.monotonic()

    def warm(self, count: int, sleep: Callable[[float], None], limit_s: float) -> None:
        """Open `count` connections and wait until they stand or `limit_s` is over: a dead target is no error here."""
        self._reserve = max(1, count // 8)
        limit, tried = time.monotonic() + limit_s, 0
        while (tried < count or self._opening) and time.monotonic() < limit:
            while tried < count and len(self._opening) < _AT_ONCE:
                self._open_ahead()
                tried += 1
            sleep(0.005)

    def _open_ahead(self) -> None:
        connection = Connection(next(self._endpoints), self._loop, self)
        self._opening.add(connection)
        self._all.add(connection)

    def carry(self, exchange: Exchange) -> None:
        """Send a request. Raises OSError when this machine has no descriptors or ports left: that is our failure."""
        exchange.reply.sent_s = time.monotonic()
        self.in_flight += 1
        (self._taken() or self._opened(exchange)).carry(exchange)
        if len(self._idle) < self._reserve and len(self._opening) < self._reserve:
            self._open_ahead()

    def _taken(self) -> Connection | None:
        while self._idle:
            connection, _ = self._idle.popitem()
            if connection.alive:
                return connection
            connection.close()
        return None

    def _opened(self, exchange: Exchange) -> Connection:
        exchange.reply.tags |= Tag.NEW_CONNECTION
        connection = Connection(next(self._endpoints), self._loop, self)
        self._all.add(connection)
        return connection

    def sweep(self, now_s: float, time_limit_s: float) -> None:
        """Give up what has been silent for the time limit, and what lingers after its [DONE]."""
        for connection in list(self._all):
            exchange = connection.exchange
            if exchange is None:
                if connection.up and connection not in self._idle and now_s - connection.heard_s > _LINGER_S:
                    connection.close()
                continue
            reply = exchange.reply
            begun = reply.first_byte_s == reply.first_byte_s
            if now_s - (max(connection.heard_s, reply.sent_s) if begun else reply.sent_s) > time_limit_s:
                connection.hang_up(Outcome.STALLED if begun else Outcome.TIMEOUT, now_s)

    def abandon(self) -> None:
        """The run is over: what is still open stays so in the record. Closes every connection."""
        for connection in list(self._all):
            if connection.exchange is not None:
                connection.hang_up(Outcome.OPEN, time.monotonic())
            connection.close()

    # Told by connections -----------------------------------------------------------------------------------------

    def free(self, connection: Connection) -> None:
        self._opening.discard(connection)
        self._idle[connection] = None

    def over(self, exchange: Exchange) -> None:
        self.in_flight -= 1
        self._over(exchange)

    def resend(self, exchange: Exchange) -> None:
        exchange.reply.tags |= Tag.RESENT
        self.resent += 1
        self._opened(exchange).carry(exchange)

    def closed(self, connection: Connection) -> None:
        self._opening.discard(connection)
        self._idle.pop(connection, None)
        self._all.discard(connection)
