"""TCP segments as bytes: under every link layer and tunnel, in every capture format.

Written from the formats' own texts: it shares nothing with the importer that it is to try, and needs no library.
Checksums are right. A sequence number is unbounded in a `Tcp` and wraps here.
"""

import gzip
import struct
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import NamedTuple

FIN, SYN, RST, PSH, ACK = 1, 2, 4, 8, 16
ETHERNET, NULL, RAW, LOOP, SLL, IPV4, IPV6, SLL2 = 1, 0, 101, 108, 113, 228, 229, 276
SERVER, SERVER_PORT = 0x0901, 8000  # the server's host number, and where it listens
WHOLE = 1 << 18  # a snap length that cuts nothing

_MACS = bytes.fromhex("02000000000102000000000a")
_WORD = 0xFFFFFFFF


class Tcp(NamedTuple):
    """One segment before it has a shape. `client` is (host number, port); `seq` and `ack` do not wrap."""

    at_ns: int
    connection: int
    from_client: bool
    client: tuple[int, int]
    seq: int
    ack: int
    flags: int
    payload: bytes = b""

    @property
    def end(self) -> int:
        return self.seq + len(self.payload)


class Frame(NamedTuple):
    """One record of a capture file: its bytes, and its length on the wire."""

    at_ns: int
    data: bytes
    length: int


Framing = Callable[[Tcp], list[bytes]]


def frames(packets: Iterable[Tcp], framing: Framing, snap: int = WHOLE) -> Iterator[Frame]:
    """What a capture holds of these segments; no more than `snap` bytes of each packet."""
    for packet in packets:
        for data in framing(packet):
            yield Frame(packet.at_ns, data[:snap], len(data))


def _checksum(data: bytes) -> int:
    """The Internet checksum: the sum of 16-bit words in one's complement is the whole number modulo 65535."""
    return 0xFFFF - int.from_bytes(data + b"\0" * (len(data) % 2)) % 0xFFFF


def _tcp(packet: Tcp, addresses: bytes) -> bytes:
    clock = packet.at_ns // 1_000_000 & _WORD
    if packet.flags & SYN:
        options = struct.pack(">BBHBBBBIIBBBB", 2, 4, 1460, 4, 2, 8, 10, clock, 0, 1, 3, 3, 7)
    else:
        options = struct.pack(">BBBBII", 1, 1, 8, 10, clock, clock)
    ports = (packet.client[1], SERVER_PORT) if packet.from_client else (SERVER_PORT, packet.client[1])
    fields = (*ports, packet.seq & _WORD, packet.ack & _WORD, (20 + len(options)) << 2, packet.flags, 502)
    head = struct.pack(">HHIIBBH", *fields)
    pseudo = addresses + struct.pack(">II", 20 + len(options) + len(packet.payload), 6)
    checksum = _checksum(pseudo + head + b"\0\0\0\0" + options + packet.payload)
    return head + struct.pack(">HH", checksum, 0) + options + packet.payload


def _hosts(packet: Tcp) -> tuple[int, int]:
    return (packet.client[0], SERVER) if packet.from_client else (SERVER, packet.client[0])


def _ipv4_header(
    length: int, protocol: int, addresses: bytes, name: int = 0, part: int = 0x4000, options: bytes = b""
) -> bytes:
    """`part` is the fragment's flags and offset. A length that is too long for its field is 0, as offload leaves it."""
    first = 0x45 + len(options) // 4
    total = length + 20 + len(options) if length <= 0xFFFF - 20 - len(options) else 0
    head = struct.pack(">BBHHHBB", first, 0, total, name, part, 64, protocol)
    return head + struct.pack(">H", _checksum(head + b"\0\0" + addresses + options)) + addresses + options


def _addresses(packet: Tcp) -> bytes:
    return b"".join(struct.pack(">BBH", 10, 0, host) for host in _hosts(packet))


def ipv4(packet: Tcp, options: bytes = b"") -> bytes:
    addresses = _addresses(packet)
    segment = _tcp(packet, addresses)
    return _ipv4_header(len(segment), 6, addresses, packet.seq & 0xFFFF, options=options) + segment


