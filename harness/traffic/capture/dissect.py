"""The uncommon shapes of packets, retold in the common one: tags and tunnels peeled off, fragments put together.

Whatever comes out is sliced by `packets` like any other, so that ports, lengths and cuts are judged in one place. What
a few bytes of arithmetic cannot peel (IP options, IPv6 extension headers, GRE, IP in IP) goes through scapy, once per
packet and only as far as the TCP header: that costs some two hundred times the fast path. Checksums are not looked at,
for a host captures its own packets before its network card fills them in.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from struct import Struct, pack
from typing import Any, NamedTuple

from harness.traffic.capture.account import Account

ETHERNET, TYPED = 1, -1  # link types; TYPED is ours: two bytes of EtherType, then the datagram
IPV4, IPV6 = b"\x08\x00", b"\x86\xdd"
TAGS = frozenset((b"\x81\x00", b"\x88\xa8", b"\x91\x00"))  # 802.1Q, QinQ, and QinQ before it was a standard
IP_IN_IP, TCP, UDP, IPV6_IN_IP, GRE, FRAGMENT = 4, 6, 17, 41, 47, 44
TUNNELS = frozenset((IP_IN_IP, IPV6_IN_IP, GRE))
EXTENSIONS = frozenset((0, 43, 60))  # hop by hop, routing, destination options
VXLAN = frozenset((4789, 8472))  # the standard's port, and Linux's before it
HELD_BYTES = 16 << 20
HELD_NS = 30_000_000_000  # as long as a host waits for the missing piece
LARGEST_BYTES = 65_535

_v4 = Struct(">BxHHHxB2x8s").unpack_from
_v6 = Struct(">IHBx32s").unpack_from
_fragment_of_v6 = Struct(">BxHI").unpack_from
_udp = Struct(">2xH4xB3xI").unpack_from  # and the VXLAN header behind it: flags, and the network in 24 of 32 bits


class Retold(NamedTuple):
    """A packet in a plainer shape. `missing` is how many bytes of its end were on the wire but not captured."""

    link: int
    data: bytes
    missing: int
    net: int


class Dissector:
    """Peels one layer off a packet, or keeps it for the datagram that it is a fragment of."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self._fragments = Fragments(account)

    def retell(self, at_ns: int, data: bytes, at: int, missing: int, net: int) -> Retold | None:
        """The packet whose datagram begins at `at` of `data`, in a plainer shape; None, and counted, if it has none."""
        kind, datagram = data[at - 2 : at], data[at:]
        if kind in TAGS and len(datagram) >= 4:
            number = int.from_bytes(datagram[:2], "big") & 0xFFF
            return Retold(TYPED, datagram[2:], missing, net << 13 | 0x1000 | number if number else net)
        if kind == IPV4 and len(datagram) >= 20 and datagram[0] & 15 >= 5:
            return self._retell_v4(at_ns, datagram, missing, net)
        if kind == IPV6 and len(datagram) >= 40:
            return self._retell_v6(at_ns, datagram, missing, net)
        return self._unreadable() if kind in TAGS or kind in (IPV4, IPV6) else self._not_tcp()

    def close(self) -> None:
        """Give up the fragments still held: nothing more comes."""
        self._fragments.forget()

    def _retell_v4(self, at_ns: int, datagram: bytes, missing: int, net: int) -> Retold | None:
        first, total, name, fragment, protocol, addresses = _v4(datagram)
        body = (first & 15) * 4
        if fragment & 0x3FFF and (protocol in (TCP, UDP) or protocol in TUNNELS):
            key = (net, addresses, protocol, name)
            piece = datagram[body:total]
            whole = self._fragments.add(at_ns, key, (fragment & 0x1FFF) * 8, total - body, piece, fragment & 0x2000)
            if whole is None:
                return None
            return Retold(TYPED, IPV4 + header_v4(addresses, protocol, len(whole)) + whole, 0, net)
        if (protocol == TCP and body > 20) or protocol in TUNNELS:
            return self._through_scapy(4, datagram, missing, net)
        return self._transport(protocol, datagram[body:], missing, net)

    def _retell_v6(self, at_ns: int, datagram: bytes, missing: int, net: int) -> Retold | None:
        _, size, protocol, addresses = _v6(datagram)
        if protocol == FRAGMENT and len(datagram) >= 48:
            protocol, offset, name = _fragment_of_v6(datagram, 40)
            key = (net, addresses, name)
            piece = datagram[48 : 40 + size]
            whole = self._fragments.add(at_ns, key, offset & 0xFFF8, size - 8, piece, offset & 1)
            if whole is None:
                return None
            return Retold(TYPED, IPV6 + header_v6(addresses, protocol, len(whole)) + whole, 0, net)
        if protocol in EXTENSIONS or protocol in TUNNELS:
            return self._through_scapy(6, datagram, missing, net)
        return self._transport(protocol, datagram[40:], missing, net)

    def _transport(self, protocol: int, body: bytes, missing: int, net: int) -> Retold | None:
        if protocol == TCP:  # in the common shape, so that the fast path would have taken it if it could be read
            return self._unreadable()
        if protocol == UDP and len(body) > 16:
            port, flags, network = _udp(body)
            if port in VXLAN and flags & 8:
                return Retold(ETHERNET, body[16:], missing, net << 25 | 1 << 24 | network >> 8)
        return self._not_tcp()

    def _through_scapy(self, version: int, datagram: bytes, missing: int, net: int) -> Retold | None:
        self._account.slow_path += 1
        try:
            return _dissected(version, datagram, missing, net) or self._not_tcp()
        except Exception:  # whatever a dissector of the whole world's protocols raises on broken bytes
            return self._unreadable()

    def _not_tcp(self) -> Retold | None:
        self._account.not_tcp += 1
        return None

    def _unreadable(self) -> Retold | None:
        self._account.unreadable += 1
        return None


