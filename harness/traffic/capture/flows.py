"""TCP segments -> what each side of each connection said, in order and once. Pure: no files, no clock.

A capture is a witness, not an endpoint: it drops, doubles and swaps packets that both ends got in order. So the first
copy of a byte counts, a hole is waited for as long as it may still be filled and then told as a GAP, and no byte is
made up.

The order of the steps of a connection is the order of cause: a byte is told after every byte that its sender had
acknowledged by then. An answer that was captured before its request waits for it, and a side whose bytes are missing
holds back of the other side what may depend on them, nothing else, and no longer than `Limits` says.

All limits are in capture time and in bytes, so the same packets give the same steps on any machine. It refuses to know
HTTP, to say who the client is where no SYN tells, and to trust a sequence number that no stream leads to.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice
from typing import NamedTuple

from harness.traffic.capture.account import Account
from harness.traffic.capture.packets import ACK, FIN, RST, SYN, Flow, Segment


class Kind(IntEnum):
    OPENED = 0  # a SYN of the client was seen; without one a connection begins with its first DATA or GAP
    DATA = 1
    GAP = 2  # bytes that the capture has not: the stream goes on after them
    FIN = 3  # this side sends no more
    RESET = 4  # this side broke the connection off
    OVER = 5  # nothing more of this connection comes: closed, replaced by a new one, idle, or the capture ended


class Step(NamedTuple):
    """One step of a connection. `flow` is the direction it happened in; `connection` counts connections from 0.

    `data` are the new bytes of a DATA step, stamped with the packet that brought them. OPENED has the client's
    direction; OVER has that of the side that came first, and the moment of the connection's last packet.
    """

    at_ns: int
    connection: int
    flow: Flow
    kind: Kind
    data: bytes = b""


class Run(NamedTuple):
    """DATA steps of one side in a row, each with its moment and its bytes. `leads` is what `framing.chunk_leads` saw in
    each, and a 0 after the last."""

    connection: int
    flow: Flow
    at_ns: list[int]
    data: list[bytes]
    leads: list[int]


@dataclass(frozen=True, slots=True)
class Limits:
    """How long and how much is waited for, in capture time.

    `patience_s`: for bytes that the receiver has acknowledged, that is for a capture that swaps packets. `hold_s`: for
    bytes that it has not, that is for a sender that repeats them. `grace_s`: for late packets of a closed connection.
    `window_bytes`: how far from its stream a segment may be. `side_bytes`, `total_bytes`: held back for one side, for
    all. `memory_bytes`: of what was told, kept to recognise copies with other bytes. `connections`: at once; beyond
    that the longest silent are over.
    """

    patience_s: float = 0.05
    hold_s: float = 30.0
    grace_s: float = 5.0
    idle_s: float = 600.0
    window_bytes: int = 16 << 20
    side_bytes: int = 16 << 20
    total_bytes: int = 32 << 20
    memory_bytes: int = 8 << 20
    connections: int = 65_536


def steps(segments: Iterable[Segment], account: Account, limits: Limits | None = None) -> Iterator[Step]:
    """All steps of all connections; each connection begins with OPENED, DATA or GAP and ends with OVER.

    This is the plain way, segment by segment: `runs.steps` must say the same.
    """
    reassembler = Reassembler(account, limits)
    feed = reassembler.feed
    for segment in segments:
        for step in feed(segment):  # noqa: UP028 - an iterator for each segment costs more
            yield step
    yield from reassembler.close()


class _Piece(NamedTuple):
    """A part of one side's stream that waits its turn: DATA, a GAP that the snap length made, FIN or RESET.

    `begin` and `end` are positions; `ack` is the position of the other side that its sender had got to.
    """

    begin: int
    end: int
    at_ns: int
    kind: Kind
    ack: int
    data: bytes = b""


class Side:
    """One direction of a connection. Positions are sequence numbers that do not wrap: they only grow.

    `next` is the position after all that was told, `acked` the one that the other side last said it has; `behind_ns`
    is since when `next` has been behind it and not moved. `isn` is None until anything tells where the side stands, and
    `started` is False while only the other side's word does. `smooth`: nothing is held, missing or closed, so that the
    next segment can be told without a look at anything else.
    """

    __slots__ = (
        "acked", "astray", "behind_ns", "broken", "connection", "finished", "flow", "held", "held_bytes", "isn",
        "last_ns", "next", "number", "peer", "smooth", "started", "told",
    )  # fmt: skip

    peer: "Side"
    connection: "_Connection"

    def __init__(self, flow: Flow, number: int, at_ns: int) -> None:
        self.flow = flow
        self.number = number
        self.last_ns = self.behind_ns = at_ns
        self.next = self.acked = 0
        self.isn: int | None = None
        self.started = self.finished = self.broken = self.smooth = False
        self.astray = -1  # the sequence number after the last segment that was too far away
        self.held: list[_Piece] = []  # sorted, and no two overlap
        self.held_bytes = 0
        self.told: list[bytes] = []  # the last DATA, without a break up to `next`

    def begin(self, position: int, started: bool) -> None:
        self.isn = (position - 1) & _MASK
        self.next = self.acked = position
        self.started = started

    @property
    def is_behind(self) -> bool:
        return self.acked > self.next

    @property
    def is_calm(self) -> bool:
        return not (self.held or self.finished or self.acked > self.next or self.isn is None)


class _Connection:
    """Both sides; the first is the client's if a SYN told, else the one that was seen first."""

    __slots__ = ("sides",)

    def __init__(self, flow: Flow, number: int, at_ns: int) -> None:
        first, second = self.sides = Side(flow, number, at_ns), Side(flow.back, number, at_ns)
        first.peer, second.peer = second, first
        first.connection = second.connection = self

    @property
    def last_ns(self) -> int:
        return max(side.last_ns for side in self.sides)