def ipv6(packet: Tcp, extensions: tuple[tuple[int, bytes], ...] = ()) -> bytes:
    """`extensions` are (protocol number, body after its first byte), outermost first."""
    addresses = b"".join(b"\xfd" + host.to_bytes(15) for host in _hosts(packet))
    payload, following = _tcp(packet, addresses), 6
    for protocol, body in reversed(extensions):
        payload, following = bytes([following]) + body + payload, protocol
    length = len(payload) if len(payload) <= 0xFFFF else 0
    return struct.pack(">IHBB", 0x60000000, length, following, 64) + addresses + payload


def _ethernet(kind: int, payload: bytes) -> bytes:
    return _MACS + struct.pack(">H", kind) + payload


def ethernet(packet: Tcp) -> list[bytes]:
    return [_ethernet(0x0800, ipv4(packet))]


def _padded(packet: Tcp) -> list[bytes]:
    """Frames shorter than 90 bytes are filled up with what is no data."""
    return [_ethernet(0x0800, ipv4(packet)).ljust(90, b"P")]


def _options(packet: Tcp) -> list[bytes]:
    return [_ethernet(0x0800, ipv4(packet, options=b"\x94\x04\0\0"))]  # router alert


def _vlan(packet: Tcp) -> list[bytes]:
    return [_ethernet(0x8100, struct.pack(">HH", 5, 0x0800) + ipv4(packet))]


def _qinq(packet: Tcp) -> list[bytes]:
    return [_ethernet(0x88A8, struct.pack(">HHHH", 7, 0x8100, 5, 0x0800) + ipv4(packet))]


def _sll(packet: Tcp) -> list[bytes]:
    return [struct.pack(">HHH8sH", 0, 1, 6, _MACS[:6], 0x0800) + ipv4(packet)]


def _sll2(packet: Tcp) -> list[bytes]:
    return [struct.pack(">HHIHBB8s", 0x0800, 0, 2, 1, 0, 6, _MACS[:6]) + ipv4(packet)]


def _null(packet: Tcp) -> list[bytes]:
    return [struct.pack("<I", 2) + ipv4(packet)]


def _null6(packet: Tcp) -> list[bytes]:
    return [struct.pack("<I", 30) + ipv6(packet)]


def _loop(packet: Tcp) -> list[bytes]:
    return [struct.pack(">I", 2) + ipv4(packet)]


def _raw(packet: Tcp) -> list[bytes]:
    return [ipv4(packet)]


def _raw6(packet: Tcp) -> list[bytes]:
    return [ipv6(packet)]


def _ethernet6(packet: Tcp) -> list[bytes]:
    return [_ethernet(0x86DD, ipv6(packet))]


def _extended6(packet: Tcp) -> list[bytes]:
    """Hop-by-hop and destination options, six bytes of padding in each."""
    filler = bytes([0, 1, 4, 0, 0, 0, 0])
    return [_ethernet(0x86DD, ipv6(packet, extensions=((0, filler), (60, filler))))]


_OUTER = bytes([192, 168, 0, 1, 192, 168, 0, 2])


def _vxlan(packet: Tcp) -> list[bytes]:
    inner = struct.pack(">II", 0x08000000, 42 << 8) + ethernet(packet)[0]
    udp = struct.pack(">HHHH", 50_000, 4789, 8 + len(inner), 0) + inner
    return [_ethernet(0x0800, _ipv4_header(len(udp), 17, _OUTER) + udp)]


def _gre(packet: Tcp) -> list[bytes]:
    inner = struct.pack(">HH", 0, 0x0800) + ipv4(packet)
    return [_ethernet(0x0800, _ipv4_header(len(inner), 47, _OUTER) + inner)]


def _gre_ethernet(packet: Tcp) -> list[bytes]:
    """A bridge's GRE: with a key, and whole Ethernet frames inside."""
    inner = struct.pack(">HHI", 0x2000, 0x6558, 42) + ethernet(packet)[0]
    return [_ethernet(0x0800, _ipv4_header(len(inner), 47, _OUTER) + inner)]


_names = count(1)


