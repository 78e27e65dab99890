"""Blocks of packets -> their TCP segments as columns, all headers of a block read at once.

Nearly all packets of a capture are of one shape, which a few operations on whole columns take apart for a twentieth of
what a look at each of them costs. What is of another shape in any way, `packets` takes apart as ever, and it stands in
its place among the others: this module gives no meaning to a packet that `packets` would not give it.
"""

from collections.abc import Iterable, Iterator
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.traffic.capture.account import Account
from harness.traffic.capture.dissect import ETHERNET, TCP
from harness.traffic.capture.packets import COOKED, COOKED_2, LOOPBACK, RAW, Flow, Segment, Slicer
from harness.traffic.capture.records import Block, Column, Room, rows

FLOWS_KEPT = 1 << 15
_NOT_WANTED, _ODD = -1, -2
_TYPED = {ETHERNET: (12, 14), COOKED: (14, 16), COOKED_2: (0, 20)}  # where the EtherType is, and where the datagram
_UNTYPED = {**dict.fromkeys(LOOPBACK, 4), **dict.fromkeys(RAW, 0)}


class Columns(NamedTuple):
    """The segments of a block, a row each, in the order of the capture.

    `flow` is a place in `flows`, where the two directions of a connection stand side by side, the even one first.
    `starts` is where in `data` the payload is, `sizes` how much. For rows of `odd` nothing holds but moment and flow.
    """

    data: Room
    flows: list[Flow]
    at_ns: Column
    flow: Column
    seq: Column
    ack: Column
    flags: Column
    starts: Column
    sizes: Column
    odd: dict[int, Segment]


class _Shape(NamedTuple):
    """The common shape of one IP version: its EtherType, how long its header is, what of that its length counts, and
    where in it things stand."""

    ethertype: int
    header: int
    counted: int
    size: int
    protocol: int
    ends: int


_V4, _V6 = _Shape(0x0800, 20, 20, 2, 9, 12), _Shape(0x86DD, 40, 0, 4, 6, 8)


def columns(blocks: Iterable[Block], account: Account, ports: frozenset[int] = frozenset()) -> Iterator[Columns]:
    """The segments of each block; with `ports`, only of flows from or to one of them. Raises as `packets` does."""
    table = _Table(account, ports)
    for block in blocks:
        yield table.read(block)
    table.slicer.close()


class _Table:
    """Turns blocks into columns; knows the flows by what stands for them in a packet."""

    def __init__(self, account: Account, ports: frozenset[int]) -> None:
        self.slicer = Slicer(account, ports)
        self._account = account
        self._forget()

    def read(self, block: Block) -> Columns:
        if max(len(self._flows), len(self._known)) >= FLOWS_KEPT:
            self._forget()
        count = len(block.sizes)
        flow = np.full(count, _ODD)
        told = {name: np.zeros(count, np.int64) for name in ("seq", "ack", "flags", "starts", "sizes")}
        for shape in (_V4, _V6):
            self._take(block, shape, flow, told)
        odd = self._others(block, np.flatnonzero(flow == _ODD).tolist(), flow)
        self._account.other_ports += int(np.count_nonzero(flow == _NOT_WANTED))
        wanted = np.flatnonzero(flow >= 0)
        if len(wanted) < count:
            odd = {int(np.searchsorted(wanted, place)): segment for place, segment in odd.items()}
            flow, told = flow[wanted], {name: column[wanted] for name, column in told.items()}
        return Columns(block.data, self._flows, block.at_ns[wanted], flow, odd=odd, **told)

    def _forget(self) -> None:
        self._flows: list[Flow] = []
        self._places: dict[Flow, int] = {}
        self._known = _Known(self)

    def _others(self, block: Block, places: list[int], flow: Column) -> dict[int, Segment]:
        """The segments of packets of other shapes, by their places; a packet gives one or none."""
        odd = {}
        for place in places:
            for segment in self.slicer.sliced([block.packet(place)]):
                odd[place] = segment
                flow[place] = self.place(segment.flow)
        return odd

    def _take(self, block: Block, shape: _Shape, flow: Column, told: dict[str, Column]) -> None:
        """Fill in the rows of the packets that have the shape."""
        fields = _fields(block.link, shape)
        if fields is None:
            return
        places = np.flatnonzero((flow == _ODD) & (block.sizes >= fields.itemsize))
        if not len(places):
            return
        start = block.starts[places]
        heads = rows(block.data, start, fields.itemsize).view(fields)
        size = heads["size"].astype(np.int64)
        end = start + np.where(size > 0, fields.itemsize - 20 - shape.counted + size, block.lengths[places])
        fits = _has_shape(heads, shape, block.link in _TYPED) & (end <= start + block.sizes[places])
        places, heads, start, end = places[fits], heads[fits], start[fits], end[fits]
        payload = start + (fields.itemsize - 20) + (heads["offset"] >> 2 & 0x3C)
        flow[places] = np.fromiter(map(self._known.__getitem__, heads["ends"].tolist()), np.int64, len(places))
        for name in ("seq", "ack", "flags"):
            told[name][places] = heads[name]
        told["starts"][places], told["sizes"][places] = payload, np.maximum(end - payload, 0)

    def place(self, flow: Flow) -> int:
        """The place of a flow; its way back is beside it."""
        place = self._places.get(flow)
        if place is None:
            place = len(self._flows)
            self._flows += (flow, flow.back)
            self._places[flow.back], self._places[flow] = place + 1, place
        return place


class _Known(dict[bytes, int]):
    """The places of flows by the addresses and ports of a packet, as they are met."""

    def __init__(self, table: _Table) -> None:
        self._table = table

    def __missing__(self, ends: bytes) -> int:
        flow = self._table.slicer.flow(ends, ends, 0)
        self[ends] = place = _NOT_WANTED if flow is None else self._table.place(flow)
        return place


@cache
def _fields(link: int, shape: _Shape) -> np.dtype[np.void] | None:
    """A packet up to the end of a plain TCP header, as a type with fields; None for links that have no common shape."""
    if link not in _TYPED and link not in _UNTYPED:
        return None
    type_at, at = _TYPED.get(link) or (_UNTYPED[link], _UNTYPED[link])
    tcp = at + shape.header
    fields = {
        "type": (">u2", type_at), "first": ("u1", at), "size": (">u2", at + shape.size), "fragment": (">u2", at + 6),
        "protocol": ("u1", at + shape.protocol), "ends": (f"V{shape.header - shape.ends + 4}", at + shape.ends),
        "source": (">u2", tcp), "target": (">u2", tcp + 2), "seq": (">u4", tcp + 4), "ack": (">u4", tcp + 8),
        "offset": ("u1", tcp + 12), "flags": ("u1", tcp + 13),
    }  # fmt: skip
    formats, offsets = zip(*fields.values(), strict=True)
    return np.dtype({"names": list(fields), "formats": formats, "offsets": offsets, "itemsize": tcp + 20})


def _has_shape(heads: NDArray[np.void], shape: _Shape, typed: bool) -> NDArray[np.bool_]:
    """Which packets are plain TCP in plain IP of the shape's version, and from another port than to."""
    fits: NDArray[np.bool_] = (heads["protocol"] == TCP) & (heads["offset"] >= 0x50)
    fits &= heads["type"] == shape.ethertype if typed else heads["first"] >> 4 == (6 if shape is _V6 else 4)
    if shape is _V4:
        fits &= (heads["first"] == 0x45) & (heads["fragment"] & 0x3FFF == 0)
    fits &= heads["source"] != heads["target"]
    return fits