_MASK = 0xFFFF_FFFF
_HALF = 0x8000_0000
_SECOND_NS = 1_000_000_000
_FOREVER = 1 << 63
_NEVER = -_FOREVER
_PIECE_BYTES = 200  # what holding a piece costs beside its data
_TOLD_BYTES = 50  # what remembering a piece costs beside its data
_TOLD_PIECES = 64  # how many a copy is looked for in: copies come soon, and a search must not grow with the stream
_NOTHING: tuple[Step, ...] = ()
_PLAIN = FIN | SYN | RST | ACK
_DATA = Kind.DATA
_new = tuple.__new__  # what a NamedTuple's own constructor calls, at half the price


def _apart(a: int, b: int) -> int:
    """How far sequence number `a` is ahead of `b`, over the wrap; negative when it is behind."""
    return ((a - b + _HALF) & _MASK) - _HALF


class Reassembler:
    """Segments in, in the order of the capture; steps out, as soon as they are sure. `close` gives the rest."""

    def __init__(self, account: Account, limits: Limits | None = None) -> None:
        self._account = account
        self._limits = limits or Limits()
        self._patience_ns = int(self._limits.patience_s * _SECOND_NS)
        self._hold_ns = int(self._limits.hold_s * _SECOND_NS)
        self._grace_ns = int(self._limits.grace_s * _SECOND_NS)
        self.idle_ns = int(self._limits.idle_s * _SECOND_NS)
        self.window_bytes = self._limits.window_bytes
        self._memory_bytes = self._limits.memory_bytes
        self._sides: dict[Flow, Side] = {}
        self._waiting: dict[_Connection, None] = {}  # that hold something back, in the order they began to
        self._closing: dict[_Connection, int] = {}  # closed, since when
        self._count = self._held_bytes = self._told_bytes = self._now_ns = 0
        self._calm_from_ns = self._calm_until_ns = 0  # no limit in time is reached between these
        self._swept_ns = 0
        self._out: list[Step] = []

    @property
    def held_bytes(self) -> int:
        """What is held back now, with what holding it costs."""
        return self._held_bytes

    def feed(self, segment: Segment) -> Sequence[Step]:
        """The steps that a segment completes, often none. Raises nothing, whatever the segment says."""
        at_ns, flow, seq, ack, flags, payload, cut = segment
        calm = self._calm_from_ns <= at_ns < self._calm_until_ns
        if calm:
            side = self._sides.get(flow)
            if (
                side is not None
                and side.smooth
                and seq == side.next & _MASK
                and flags & _PLAIN == ACK
                and not cut
                and (since := (side.peer.next - ack) & _MASK) <= self.window_bytes
            ):
                side.last_ns = at_ns
                side.peer.acked = side.peer.next - since
                if not payload:
                    return _NOTHING
                side.next += len(payload)
                side.told.append(payload)
                self._told_bytes += len(payload) + _TOLD_BYTES
                if self._told_bytes > self._memory_bytes:
                    self._forget()
                return (_new(Step, (at_ns, side.number, flow, _DATA, payload)),)
        self._now_ns = at_ns
        if not calm:
            self._look_around()
        self._feed(segment)
        return self._said()

    def pass_time(self, moments: Sequence[int], begin: int, end: int, ordered: bool) -> Sequence[Step]:
        """Segments of the moments from `begin` to `end` come, which are told otherwise: what limits in time do they
        reach? `ordered`: no moment is before the one before it."""
        while begin < end:
            if self._calm_from_ns <= moments[begin] < self._calm_until_ns:
                begin = bisect_left(moments, self._calm_until_ns, begin, end) if ordered else begin + 1
            else:
                self._now_ns = moments[begin]
                self._look_around()
                begin += 1
        return self._said() if self._out else _NOTHING

    def smooth(self, flow: Flow, seq: int, at_ns: int) -> Side | None:
        """The side of a flow if its next segment, with this number, can be told without a look at anything else."""
        side = self._sides.get(flow)
        if side is None or not side.smooth or seq != side.next & _MASK or side.connection in self._closing:
            return None
        return side if at_ns - side.connection.last_ns < self.idle_ns else None

    def tell(self, side: Side, pieces: Sequence[bytes]) -> None:
        """A smooth side said these pieces, and their steps are told by the caller."""
        size = sum(map(len, pieces))
        side.next += size
        side.told.extend(pieces)
        self._told_bytes += size + _TOLD_BYTES * len(pieces)
        if self._told_bytes > self._memory_bytes:
            self._forget()

    def has_room(self, connections: int) -> bool:
        """Whether so many more connections could be opened without giving up others."""
        return len(self._sides) // 2 + connections <= self._limits.connections

    def close(self) -> Sequence[Step]:
        """The capture is over: what is held is told, with its gaps, and every connection ends."""
        for connection in self._connections():
            self._end(connection)
        return self._said()

    def _said(self) -> list[Step]:
        out, self._out = self._out, []
        return out

    def _say(self, at_ns: int, side: Side, kind: Kind, data: bytes = b"") -> None:
        self._out.append(Step(at_ns, side.number, side.flow, kind, data))

    # Connections: where they begin and end

    def _connections(self) -> list[_Connection]:
        return list(dict.fromkeys(side.connection for side in self._sides.values()))

    def _look_around(self) -> None:
        """Whatever capture time has decided since the last look. It may run backwards, where files are read in turn."""
        now_ns = self._now_ns
        self._calm_from_ns, self._calm_until_ns = now_ns - _SECOND_NS, now_ns + max(self._patience_ns, 1)
        for connection in list(self._waiting):
            self._settle(connection, now_ns)
        for connection in [each for each, since_ns in self._closing.items() if now_ns - since_ns >= self._grace_ns]:
            self._end(connection)
        if not self._swept_ns <= now_ns < self._swept_ns + self.idle_ns // 8:
            self._swept_ns = now_ns
            for connection in self._connections():
                if now_ns - connection.last_ns >= self.idle_ns:
                    self._account.idle += 1
                    self._end(connection)

    def _forget(self) -> None:
        self._told_bytes = 0
        for side in self._sides.values():
            side.told.clear()

    def _side_of(self, segment: Segment) -> Side | None:
        """The side that a segment belongs to, begun by a SYN or by data; None for what trails an old connection."""
        at_ns, flow, seq, _, flags, payload, cut = segment
        side = self._sides.get(flow)
        if flags & SYN:
            if side is not None:
                if side.isn is None:
                    side.begin(seq + 1, started=True)
                if side.isn == seq and side.connection not in self._closing:
                    return side
                self._end(side.connection)
            client = flow.back if flags & ACK else flow
            self._say(at_ns, self._open(client, at_ns), Kind.OPENED)
            side = self._sides[flow]
            side.begin(seq + 1, started=True)
        elif side is None and (payload or cut):
            side = self._open(flow, at_ns)
            self._account.mid_stream += 1
        return side

    def _open(self, flow: Flow, at_ns: int) -> Side:
        if len(self._sides) >= 2 * self._limits.connections:
            stale = sorted(self._connections(), key=lambda connection: connection.last_ns)
            for old in stale[: self._limits.connections // 8 + 1]:
                self._account.crowded += 1
                self._end(old)
        connection = _Connection(flow, self._count, at_ns)
        self._count += 1
        self._account.connections += 1
        self._sides[flow], self._sides[flow.back] = connection.sides
        return connection.sides[0]

    def _end(self, connection: _Connection) -> None:
        self._settle(connection, _FOREVER)
        last_ns = connection.last_ns
        for side in connection.sides:
            self._gap(side, side.acked, last_ns)
        self._say(last_ns, connection.sides[0], Kind.OVER)
        self._closing.pop(connection, None)
        for side in connection.sides:
            self._sides.pop(side.flow, None)
            side.told.clear()

    # Segments: what of them is new

    def _feed(self, segment: Segment) -> None:
        side = self._side_of(segment)
        if side is None:
            return
        ack = self._hear(side.peer, segment)
        self._take(side, segment, ack)
        side.last_ns = segment.at_ns
        self._settle(side.connection, segment.at_ns)
        if side.held_bytes > self._limits.side_bytes:
            self._settle(side.connection, _FOREVER)
        while self._held_bytes > self._limits.total_bytes:
            self._settle(next(iter(self._waiting)), _FOREVER)
        if self._told_bytes > self._memory_bytes:
            self._forget()

    def _hear(self, side: Side, segment: Segment) -> int:
        """What a segment acknowledges of the other side, as a position there; the last word counts, not the highest."""
        if not segment.flags & ACK:
            return _NEVER
        if side.isn is None:
            side.begin(segment.ack, started=False)
        ahead = _apart(segment.ack, side.next & _MASK)
        if abs(ahead) > self.window_bytes:
            self._account.far += 1
            return _NEVER
        if not side.is_behind:
            side.behind_ns = segment.at_ns
        side.acked = side.next + ahead
        return side.acked

    def _take(self, side: Side, segment: Segment, ack: int) -> None:
        at_ns, _, seq, _, flags, payload, cut = segment
        seq = (seq + 1) & _MASK if flags & SYN else seq
        carries = payload or cut or flags & (FIN | RST)
        if side.isn is None:
            if not carries:
                return
            side.begin(seq, started=True)
        begin = side.next + _apart(seq, side.next & _MASK)
        if flags & _PLAIN == ACK and not cut and self._is_probe(side, begin, len(payload), at_ns):
            self._account.probes += 1
        elif carries and (abs(begin - side.next) <= self.window_bytes or self._went_astray(side, seq, segment)):
            if payload and not side.started and begin < side.next:
                side.next, side.behind_ns = begin, at_ns
            side.started = side.started or bool(payload)
            self._cut_up(side, begin, segment, ack)

    def _is_probe(self, side: Side, begin: int, size: int, at_ns: int) -> bool:
        """A keep-alive probe: no byte or one without meaning, just before the next one.

        Where the capture has lost bytes, the next one is known to the other side only, and silence tells a probe from
        a late packet.
        """
        if size > 1:
            return False
        silent = at_ns - side.connection.last_ns >= self._patience_ns
        return begin + 1 == side.next or (size == 1 and silent and begin + 1 <= side.acked)

    def _went_astray(self, side: Side, seq: int, segment: Segment) -> bool:
        """Whether a segment far from its stream is where the stream now is: only if it follows on another such segment.

        One alone is garbage. Of two in a row the first is lost with all that was in between, whose size nobody knows.
        """
        self._account.far += 1
        goes_on, side.astray = side.astray == seq, (seq + len(segment.payload) + segment.cut) & _MASK
        if not goes_on or not segment.payload or side.finished:
            return False
        self._settle(side.connection, _FOREVER)
        self._say(segment.at_ns, side, Kind.GAP)
        self._account.gaps += 1
        side.begin(side.next + _apart(seq, side.next & _MASK), started=True)
        side.told.clear()
        return True

    def _cut_up(self, side: Side, begin: int, segment: Segment, ack: int) -> None:
        """A segment as pieces, each held for its turn, which is often now."""
        at_ns, _, _, _, flags, payload, cut = segment
        if payload:
            end = begin + len(payload)
            if begin > side.next:
                self._account.reordered += 1
            self._keep(side, _Piece(begin, end, at_ns, Kind.DATA, ack, payload))
            begin = end
        if cut:
            self._keep(side, _Piece(begin, begin + cut, at_ns, Kind.GAP, ack))
            begin += cut
        if flags & FIN:
            self._keep(side, _Piece(begin, begin + 1, at_ns, Kind.FIN, ack))
        if flags & RST and not side.broken:
            self._hold(side, _Piece(max(begin, side.next), max(begin, side.next), at_ns, Kind.RESET, ack))

    def _keep(self, side: Side, piece: _Piece) -> None:
        """Hold what no earlier copy has of a piece."""
        if side.finished and piece.begin >= side.next:
            self._account.far += 1
            return
        if piece.begin >= side.next and (not side.held or piece.begin >= side.held[-1].end):
            self._hold(side, piece)
            return
        size = 0
        for begin, end in list(_missing(side.held, max(piece.begin, side.next), piece.end)):
            data = piece.data[begin - piece.begin : end - piece.begin]
            self._hold(side, piece._replace(begin=begin, end=end, data=data))
            size += len(data)
        if size < len(piece.data):
            if all(_agree(known, piece) for known in _known(side, piece)):
                self._account.duplicates += 1
            else:
                self._account.conflicting += 1

    def _hold(self, side: Side, piece: _Piece) -> None:
        insort(side.held, piece, key=_begin)
        side.held_bytes += len(piece.data) + _PIECE_BYTES
        self._held_bytes += len(piece.data) + _PIECE_BYTES

    # Pieces: whose turn it is

    def _settle(self, connection: _Connection, now_ns: int) -> None:
        """Tell all whose turn it is: first what waits for nothing, then what has waited long enough at `now_ns`."""
        first, second = connection.sides
        move = self._move
        while move(first, _NEVER) or move(second, _NEVER) or move(first, now_ns) or move(second, now_ns):
            pass
        if first.held or second.held:
            self._waiting[connection] = None
        else:
            self._waiting.pop(connection, None)
        calm = first.is_calm and second.is_calm
        first.smooth, second.smooth = calm and first.started, calm and second.started

    def _move(self, side: Side, now_ns: int) -> bool:
        """Tell the first held piece of a side, or give up what it waits for; False if it must wait or there is none."""
        if not side.held:
            return False
        piece = side.held[0]
        behind, until, longest_ns = side, piece.begin, self._hold_ns
        if piece.begin <= side.next:
            behind, until, longest_ns = side.peer, piece.ack, self._patience_ns
        if behind.next >= until:
            self._tell(side)
            return True
        expired = now_ns - piece.at_ns >= longest_ns
        if not expired and not (behind.is_behind and now_ns - behind.behind_ns >= self._patience_ns):
            return False
        if behind is not side or not expired:
            until = min(until, behind.acked)
        if behind.held:
            until = min(until, behind.held[0].begin)
        if not self._gap(behind, until, piece.at_ns):
            self._tell(side)  # what it acknowledged was taken back, or each side waits for the other: packets may lie
        return True

    def _gap(self, side: Side, until: int, at_ns: int) -> bool:
        """Give up what a side misses before a position; False when it misses nothing."""
        if until <= side.next:
            return False
        self._say(at_ns, side, Kind.GAP)
        self._account.gaps += 1
        self._account.gap_bytes += until - side.next
        side.next, side.started = until, True
        side.told.clear()
        return True

    def _tell(self, side: Side) -> None:
        _, end, at_ns, kind, _, data = piece = side.held.pop(0)
        side.held_bytes -= len(piece.data) + _PIECE_BYTES
        self._held_bytes -= len(piece.data) + _PIECE_BYTES
        side.behind_ns = self._now_ns
        if kind is Kind.GAP:
            self._gap(side, end, at_ns)
            return
        self._say(at_ns, side, kind, data)
        side.next = max(side.next, end)
        if kind is Kind.DATA:
            side.told.append(data)
            self._told_bytes += len(data) + _TOLD_BYTES
            return
        side.told.clear()
        side.finished = side.finished or kind is Kind.FIN
        if kind is Kind.RESET:
            side.broken = True
            self._account.resets += 1
        if side.broken or (side.finished and side.peer.finished):
            self._closing.setdefault(side.connection, self._now_ns)


def _begin(piece: _Piece) -> int:
    return piece.begin


def _overlapping(held: list[_Piece], begin: int, end: int) -> Iterator[_Piece]:
    """The held pieces that have something of begin..end, in order."""
    for index in range(max(bisect_left(held, begin, key=_begin) - 1, 0), len(held)):
        if held[index].begin >= end:
            return
        if held[index].end > begin:
            yield held[index]


def _missing(held: list[_Piece], begin: int, end: int) -> Iterator[tuple[int, int]]:
    """The spans of begin..end that no held piece has, in order."""
    for piece in _overlapping(held, begin, end):
        if piece.begin > begin:
            yield begin, piece.begin
        begin = piece.end
    if begin < end:
        yield begin, end


def _known(side: Side, piece: _Piece) -> Iterator[tuple[int, bytes]]:
    """What is at hand of the bytes that a piece repeats: the last that were told, and those that are held."""
    end = side.next
    for data in islice(reversed(side.told), _TOLD_PIECES):
        if end <= piece.begin:
            break
        end -= len(data)
        yield end, data
    for other in _overlapping(side.held, piece.begin, piece.end):
        yield other.begin, other.data


def _agree(known: tuple[int, bytes], piece: _Piece) -> bool:
    """Whether two runs of bytes are the same where they overlap."""
    start, data = known
    begin, end = max(start, piece.begin), min(start + len(data), piece.begin + len(piece.data))
    return begin >= end or data[begin - start : end - start] == piece.data[begin - piece.begin : end - piece.begin]
