"""Columns of segments -> steps: what cannot surprise is told in runs, all else goes through `flows.Reassembler`.

A run is a row of segments of one connection of which each follows on the one before it in its direction and
acknowledges nothing that has not been seen. Whether segments do is seen in columns, for a whole block at once; whether
the connection stands where the run begins, the reassembler says. Then each piece of data is a step as it would be one
by one, and an acknowledgement without data costs nothing.

The steps of each connection are the same as one by one, in the same order. Those of different connections come in
another order within a block: nothing depends on it, for nothing in HTTP does.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from harness.traffic.capture.account import Account
from harness.traffic.capture.columns import Columns
from harness.traffic.capture.flows import Limits, Reassembler, Run, Side, Step
from harness.traffic.capture.framing import chunk_leads
from harness.traffic.capture.packets import ACK, FIN, RST, SYN, Segment
from harness.traffic.capture.records import Column

_MASK = 0xFFFF_FFFF


def steps(blocks: Iterable[Columns], account: Account, limits: Limits | None = None) -> Iterator[Step | Run]:
    """All steps of all connections, as `flows.steps` says them, some of them in runs."""
    reassembler = Reassembler(account, limits)
    for columns in blocks:
        if len(columns.flow):
            yield from _Block(columns, reassembler).steps()
    yield from reassembler.close()


class _Block:
    """The rows of a block by connection, those of each in the order of the capture: a row's `place` is where it stood
    in that. `_pieces` are the payloads, `_pieces_before` how many of them the rows before each have, and `_turns` the
    pieces that do not go on with the side of the one before."""

    def __init__(self, columns: Columns, reassembler: Reassembler) -> None:
        self._columns, self._reassembler = columns, reassembler
        connection = columns.flow >> 1
        small = connection.astype(np.min_scalar_type(int(connection.max())))  # which are sorted by their digits
        self._places = order = np.argsort(small, kind="stable")
        self._flow, self._at_ns = columns.flow[order], columns.at_ns[order]
        self._seq, self._ack, self._sizes = columns.seq[order], columns.ack[order], columns.sizes[order]
        self._flags = columns.flags[order]
        self._cut_out(columns.starts[order])

    def _cut_out(self, starts: Column) -> None:
        having = np.flatnonzero(self._sizes)
        starts, sizes, flow, data = starts[having], self._sizes[having], self._flow[having], self._columns.data
        self._pieces = [data[start:end] for start, end in zip(starts.tolist(), (starts + sizes).tolist(), strict=True)]
        self._moments, self._senders = self._at_ns[having].tolist(), flow.tolist()
        self._leads = chunk_leads(data, starts, sizes).tolist()
        self._turns = (np.flatnonzero(flow[1:] != flow[:-1]) + 1).tolist()
        self._pieces_before = np.concatenate(([0], np.cumsum(self._sizes > 0)))

    def steps(self) -> Iterator[Step | Run]:
        """Rows that may surprise are fed in the order of the capture; a run is told where its first row stood. What of
        a run cannot be told yet is tried again from its next row on."""
        reassembler, places = self._reassembler, self._places
        at_ns, passed = self._columns.at_ns, 0
        moments, ordered = at_ns.tolist(), bool((at_ns[1:] >= at_ns[:-1]).all())
        spans = self._spans()
        while spans:
            place, row, end = heappop(spans)
            yield from reassembler.pass_time(moments, passed, place, ordered)
            passed, begun = place, row
            if row < end:
                row, told = self._tell(row, end)
                yield from told
            if row == begun:
                yield from reassembler.feed(self._segment(row))
                passed, row = place + 1, row + 1
            if row < end:
                heappush(spans, (int(places[row]), row, end))
        yield from reassembler.pass_time(moments, passed, len(moments), ordered)

    def _spans(self) -> list[tuple[int, int, int]]:
        """Runs as the place of their first row, that row, and the row after them; one that may surprise as an empty
        run. A heap."""
        breaks = self._breaks()
        before, after = np.concatenate(([True], breaks[:-1])), np.concatenate((breaks[1:], [True]))
        connection = self._flow >> 1
        edges = connection[1:] != connection[:-1]
        before[1:] |= edges
        after[:-1] |= edges
        alone, begins, ends = (np.flatnonzero(rows) for rows in (breaks, ~breaks & before, ~breaks & after))
        first, last = np.concatenate((alone, begins)), np.concatenate((alone, ends + 1))
        spans = list(zip(self._places[first].tolist(), first.tolist(), last.tolist(), strict=True))
        heapify(spans)
        return spans

    def _breaks(self) -> NDArray[np.bool_]:
        """The rows that may surprise, whatever came before the block: those that say more than bytes, do not follow on
        the last of their direction, acknowledge more than the last of the other has, or come after a long silence."""
        connection, at_ns, reassembler = self._flow >> 1, self._at_ns, self._reassembler
        begins = np.concatenate(([True], connection[1:] != connection[:-1]))
        silent = np.concatenate(([False], at_ns[1:] - at_ns[:-1] >= reassembler.idle_ns)) & ~begins
        plain = self._flags & (FIN | SYN | RST | ACK) == ACK
        breaks: NDArray[np.bool_] = ~plain | ~self._in_order(begins) | silent
        if self._columns.odd:
            odd = np.zeros(len(breaks), np.bool_)
            odd[list(self._columns.odd)] = True
            breaks |= odd[self._places]
        if not reassembler.has_room(int(np.count_nonzero(begins))):
            breaks[:] = True
        return breaks

    def _in_order(self, begins: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """The rows that follow on the last one of their direction, and acknowledge no more than the last of the other
        has; where the block has none before them, nobody knows yet."""
        rows, second = np.arange(len(begins)), self._flow & 1 == 1
        first = np.maximum.accumulate(np.where(begins, rows, 0))
        of_first, of_second = (np.maximum.accumulate(np.where(mine, rows, -1)) for mine in (~second, second))
        own, other = (
            np.where(second, np.roll(of_second, 1), np.roll(of_first, 1)),
            np.where(second, of_first, of_second),
        )
        own[0] = -1
        ends = (self._seq + self._sizes + (self._flags & (SYN | FIN) != 0)) & _MASK
        follows = (own < first) | (self._seq == ends[own])
        ahead = (ends[other] - self._ack) & _MASK > self._reassembler.window_bytes
        self._latest = of_first, of_second
        after = (np.minimum.accumulate(np.where(mine, rows, len(rows))[::-1])[::-1] for mine in (second, ~second))
        self._other_after = np.where(second, *reversed(tuple(after)))
        in_order: NDArray[np.bool_] = follows & ((other < first) | ~ahead)
        return in_order

    def _tell(self, row: int, end: int) -> tuple[int, list[Run]]:
        """Tell the rows of a run as far as nothing hinders that. Returns the row it came to, and what was told."""
        flow, since_ns = int(self._flow[row]), int(self._at_ns[row])
        turn = min(int(self._other_after[row]), end)
        side = self._smooth(row, since_ns)
        if side is None or self._is_ahead(side.peer, row, turn):
            return row, []
        sides = {flow: side}
        if turn < end and (peer := self._smooth(turn, since_ns)) is not None:
            sides[flow ^ 1] = peer
        else:
            end = turn
        told = list(self._told(sides, int(self._pieces_before[row]), int(self._pieces_before[end])))
        for each, one in sides.items():
            latest = self._latest[each & 1][end - 1]
            one.last_ns = int(self._at_ns[latest])
            one.peer.acked = one.peer.next - int(one.peer.next - self._ack[latest] & _MASK)
        return end, told

    def _is_ahead(self, side: Side, row: int, end: int) -> bool:
        """Whether any of the rows acknowledges more than a side has said."""
        since = (side.next - self._ack[row:end]) & _MASK
        return bool(since.max() > self._reassembler.window_bytes)

    def _told(self, sides: dict[int, Side], first: int, last: int) -> Iterator[Run]:
        """These pieces, a run for each side's turn."""
        turns = self._turns[bisect_right(self._turns, first) : bisect_left(self._turns, last)]
        for begin, end in pairwise([first, *turns, last] if first < last else ()):
            side = sides[self._senders[begin]]
            self._reassembler.tell(side, self._pieces[begin:end])
            yield Run(
                side.number, side.flow, self._moments[begin:end], self._pieces[begin:end], [*self._leads[begin:end], 0]
            )

    def _smooth(self, row: int, since_ns: int) -> Side | None:
        return self._reassembler.smooth(self._columns.flows[self._flow[row]], int(self._seq[row]), since_ns)

    def _segment(self, row: int) -> Segment:
        place = int(self._places[row])
        if place in self._columns.odd:
            return self._columns.odd[place]
        payload = self._pieces[self._pieces_before[row]] if self._sizes[row] else b""
        seq, ack, flags = int(self._seq[row]), int(self._ack[row]), int(self._flags[row])
        return Segment(int(self._at_ns[row]), self._columns.flows[self._flow[row]], seq, ack, flags, payload)
