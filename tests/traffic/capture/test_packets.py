"""Packets -> TCP segments: every shape gives the same segment, what gives none is counted. scapy writes the packets."""

from collections.abc import Iterator
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scapy.layers.inet import ICMP, IP, TCP, UDP, IPOption_Router_Alert, fragment
from scapy.layers.inet6 import (
    HBHOptUnknown,
    IPv6,
    IPv6ExtHdrDestOpt,
    IPv6ExtHdrFragment,
    IPv6ExtHdrHopByHop,
    Jumbo,
    PadN,
    fragment6,
)
from scapy.layers.l2 import ARP, GRE, Dot1AD, Dot1Q, Ether
from scapy.layers.vxlan import VXLAN
from scapy.packet import Packet as Built
from scapy.packet import Raw

from harness.model import UsageError
from harness.traffic.capture.account import Account
from harness.traffic.capture.dissect import HELD_BYTES, HELD_NS
from harness.traffic.capture.packets import ACK, FLOWS_KEPT, SYN, Flow, Segment, segments
from harness.traffic.capture.records import Packet

SAID = b"POST /v1/chat/completions HTTP/1.1\r\n" + bytes(range(256)) * 3
ENDS = {"src": "10.0.0.1", "dst": "10.0.0.2"}
ENDS_6 = {"src": "fd00::1", "dst": "fd00::2"}
FLOW = Flow(bytes([10, 0, 0, 1]), 40_001, bytes([10, 0, 0, 2]), 8000)
FLOW_6 = Flow(bytes.fromhex("fd00" + "0" * 27 + "1"), 40_001, bytes.fromhex("fd00" + "0" * 27 + "2"), 8000)
ETHER = Ether(src="02:00:00:00:00:01", dst="02:00:00:00:00:02")


def tcp(said: bytes = SAID, **fields: object) -> Built:
    usual = {"sport": 40_001, "dport": 8000, "seq": 5, "ack": 6, "flags": "PA", "options": [("Timestamp", (7, 8))]}
    return TCP(**{**usual, **fields}) / Raw(said)


def sliced(*frames: bytes | Built, link: int = 1, ports: frozenset[int] = frozenset()) -> tuple[list[Segment], Account]:
    account = Account()
    taken = [Packet(n, link, bytes(frame), len(bytes(frame))) for n, frame in enumerate(frames)]
    found = list(segments(taken, account, ports))
    account.packets = len(taken)
    return found, account


def only(*frames: bytes | Built, link: int = 1) -> Segment:
    found, account = sliced(*frames, link=link)
    assert len(found) == 1 and account.segments == 1
    return found[0]


def test_the_common_shape() -> None:
    """Every field of a segment, behind Ethernet and IPv4."""
    assert only(ETHER / IP(**ENDS) / tcp()) == Segment(0, FLOW, 5, 6, 24, SAID)
    assert only(ETHER / IP(**ENDS) / tcp(b"", flags="S", options=[])) == Segment(0, FLOW, 5, 6, SYN, b"")
    assert only(ETHER / IPv6(**ENDS_6) / tcp()) == Segment(0, FLOW_6, 5, 6, 24, SAID)
    assert FLOW.back.back == FLOW and FLOW.back.source_port == 8000


@pytest.mark.parametrize("network", [IP(**ENDS), IPv6(**ENDS_6)])
def test_what_fills_up_a_short_frame_is_no_payload(network: Built) -> None:
    """An Ethernet frame has at least 60 bytes, and some cards leave the checksum behind them."""
    found = only(bytes(ETHER / network / tcp(b"hi", options=[])) + b"\x55" * 20)
    assert (found.payload, found.cut) == (b"hi", 0)


V4, V6 = bytes(IP(**ENDS) / tcp()), bytes(IPv6(**ENDS_6) / tcp())


