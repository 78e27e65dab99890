"""What networks and captures do to packets: from the segments of a capture, those of a worse one.

LOSSLESS ones leave every byte in, so every message can be had; LOSSY ones do not, and `recoverable` says which requests
are still whole. All are seeded: the same packets in, the same out.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

from tests.traffic.capture.links import ACK, FIN, PSH, RST, SYN, Tcp
from tests.traffic.capture.material import ENDINGS, SECOND_NS, Truth, base

Packets = list[Tcp]
Mutation = Callable[[Packets], Packets]

_MS = 1_000_000
_WRAP = 1 << 32


def _by_time(packets: Iterable[Tcp]) -> Packets:
    return sorted(packets, key=lambda packet: packet.at_ns)


def _retimed(packets: Packets, order: Packets) -> Packets:
    """Another order, stamped with the moments of the old one: the capture saw them so."""
    return [packet._replace(at_ns=slot.at_ns) for slot, packet in zip(packets, order, strict=True)]


def _neighbours(packets: Packets) -> Iterator[tuple[int, int]]:
    """Places of each packet and of the next one of its connection."""
    places = defaultdict(list)
    for place, packet in enumerate(packets):
        places[packet.connection].append(place)
    for of_one in places.values():
        yield from pairwise(of_one)


def _swapped(packets: Packets, pairs: list[tuple[int, int]], times: int) -> Packets:
    """Change the places of some pairs that have none in common."""
    order, touched = list(packets), set()
    random.Random(times).shuffle(pairs)
    for first, second in pairs:
        if len(touched) < 2 * times and not touched & {first, second}:
            touched |= {first, second}
            order[first], order[second] = order[second], order[first]
    assert len(touched) == 2 * times
    return _retimed(packets, order)


def reordered(packets: Packets) -> Packets:
    """90 segments come after the one that follows them in their direction."""
    last: dict[tuple[int, bool], int] = {}
    pairs = []
    for place, packet in enumerate(packets):
        if packet.payload:
            before = last.get((packet.connection, packet.from_client))
            if before is not None and packet.at_ns - packets[before].at_ns < _MS:
                pairs.append((before, place))
            last[packet.connection, packet.from_client] = place
    return _swapped(packets, pairs, 90)


def acknowledged_first(packets: Packets) -> Packets:
    """90 segments are seen after the other side's acknowledgement of them."""
    pairs = [
        (a, b)
        for a, b in _neighbours(packets)
        if packets[a].payload
        and (packets[b].ack, packets[b].from_client) == (packets[a].end, not packets[a].from_client)
        and packets[b].at_ns - packets[a].at_ns < _MS
    ]
    return _swapped(packets, pairs, 90)


def jittered(packets: Packets) -> Packets:
    """Every packet is late by up to 50 us, so whole bursts come in any order."""
    rng = random.Random(5)
    return _retimed(packets, sorted(packets, key=lambda packet: packet.at_ns + rng.randrange(50_000)))


def duplicated(packets: Packets) -> Packets:
    """One packet in twenty comes again, as it was, up to 300 ms later."""
    rng = random.Random(6)
    again = [p._replace(at_ns=p.at_ns + rng.randrange(_MS, 300 * _MS)) for p in packets if rng.random() < 0.05]
    return _by_time([*packets, *again])


def contradicted(packets: Packets) -> Packets:
    """42 segments are sent again with other bytes, half of them at once."""
    rng = random.Random(7)
    again = []
    for number, packet in enumerate(rng.sample([p for p in packets if p.payload], 42)):
        later_ns = 5_000 if number % 2 else rng.randrange(_MS, 300 * _MS)
        again.append(packet._replace(at_ns=packet.at_ns + later_ns, payload=bytes(byte ^ 1 for byte in packet.payload)))
    return _by_time([*packets, *again])


