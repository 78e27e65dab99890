"""The connections of one player: opened before the run, kept, and never a limit.

An open loop needs as many connections as there are answers still to come; a pool that made a request wait would hide
the very slowness that is being measured. So an idle connection is used when there is one (the one used last: it is the
least likely to be closed by the server), a new one is opened when there is none, and a small reserve is opened ahead.

Requests of a group, which a capture saw on connections of their own, share these and none with anybody else: the first
is opened ahead of the first request, and all are closed when nothing is left of the group.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

from harness.drivers.connection import Connection, Endpoint, Exchange
from harness.model import Outcome, Tag

_AT_ONCE = 32  # handshakes in flight while warming up: more overflow a server's backlog and take a second each
_LINGER_S = 1.0  # for the end of a message whose stream has said [DONE], and of a group after its last request


@dataclass(slots=True, eq=False)
class Shelf:
    """Where connections wait for their next request: everybody's, or one group's."""

    idle: dict[Connection, None] = field(default_factory=dict)  # in the order of their last use
    wanted: bool = True  # there are requests still to come


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
        self._shared = Shelf()
        self._shelves: dict[int | None, Shelf] = {None: self._shared}  # by group
        self._all: dict[Connection, Shelf] = {}
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
                self._opening.add(self._open(self._shared))
                tried += 1
            sleep(0.005)

    def stand_by(self, group: int) -> None:
        """Open the first connection of a group whose first request falls due soon."""
        if group not in self._shelves:
            shelf = self._shelves[group] = Shelf()
            shelf.idle[self._open(shelf)] = None

    def leave(self, group: int) -> None:
        """Nothing is left of this group: its connections close when they have lingered."""
        self._shelves.pop(group).wanted = False

    def carry(self, exchange: Exchange) -> None:
        """Send a request. Raises OSError when this machine has no descriptors or ports left: that is our failure."""
        exchange.reply.sent_s = time.monotonic()
        self.in_flight += 1
        shelf = self._shelves[exchange.request.group]
        self._carry_on(self._taken(shelf) or self._open(shelf), exchange)
        if len(self._shared.idle) < self._reserve and len(self._opening) < self._reserve:
            self._opening.add(self._open(self._shared))

    def _taken(self, shelf: Shelf) -> Connection | None:
        while shelf.idle:
            connection, _ = shelf.idle.popitem()
            if connection.alive:
                return connection
            connection.close()
        return None

    def _open(self, shelf: Shelf) -> Connection:
        connection = Connection(next(self._endpoints), self._loop, self)
        self._all[connection] = shelf
        return connection

    def _carry_on(self, connection: Connection, exchange: Exchange) -> None:
        if not connection.up:
            exchange.reply.tags |= Tag.NEW_CONNECTION
        connection.carry(exchange)

    def sweep(self, now_s: float, time_limit_s: float) -> None:
        """Give up what has been silent for the time limit; close what lingers after its [DONE] or after its group."""
        for connection, shelf in list(self._all.items()):
            exchange = connection.exchange
            if exchange is None:
                of_use = shelf.wanted and (connection in shelf.idle or not connection.up)
                if not of_use and now_s - connection.heard_s > _LINGER_S:
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
        self._all[connection].idle[connection] = None

    def over(self, exchange: Exchange) -> None:
        self.in_flight -= 1
        self._over(exchange)

    def resend(self, exchange: Exchange) -> None:
        exchange.reply.tags |= Tag.RESENT
        self.resent += 1
        self._carry_on(self._open(self._shelves[exchange.request.group]), exchange)

    def closed(self, connection: Connection) -> None:
        self._opening.discard(connection)
        if (shelf := self._all.pop(connection, None)) is not None:
            shelf.idle.pop(connection, None)