@pytest.mark.parametrize(
    ("link", "frame", "flow"),
    [
        (113, bytes(14) + b"\x08\x00" + V4, FLOW),
        (113, bytes(14) + b"\x86\xdd" + V6, FLOW_6),
        (113, bytes(14) + b"\x81\x00\x00\x07\x08\x00" + V4, FLOW._replace(net=0x1007)),
        (276, b"\x08\x00" + bytes(18) + V4, FLOW),
        (276, b"\x86\xdd" + bytes(18) + V6, FLOW_6),
        (0, b"\x02\x00\x00\x00" + V4, FLOW),
        (0, b"\x00\x00\x00\x1e" + V6, FLOW_6),
        (108, b"\x00\x00\x00\x02" + V4, FLOW),
        *[(link, V4, FLOW) for link in (12, 14, 101, 228)],
        *[(link, V6, FLOW_6) for link in (12, 14, 101, 229)],
    ],
)
def test_every_link_type(link: int, frame: bytes, flow: Flow) -> None:
    """The same segment, whatever stands before the datagram."""
    assert only(frame, link=link) == Segment(0, flow, 5, 6, 24, SAID)


def test_a_link_type_that_nobody_reads_is_the_users_error() -> None:
    """It is named by its number, with what to do."""
    with pytest.raises(UsageError, match=r"link type 105, which is not read: capture on an Ethernet interface"):
        sliced(V4, link=105)


@pytest.mark.parametrize(
    ("tags", "net"),
    [
        (Dot1Q(vlan=7), 0x1007),
        (Dot1Q(vlan=0, prio=5), 0),
        (Dot1AD(vlan=3) / Dot1Q(vlan=7), 0x1003 << 13 | 0x1007),
        (Dot1Q(vlan=3, type=0x9100) / Dot1Q(vlan=7), 0x1003 << 13 | 0x1007),
    ],
)
def test_vlan_tags_tell_equal_addresses_apart(tags: Built, net: int) -> None:
    """A tag with a number makes another flow; one with a priority alone does not."""
    for network, flow in ((IP(**ENDS), FLOW), (IPv6(**ENDS_6), FLOW_6)):
        assert only(ETHER / tags / network / tcp()) == Segment(0, flow._replace(net=net), 5, 6, 24, SAID)


OUTER, OUTER_6 = ETHER / IP(src="192.0.2.1", dst="192.0.2.2"), ETHER / IPv6(src="fd01::1", dst="fd01::2")
INNER = ETHER / IP(**ENDS) / tcp()


@pytest.mark.parametrize("outer", [OUTER, OUTER_6])
@pytest.mark.parametrize("port", [4789, 8472])
def test_vxlan(outer: Built, port: int) -> None:
    """What a cloud's mirror sends: the frame inside, told apart by its network's number, without scapy."""
    found, account = sliced(outer / UDP(sport=9, dport=port) / VXLAN(vni=77, flags=8) / INNER)
    assert found == [Segment(0, FLOW._replace(net=1 << 24 | 77), 5, 6, 24, SAID)]
    assert account.slow_path == 0


@pytest.mark.parametrize(
    ("frame", "flow"),
    [
        (OUTER / GRE() / IP(**ENDS) / tcp(), FLOW),
        (OUTER / GRE(proto=0x6558, key_present=1, key=9) / INNER, FLOW._replace(net=1 << 32 | 9)),
        (OUTER_6 / GRE(chksum_present=1, seqnum_present=1) / IP(**ENDS) / tcp(), FLOW),
        (OUTER / IP(**ENDS) / tcp(), FLOW),
        (OUTER / IPv6(**ENDS_6) / tcp(), FLOW_6),
        (OUTER_6 / IP(**ENDS) / tcp(), FLOW),
        (OUTER_6 / IPv6(**ENDS_6) / tcp(), FLOW_6),
        (ETHER / IP(**ENDS, options=[IPOption_Router_Alert()]) / tcp(), FLOW),
        (ETHER / IPv6(**ENDS_6) / IPv6ExtHdrHopByHop(options=[PadN(optdata=b"1234")]) / tcp(), FLOW_6),
        (ETHER / IPv6(**ENDS_6) / IPv6ExtHdrHopByHop(options=[HBHOptUnknown()]) / IPv6ExtHdrDestOpt() / tcp(), FLOW_6),
        (OUTER / GRE(proto=0x6558) / ETHER / Dot1Q(vlan=7) / IP(**ENDS) / tcp(), FLOW._replace(net=0x1007)),
    ],
)
def test_uncommon_shapes_go_through_scapy_once(frame: Built, flow: Flow) -> None:
    """Tunnels, IP options and extension headers; what fills up the frame is no payload here either."""
    for fill in (b"", b"\x55" * 6):
        found, account = sliced(bytes(frame) + fill)
        assert found == [Segment(0, flow, 5, 6, 24, SAID)]
        assert account.slow_path == 1