def overlapping(packets: Packets) -> Packets:
    """60 segments come as one with the segment before them, which was there already."""
    rng = random.Random(8)
    last: dict[tuple[int, bool], Tcp] = {}
    changed = []
    for packet in packets:
        before = last.get((packet.connection, packet.from_client))
        if packet.payload:
            last[packet.connection, packet.from_client] = packet
            if before and before.end == packet.seq and rng.random() < 0.02:
                packet = packet._replace(seq=before.seq, payload=before.payload + packet.payload)
        changed.append(packet)
    return changed


def probed(packets: Packets) -> Packets:
    """59 times an idle side asks whether the other still lives: a byte of garbage, or none, before its next one."""
    quiet = [packets[a] for a, b in _neighbours(packets) if packets[b].at_ns - packets[a].at_ns > 10 * _MS]
    probes = []
    for number, packet in enumerate(random.Random(9).sample(quiet, 59)):
        at_ns = packet.at_ns + 4 * _MS
        mine, other = (packet.end, packet.ack) if not packet.flags & SYN else (packet.end + 1, packet.ack)
        probe = packet._replace(at_ns=at_ns, seq=mine - 1, flags=ACK, payload=b"\0" * (number % 3 > 0))
        answer = packet._replace(
            at_ns=at_ns + 90_000, from_client=not packet.from_client, seq=other, ack=mine, flags=ACK, payload=b""
        )
        probes += [probe, answer]
    return _by_time([*packets, *probes])