def _fragments(packet: Tcp) -> list[bytes]:
    """Parts of 552 bytes, as a path of MTU 576 makes them."""
    addresses = _addresses(packet)
    segment, name = _tcp(packet, addresses), next(_names) & 0xFFFF
    parts = [(at, segment[at : at + 552]) for at in range(0, len(segment), 552)]
    last = parts[-1][0]
    return [
        _ethernet(0x0800, _ipv4_header(len(part), 6, addresses, name, at // 8 | (0 if at == last else 0x2000)) + part)
        for at, part in parts
    ]


def _fragments_backwards(packet: Tcp) -> list[bytes]:
    return _fragments(packet)[::-1]


def _fragments6(packet: Tcp) -> list[bytes]:
    whole = ipv6(packet)
    segment, name = whole[40:], next(_names)
    parts = [(at, segment[at : at + 1200]) for at in range(0, len(segment), 1200)]
    last = parts[-1][0]
    framed = []
    for at, part in parts:
        fragment = struct.pack(">BBHI", 6, 0, at | (0 if at == last else 1), name) + part
        framed.append(
            _ethernet(0x86DD, struct.pack(">IHBB", 0x60000000, len(fragment), 44, 64) + whole[8:40] + fragment)
        )
    return framed


FRAMINGS: dict[str, tuple[int, Framing]] = {
    "ethernet": (ETHERNET, ethernet),
    "padded": (ETHERNET, _padded),
    "vlan": (ETHERNET, _vlan),
    "qinq": (ETHERNET, _qinq),
    "sll": (SLL, _sll),
    "sll2": (SLL2, _sll2),
    "null": (NULL, _null),
    "null6": (NULL, _null6),
    "loop": (LOOP, _loop),
    "raw": (RAW, _raw),
    "raw6": (RAW, _raw6),
    "raw of the BSDs": (12, _raw),
    "ipv4": (IPV4, _raw),
    "ipv6": (IPV6, _raw6),
    "ethernet6": (ETHERNET, _ethernet6),
    "extended6": (ETHERNET, _extended6),
    "options": (ETHERNET, _options),
    "vxlan": (ETHERNET, _vxlan),
    "gre": (ETHERNET, _gre),
    "gre ethernet": (ETHERNET, _gre_ethernet),
    "fragments": (ETHERNET, _fragments),
    "fragments backwards": (ETHERNET, _fragments_backwards),
    "fragments6": (ETHERNET, _fragments6),
}


def pcap_header(link: int, order: str = "<", nanoseconds: bool = False) -> bytes:
    return struct.pack(order + "IHHiIII", 0xA1B23C4D if nanoseconds else 0xA1B2C3D4, 2, 4, 0, 0, WHOLE, link)


def pcap_record(frame: Frame, order: str = "<", nanoseconds: bool = False) -> bytes:
    second, rest = divmod(frame.at_ns, 1_000_000_000)
    return (
        struct.pack(order + "IIII", second, rest if nanoseconds else rest // 1000, len(frame.data), frame.length)
        + frame.data
    )


def pcap(captured: Iterable[Frame], link: int, order: str = "<", nanoseconds: bool = False) -> bytes:
    records = (pcap_record(frame, order, nanoseconds) for frame in captured)
    return b"".join([pcap_header(link, order, nanoseconds), *records])


def pcapng(captured: Iterable[Frame], link: int, order: str = "<", nanoseconds: bool = False) -> bytes:
    """One section, two interfaces (the second has the packets), then a block of a kind that nobody knows."""
    resolution = struct.pack(order + "HHB3xHH", 9, 1, 9, 0, 0) if nanoseconds else b""
    blocks = [
        _block(order, 0x0A0D0D0A, struct.pack(order + "IHHq", 0x1A2B3C4D, 1, 0, -1)),
        _block(order, 1, struct.pack(order + "HHI", ETHERNET, 0, WHOLE)),
        _block(order, 1, struct.pack(order + "HHI", link, 0, WHOLE) + resolution),
        _block(order, 0x0BAD, b"nobody knows"),
    ]
    for at_ns, data, length in captured:
        high, low = divmod(at_ns if nanoseconds else at_ns // 1000, 1 << 32)
        head = struct.pack(order + "IIIII", 1, high, low, len(data), length)
        blocks.append(_block(order, 6, head + data + b"\0" * (-len(data) % 4)))
    return b"".join(blocks)


def _block(order: str, kind: int, body: bytes) -> bytes:
    length = struct.pack(order + "I", len(body) + 12)
    return struct.pack(order + "I", kind) + length + body + length


def squeezed(data: bytes) -> bytes:
    """gzip, the same for the same bytes."""
    return gzip.compress(data, mtime=0)