def test_offloaded_frames_without_a_length() -> None:
    """A frame larger than IP can say has 0 as its length: all that was captured is its own."""
    large = SAID * 100
    v4 = bytearray(bytes(IP(**ENDS, len=0) / tcp(large)))
    assert only(b"\0" * 12 + b"\x08\x00" + bytes(v4)).payload == large
    assert only(ETHER / IPv6(**ENDS_6, plen=0) / tcp(large)).payload == large
    jumbo = IPv6ExtHdrHopByHop(options=[Jumbo(jumboplen=8 + 32 + len(large))])
    assert only(ETHER / IPv6(**ENDS_6, plen=0) / jumbo / tcp(large)).payload == large


@pytest.mark.parametrize(
    "frame",
    [
        INNER,
        ETHER / IPv6(**ENDS_6) / tcp(),
        ETHER / Dot1Q(vlan=7) / IP(**ENDS) / tcp(),
        OUTER / UDP(sport=9, dport=4789) / VXLAN(vni=77, flags=8) / INNER,
        OUTER / GRE() / IP(**ENDS) / tcp(),
        ETHER / IP(**ENDS, options=[IPOption_Router_Alert()]) / tcp(),
        ETHER / IPv6(**ENDS_6) / IPv6ExtHdrDestOpt() / tcp(),
        ETHER / IP(**ENDS, len=0) / tcp(),
    ],
)
def test_what_the_snap_length_took_is_told(frame: Built) -> None:
    """Wherever a packet is cut, its payload and what is missing of it add up, or it cannot be read at all."""
    whole, account, read = bytes(frame), Account(), 0
    for segment in segments([Packet(0, 1, whole[:kept], len(whole)) for kept in range(len(whole))], account):
        read += 1
        assert SAID.startswith(segment.payload)
        assert len(segment.payload) + segment.cut == len(SAID)
    assert read == account.cut_packets >= len(SAID)
    assert read + account.unreadable + account.not_tcp == len(whole)


def test_what_is_not_tcp_is_counted() -> None:
    """Other protocols, and TCP headers that an error message only quotes."""
    quoted = ICMP(type=3) / IP(**ENDS) / TCP(sport=40_001, dport=8000)
    others = [
        ETHER / ARP(), ETHER / IP(**ENDS) / UDP(sport=1, dport=53) / b"name", ETHER / IP(**ENDS) / ICMP(), ETHER / b"?",
        ETHER / IP(**ENDS) / quoted, OUTER / GRE() / IP(**ENDS) / quoted, ETHER / IPv6(**ENDS_6) / UDP() / b"x",
        OUTER / UDP(sport=4789, dport=53) / VXLAN() / INNER,
    ]  # fmt: skip
    found, account = sliced(*others)
    assert not found
    assert account.not_tcp == len(others) and account.segments == account.unreadable == 0
    assert sliced(b"\x00\x00\x00\x17\x81clnp", b"", link=0)[1].not_tcp == 2


@pytest.mark.parametrize("network", [IP(**ENDS), IPv6(**ENDS_6)])
def test_broken_headers_are_counted(network: Built) -> None:
    """A TCP header shorter than one can be, and one that is not all there."""
    found, account = sliced(ETHER / network / tcp(dataofs=4), bytes(ETHER / network / tcp(b"", options=[]))[:-9])
    assert not found
    assert account.unreadable == 2