def wrapped(packets: Packets) -> Packets:
    """Sequence numbers pass 2^32 in the midst of both sides of every connection."""
    low: dict[tuple[int, bool], int] = {}
    high: dict[tuple[int, bool], int] = {}
    for packet in packets:
        side = (packet.connection, packet.from_client)
        low[side], high[side] = min(low.get(side, packet.seq), packet.seq), max(high.get(side, 0), packet.end)
    shift = {side: _WRAP - (low[side] + high[side]) // 2 for side in low}

    def shifted(packet: Tcp) -> Tcp:
        seq = packet.seq + shift[packet.connection, packet.from_client]
        ack = packet.ack + shift[packet.connection, not packet.from_client] if packet.flags & ACK else 0
        return packet._replace(seq=seq, ack=ack)

    return [shifted(packet) for packet in packets]


def offloaded(packets: Packets) -> Packets:
    """Segments of one burst are one packet of up to 64 kB, as the sending host sees them before its card cuts them."""
    merged: Packets = []
    last: dict[tuple[int, bool], int] = {}
    for packet in packets:
        side = (packet.connection, packet.from_client)
        before = merged[last[side]] if side in last else None
        if packet.payload and before and before.payload and _joins(before, packet):
            flags = before.flags | packet.flags
            merged[last[side]] = before._replace(payload=before.payload + packet.payload, flags=flags)
            continue
        if packet.payload or packet.flags & (SYN | FIN | RST):
            last[side] = len(merged)
        merged.append(packet)
    return merged


def _joins(before: Tcp, packet: Tcp) -> bool:
    near = packet.at_ns - before.at_ns < 2 * _MS and len(before.payload) + len(packet.payload) <= 65_160
    return near and before.end == packet.seq and not before.flags & PSH


def without_handshakes(packets: Packets) -> Packets:
    return [packet for packet in packets if not packet.flags & SYN]


def without_ends(packets: Packets) -> Packets:
    """No connection is seen to end, but where an end is what a request was cut short by."""
    telling = {truth.connection for truth in base().truths if truth.kind in ENDINGS}
    return [p for p in packets if p.connection in telling or not p.flags & (FIN | RST)]


def with_strays(packets: Packets) -> Packets:
    """Segments of another life of the connection: their numbers are far from the stream."""
    rng = random.Random(10)
    strays = []
    for packet in rng.sample([p for p in packets if not p.flags & (SYN | RST | FIN)], 40):
        seq = packet.seq + rng.choice((1, -1)) * rng.randrange(1 << 29, 1 << 30)
        strays.append(packet._replace(at_ns=packet.at_ns + 1000, seq=seq, flags=ACK, payload=b"stray" * 50))
    return _by_time([*packets, *strays])


def in_company(packets: Packets) -> Packets:
    """Connections that are not HTTP/1.1, among the others: TLS, HTTP/2, SSH, one that says nothing."""
    greetings = (
        bytes.fromhex("16030100c8010000c4") + b"T" * 196,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"SSH-2.0-me\r\n",
        b"",
    )
    others = []
    for number, greeting in enumerate(greetings):
        at_ns, client = packets[0].at_ns + number * _MS, (77, 7_000 + number)
        said = [(True, 0, 0, SYN, b""), (False, 0, 1, SYN | ACK, b""), (True, 1, 1, ACK, greeting)]
        for step, (from_client, seq, ack, flags, payload) in enumerate(said):
            others.append(Tcp(at_ns + step * 1000, 900 + number, from_client, client, seq, ack, flags, payload))
    return _by_time([*packets, *others])


LOSSLESS: tuple[Mutation, ...] = (
    reordered, acknowledged_first, jittered, duplicated, contradicted, overlapping, probed, wrapped, offloaded,
    without_handshakes, without_ends, with_strays, in_company,
)  # fmt: skip


def request_segments_lost(packets: Packets) -> Packets:
    """11 segments of the clients were not captured, though they arrived."""
    return _without(packets, [p for p in packets if p.payload and p.from_client], 11)


def answer_segments_lost(packets: Packets) -> Packets:
    return _without(packets, [p for p in packets if p.payload and not p.from_client], 11)


def one_in_a_hundred_lost(packets: Packets) -> Packets:
    return lossy(packets, 12, 0.01)


def lossy(packets: Packets, seed: int, share: float) -> Packets:
    rng = random.Random(seed)
    return [packet for packet in packets if rng.random() >= share]


def a_burst_lost(packets: Packets) -> Packets:
    """The capture stood still for 100 ms, in the midst of the traffic."""
    from_ns = packets[len(packets) // 2].at_ns
    return [packet for packet in packets if not from_ns <= packet.at_ns < from_ns + 100 * _MS]


def begun_late(packets: Packets) -> Packets:
    """The capture begins when a quarter of the traffic is over."""
    return packets[len(packets) // 4 :]


def ended_early(packets: Packets) -> Packets:
    return packets[: len(packets) * 3 // 4]


LOSSY: tuple[Mutation, ...] = (
    request_segments_lost, answer_segments_lost, one_in_a_hundred_lost, a_burst_lost, begun_late, ended_early,
)  # fmt: skip


def _without(packets: Packets, candidates: Packets, times: int) -> Packets:
    lost = set(map(id, random.Random(11).sample(candidates, times)))
    return [packet for packet in packets if id(packet) not in lost]


def recoverable(truths: Iterable[Truth], packets: Packets, room: int = 1 << 30) -> list[Truth]:
    """The truths whose request is whole in these packets, of which no more than `room` bytes of payload were kept."""
    seen = defaultdict(list)
    for packet in packets:
        if packet.from_client and packet.payload:
            seen[packet.connection].append((packet.seq, packet.seq + min(room, len(packet.payload))))
    for spans in seen.values():
        spans.sort()
    return [truth for truth in truths if _covered(seen[truth.connection], truth.request.start, truth.request.end)]


def _covered(spans: list[tuple[int, int]], start: int, end: int) -> bool:
    for first, last in spans:
        if first <= start:
            start = max(start, last)
    return start >= end


def twice(gap_ns: int = 2 * SECOND_NS) -> tuple[Packets, list[Truth]]:
    """Two captures in turn whose connections use the same addresses and ports, and other sequence numbers."""
    first = base()
    second = base(seed=2, at_ns=first.packets[-1].at_ns + gap_ns)
    return [*first.packets, *second.packets], [*first.truths, *second.truths]