@dataclass(slots=True)
class _Datagram:
    since_ns: int
    pieces: dict[int, bytes] = field(default_factory=dict)
    size: int = 0  # held
    whole: int | None = None  # known from its last fragment

    def joined(self) -> bytes | None:
        """All of it, the first copy of each byte; None while a piece lacks."""
        if self.whole is None or self.size < self.whole:
            return None
        joined = bytearray()
        for offset, piece in sorted(self.pieces.items()):
            if offset > len(joined):
                return None
            joined += piece[len(joined) - offset :]
        return bytes(joined[: self.whole]) if len(joined) >= self.whole else None


class Fragments:
    """Datagrams that came in pieces, held until they are whole: bounded in bytes and, by capture time, in age."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self._held: dict[Hashable, _Datagram] = {}  # oldest first
        self._size = 0

    def add(self, at_ns: int, key: Hashable, offset: int, claimed: int, piece: bytes, more: int) -> bytes | None:
        """Take one fragment, `claimed` bytes long on the wire; the whole datagram if this was what it lacked."""
        self._account.fragments += 1
        self._forget_old(at_ns)
        if claimed <= 0 or offset + claimed > LARGEST_BYTES:
            self._account.unreadable += 1
            return None
        datagram = self._held.setdefault(key, _Datagram(at_ns))
        if offset not in datagram.pieces:
            datagram.pieces[offset] = piece
            datagram.size += len(piece)
            self._size += len(piece)
        if not more and datagram.whole is None:
            datagram.whole = offset + claimed
        whole = datagram.joined()
        if whole is None:
            self._account.fragments_held += 1
        else:
            self._drop(key)
        return whole

    def forget(self) -> None:
        """Give up all that is held."""
        while self._held:
            self._account.fragments_lost += self._drop(next(iter(self._held)))

    def _forget_old(self, at_ns: int) -> None:
        while self._held:
            key, oldest = next(iter(self._held.items()))
            if self._size <= HELD_BYTES and at_ns - oldest.since_ns <= HELD_NS:
                break
            self._account.fragments_lost += self._drop(key)

    def _drop(self, key: Hashable) -> int:
        datagram = self._held.pop(key)
        self._size -= datagram.size
        return len(datagram.pieces)


def header_v4(addresses: bytes, protocol: int, size: int, name_and_fragment: bytes = b"\0\0\0\0") -> bytes:
    """A plain IPv4 header before `size` bytes; a length it cannot say is 0, which is read as all there is."""
    total = 20 + size if 20 + size <= LARGEST_BYTES else 0
    return b"\x45\x00" + pack(">H4sBBH", total, name_and_fragment, 64, protocol, 0) + addresses


def header_v6(addresses: bytes, protocol: int, size: int) -> bytes:
    """A plain IPv6 header before `size` bytes; a length it cannot say is 0, which is read as all there is."""
    return b"\x60\0\0\0" + pack(">HBB", size if size <= LARGEST_BYTES else 0, protocol, 64) + addresses


def _dissected(version: int, datagram: bytes, missing: int, net: int) -> Retold | None:
    """The TCP segment, or the fragment, innermost in a datagram, behind plain headers; None when there is none."""
    import logging

    logging.getLogger("scapy").setLevel(logging.ERROR)  # it warns of interfaces and routes, which nobody here uses
    from scapy.layers import inet, inet6, l2, vxlan

    network: Any = None
    layer: Any = inet6.IPv6(datagram) if version == 6 else inet.IP(datagram)
    while layer:
        if type(layer) in (inet.IP, inet6.IPv6):  # not what an ICMP error quotes, which derives from them
            network = layer
            if type(layer) is inet.IP and (layer.frag or layer.flags.MF):
                return _retold(network, layer.proto, layer.original[4 * layer.ihl : layer.len], missing, net)
        elif isinstance(layer, inet6.IPv6ExtHdrFragment):
            return _retold(network, FRAGMENT, layer.original, missing, net)
        elif type(layer) is inet.TCP:
            return _retold(network, TCP, layer.original, missing, net)
        elif isinstance(layer, vxlan.VXLAN):
            net = net << 25 | 1 << 24 | layer.vni
        elif isinstance(layer, l2.Dot1Q):
            net = net << 13 | 0x1000 | layer.vlan if layer.vlan else net
        elif isinstance(layer, l2.GRE) and layer.key_present:
            net = net << 33 | 1 << 32 | layer.key
        layer = layer.payload
    return None


def _retold(network: Any, protocol: int, body: bytes, missing: int, net: int) -> Retold:
    raw = network.original
    if network.version == 4:
        claimed = network.len or len(raw) + missing
        size = len(body) + max(0, claimed - len(raw))
        head = header_v4(raw[12:20], protocol, size, raw[4:8])
        return Retold(TYPED, IPV4 + head + body, size - len(body), net)
    claimed = 40 + network.plen if network.plen else len(raw) + missing
    size = len(body) + max(0, claimed - len(raw))
    return Retold(TYPED, IPV6 + header_v6(raw[8:40], protocol, size) + body, size - len(body), net)