def test_ports_leave_out_other_flows() -> None:
    """Both directions of a wanted port come out; the rest is counted."""
    there, back, other = tcp(), tcp(sport=8000, dport=40_001), tcp(dport=22)
    frames = [ETHER / IP(**ENDS) / each for each in (there, back, other, other)]
    found, account = sliced(*frames, ports=frozenset({8000}))
    assert [segment.flow.target_port for segment in found] == [8000, 40_001]
    assert (account.other_ports, account.segments) == (2, 2)


DATAGRAM = IP(**ENDS, id=9) / tcp()
PIECES = [bytes(ETHER / piece) for piece in fragment(DATAGRAM, fragsize=300)]
PIECES_6 = [bytes(ETHER / piece) for piece in fragment6(IPv6(**ENDS_6) / IPv6ExtHdrFragment(id=9) / tcp(), 400)]


@pytest.mark.parametrize(("pieces", "flow"), [(PIECES, FLOW), (PIECES_6, FLOW_6)])
def test_fragments_in_any_order(pieces: list[bytes], flow: Flow) -> None:
    """The datagram comes out once, with the piece that completed it, and duplicates change nothing."""
    assert len(pieces) >= 3
    for order in permutations(range(len(pieces))):
        found, account = sliced(*[pieces[n] for n in order])
        assert found == [Segment(len(pieces) - 1, flow, 5, 6, 24, SAID)]
        assert (account.fragments, account.fragments_held, account.fragments_lost) == (len(pieces), len(pieces) - 1, 0)
        assert account.segments == 1
    assert only(pieces[0], pieces[0], *pieces[1:]).payload == SAID


def test_fragments_of_different_datagrams_do_not_mix() -> None:
    """The same name in another direction, on another VLAN or of another protocol is another datagram."""
    back = IP(src=ENDS["dst"], dst=ENDS["src"], id=9) / tcp(SAID[::-1])
    tagged = [ETHER / Dot1Q(vlan=7) / piece for piece in fragment(IP(**ENDS, id=9) / tcp(SAID[1:]), 300)]
    backwards = [bytes(ETHER / piece) for piece in fragment(back, fragsize=300)]
    found, _ = sliced(*[piece for three in zip(PIECES, backwards, tagged, strict=True) for piece in three])
    assert [segment.payload for segment in found] == [SAID, SAID[::-1], SAID[1:]]


