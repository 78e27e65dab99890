"""Packets -> TCP segments. A fast path slices the common shapes; whatever it does not know is retold by `dissect`.

This function runs for every packet of an hour's traffic, so it is one unpack, one look-up and two slices for a packet
of the common shape: Ethernet or Linux cooked, IPv4 without options or IPv6 without extension headers, TCP. It follows
no connection and reads no payload.
"""

from collections.abc import Hashable, Iterable, Iterator
from struct import Struct, error
from typing import NamedTuple

from harness.model import UsageError
from harness.traffic.capture.account import Account
from harness.traffic.capture.dissect import ETHERNET, IPV4, IPV6, TCP, TYPED, Dissector
from harness.traffic.capture.records import Packet

FIN, SYN, RST, ACK = 1, 2, 4, 16

COOKED, COOKED_2 = 113, 276  # what `tcpdump -i any` writes
LOOPBACK = (0, 108)
RAW = (12, 14, 101, 228, 229)
FLOWS_KEPT = 1 << 16
DEEPEST = 8  # tags and tunnels within each other

_v4 = Struct(">3sxH2xHxB2x12sIIBB").unpack_from  # from the EtherType before the header on; addresses and ports in one
_v6 = Struct(">2s4xHBx36sIIBB").unpack_from
_PLAIN_V4 = IPV4 + b"\x45"


class Flow(NamedTuple):
    """One direction of a conversation. `net` tells apart equal addresses on different VLANs or tunnels; 0 is none."""

    source: bytes
    source_port: int
    target: bytes
    target_port: int
    net: int = 0

    @property
    def back(self) -> "Flow":
        return Flow(self.target, self.target_port, self.source, self.source_port, self.net)


class Segment(NamedTuple):
    """One TCP segment. `cut` is how many bytes of its payload the capture's snap length took away."""

    at_ns: int
    flow: Flow
    seq: int
    ack: int
    flags: int
    payload: bytes
    cut: int = 0


def segments(packets: Iterable[Packet], account: Account, ports: frozenset[int] = frozenset()) -> Iterator[Segment]:
    """The TCP segments of the packets, as they come; with `ports`, only of flows from or to one of them.

    This is the plain way, packet by packet: `columns.columns` must find the same. Raises UsageError for a link type
    that nobody here reads.
    """
    return Slicer(account, ports).segments(packets)


class Slicer:
    """Packets in, segments out. It holds fragments that wait for their datagram, and the flows it met, for speed."""

    def __init__(self, account: Account, ports: frozenset[int] = frozenset()) -> None:
        self._account, self._ports = account, ports
        self._dissector = Dissector(account)
        self._flows: dict[Hashable, Flow | None] = {}

    def segments(self, packets: Iterable[Packet]) -> Iterator[Segment]:
        """The segments of the packets; what gives none is counted, at the end also the fragments that were left."""
        yield from self.sliced(packets)
        self.close()

    def close(self) -> None:
        """Nothing more comes: give up the fragments still held."""
        self._dissector.close()

    def sliced(self, packets: Iterable[Packet], net: int = 0, depth: int = 0) -> Iterator[Segment]:
        """As `segments`, and more packets may follow. Of a packet comes one segment or none."""
        new, flows = tuple.__new__, self._flows
        for at_ns, link, data, length in packets:
            at = 14 if link == ETHERNET else 16 if link == COOKED else 2
            if at == 2 and link != TYPED:
                data, length = _typed(link, data, length)
            try:
                shape, size, fragment, protocol, ends, seq, ack, offset, flags = _v4(data, at - 2)
                if shape == _PLAIN_V4 and protocol == TCP and offset >= 0x50 and not fragment & 0x3FFF:
                    start = at + 20
                    end = at + size if size else length
                elif shape[:2] == IPV6 and (header := _v6(data, at - 2))[2] == TCP and header[6] >= 0x50:
                    _, size, _, ends, seq, ack, offset, flags = header
                    start = at + 40
                    end = start + size if size else length
                else:
                    raise error
            except error:
                yield from self._retold(at_ns, data, at, length, net, depth)
                continue
            start += offset >> 2 & 0x3C
            key = (net, ends) if net else ends
            flow = flows[key] if key in flows else self.flow(key, ends, net)
            if flow is None:
                self._account.other_ports += 1
                continue
            cut = 0
            if end > len(data):
                cut = max(0, end - max(start, len(data)))
                self._account.cut_packets += 1
            yield new(Segment, (at_ns, flow, seq, ack, flags, data[start:end], cut))

    def _retold(self, at_ns: int, data: bytes, at: int, length: int, net: int, depth: int) -> Iterable[Segment]:
        """What a packet of another shape comes to: it is sliced again once a layer is off."""
        retold = self._dissector.retell(at_ns, data, at, max(0, length - len(data)), net)
        if retold is None:
            return ()
        if depth == DEEPEST:
            self._account.unreadable += 1
            return ()
        plainer = Packet(at_ns, retold.link, retold.data, len(retold.data) + retold.missing)
        return self.sliced([plainer], retold.net, depth + 1)

    def flow(self, key: Hashable, ends: bytes, net: int) -> Flow | None:
        """The flow of a packet by its addresses and ports, known by `key` from here on; None if nobody wants it."""
        if len(self._flows) >= FLOWS_KEPT:
            self._flows.clear()
        size = len(ends) // 2 - 2
        source_port, target_port = int.from_bytes(ends[-4:-2], "big"), int.from_bytes(ends[-2:], "big")
        wanted = not self._ports or source_port in self._ports or target_port in self._ports
        flow = Flow(ends[:size], source_port, ends[size:-4], target_port, net) if wanted else None
        self._flows[key] = flow
        return flow


def _typed(link: int, data: bytes, length: int) -> tuple[bytes, int]:
    """A packet of a rarer link type as its EtherType and its datagram, and its length then."""
    if link == COOKED_2:
        return data[:2] + data[20:], length - 18
    if link not in LOOPBACK and link not in RAW:
        raise UsageError(
            f"the capture has packets of link type {link}, which is not read: capture on an Ethernet interface "
            f"or with `tcpdump -i any`"
        )
    skip = 4 if link in LOOPBACK else 0
    version = data[skip] >> 4 if len(data) > skip else 0
    return {4: IPV4, 6: IPV6}.get(version, b"\0\0") + data[skip:], length - skip + 2