def test_overlapping_fragments_keep_the_first_copy() -> None:
    """A piece that repeats the bytes before it adds only what is new."""
    body = bytes(tcp())
    cuts = [(0, 304, 1), (160, 600, 1), (600, len(body), 0)]
    pieces = [ETHER / IP(**ENDS, id=9, proto=6, frag=a // 8, flags=more) / Raw(body[a:b]) for a, b, more in cuts]
    assert only(*pieces).payload == SAID


def test_fragments_through_tunnels() -> None:
    """A tunnel's packet that was fragmented, and a fragmented packet that went through a tunnel."""
    outside = fragment(IP(src="192.0.2.1", dst="192.0.2.2") / UDP(dport=4789) / VXLAN(vni=77, flags=8) / INNER, 300)
    assert only(*[ETHER / piece for piece in outside]).payload == SAID
    inside = [OUTER / GRE() / piece for piece in fragment(DATAGRAM, fragsize=300)]
    assert only(*[bytes(each) + b"\x55" * 5 for each in inside]).payload == SAID
    extended = fragment6(IPv6(**ENDS_6) / IPv6ExtHdrHopByHop() / IPv6ExtHdrFragment() / tcp(), 400)
    assert only(*[ETHER / piece for piece in extended]).payload == SAID


def test_a_datagram_that_never_becomes_whole_is_counted() -> None:
    """At the end of the capture, or as soon as its pieces are older than a host would wait."""
    found, account = sliced(*PIECES[1:])
    assert not found
    assert account.fragments_held == account.fragments_lost == len(PIECES) - 1
    account = Account()
    moments_ns = [0] * (len(PIECES) - 1) + [HELD_NS + 1]
    late = [Packet(at_ns, 1, piece, len(piece)) for at_ns, piece in zip(moments_ns, PIECES, strict=True)]
    assert not list(segments(late, account))
    assert account.fragments_lost == len(PIECES)


def test_fragments_are_held_within_bounds() -> None:
    """A flood of first pieces pushes the oldest out; nothing grows without end."""
    account, first, most = Account(), bytes(IP(**ENDS, proto=6, flags="MF") / Raw(bytes(8000))), 0

    def flood() -> Iterator[Packet]:
        nonlocal most
        for name in range(4000):
            yield Packet(name, 101, first[:4] + name.to_bytes(2, "big") + first[6:], len(first))
            most = max(most, account.fragments_held - account.fragments_lost)

    assert not list(segments(flood(), account))
    assert 0 < most <= HELD_BYTES // 8000 + 1
    assert account.fragments_lost == 4000


TUNNEL = bytes(OUTER / UDP(dport=4789) / VXLAN(vni=7, flags=8))[12:] + bytes(12)


@pytest.mark.parametrize("layer", [b"\x81\x00\x00\x05", TUNNEL])
def test_endless_nesting_ends(layer: bytes) -> None:
    """Tags or tunnels within each other, as deep as a packet has room for."""
    found, account = sliced(bytes(12) + layer * (60_000 // len(layer)))
    assert not found
    assert account.unreadable == 1


def test_more_flows_than_are_kept() -> None:
    """Forgetting the flows it met changes nothing but its speed."""
    frame = bytes(ETHER / IP(**ENDS) / tcp(b"", options=[]))
    sources = [number.to_bytes(4, "big") for number in range(FLOWS_KEPT + 10)]
    seen = segments((Packet(0, 1, frame[:26] + each + frame[30:], len(frame)) for each in sources), Account())
    assert [segment.flow.source for segment in seen] == sources


STARTS = [
    bytes(each)
    for each in (
        b"", ETHER / IP(**ENDS), INNER, ETHER / IPv6(**ENDS_6), OUTER / UDP(dport=4789) / VXLAN(flags=8), OUTER / GRE(),
        OUTER / GRE(key_present=1, proto=0x6558) / INNER, ETHER / Dot1Q(vlan=1), PIECES[0], PIECES_6[0], V4, V6,
        ETHER / IPv6(**ENDS_6) / IPv6ExtHdrHopByHop(),
    )
]  # fmt: skip


@given(
    link=st.sampled_from([1, 113, 276, 0, 108, 101]),
    frames=st.lists(
        st.builds(
            lambda start, kept, rest, flips: flipped(start[: len(start) - kept] + rest, flips),
            st.sampled_from(STARTS),
            st.integers(0, 30),
            st.binary(max_size=80),
            st.lists(st.tuples(st.integers(0, 90), st.integers(0, 255)), max_size=3),
        ),
        max_size=4,
    ),
)
def test_random_packets_never_crash_and_add_up(link: int, frames: list[bytes]) -> None:
    """Every packet is a segment or counted under one name, whatever is in it."""
    found, account = sliced(*frames, link=link)
    assert account.segments == len(found)
    assert all(segment.cut >= 0 for segment in found)


def flipped(data: bytes, flips: list[tuple[int, int]]) -> bytes:
    changed = bytearray(data)
    for at, value in flips:
        if at < len(changed):
            changed[at] = value
    return bytes(changed)


@given(
    said=st.binary(max_size=300),
    seq=st.integers(0, 2**32 - 1),
    flags=st.integers(0, 63),
    wide=st.booleans(),
    windows=st.integers(0, 14),
    fill=st.binary(max_size=20),
)
def test_scapy_reads_the_same(said: bytes, seq: int, flags: int, wide: bool, windows: int, fill: bytes) -> None:
    """The oracle: a full dissection of the same frame by scapy."""
    network = IPv6(**ENDS_6) if wide else IP(**ENDS)
    frame = bytes(ETHER / network / tcp(said, seq=seq, flags=flags | ACK, options=[("WScale", windows)])) + fill
    read = Ether(frame)[TCP]
    assert only(frame)[2:6] == (read.seq, read.ack, int(read.flags), bytes(read.payload.original if said else b""))
