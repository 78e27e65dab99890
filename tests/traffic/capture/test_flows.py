"""Whatever a capture does to packets, each side's bytes come out in order, once, and never made up."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.traffic.capture.account import Account
from harness.traffic.capture.flows import Kind, Limits, Reassembler, Step, steps
from harness.traffic.capture.packets import ACK, FIN, RST, SYN, Flow, Segment

MS = 1_000_000
SECOND = 1_000 * MS
PATIENCE_MS = 50
CLIENT = Flow(b"\x0a\0\0\1", 40_000, b"\x0a\0\0\2", 8_000)
SERVER = CLIENT.back


class Wire:
    """Both ends of a connection as a witness sees them: segments with right numbers, a millisecond apart."""

    def __init__(self, client_isn: int = 1_000, server_isn: int = 9_000, flow: Flow = CLIENT) -> None:
        self.segments: list[Segment] = []
        self.seqs = {flow: client_isn, flow.back: server_isn}
        self.flow = flow
        self.now_ms = 0

    def send(self, flow: Flow, payload: bytes = b"", flags: int = ACK, cut: int = 0) -> Segment:
        seq, ack = self.seqs[flow] % 2**32, self.seqs[flow.back] % 2**32
        self.now_ms += 1
        segment = Segment(self.now_ms * MS, flow, seq, ack if flags & ACK else 0, flags, payload, cut)
        self.seqs[flow] += len(payload) + cut + bool(flags & SYN) + bool(flags & FIN)
        self.segments.append(segment)
        return segment

    def handshake(self) -> "Wire":
        self.send(self.flow, flags=SYN)
        self.send(self.flow.back, flags=SYN | ACK)
        self.send(self.flow)
        return self

    def wait_ms(self, time_ms: int) -> "Wire":
        self.now_ms += time_ms
        return self


def told(segments: Iterable[Segment], limits: Limits | None = None) -> tuple[list[Step], Account]:
    account = Account()
    return list(steps(segments, account, limits)), account


def brief(found: Iterable[Step]) -> list[tuple[str, Kind, bytes]]:
    """Steps as side, kind and data, with neighbouring data of one side joined."""
    plain: list[tuple[str, Kind, bytes]] = []
    for step in found:
        side, before = "client" if step.flow == CLIENT else "server", b""
        if plain and plain[-1][:2] == (side, Kind.DATA) and step.kind is Kind.DATA:
            before = plain.pop()[2]
        plain.append((side, step.kind, before + step.data))
    return plain


def runs(found: Iterable[Step], flow: Flow) -> list[bytes]:
    """What one side said, split where something is missing; empty runs are left out."""
    parts = [b""]
    for step in found:
        if step.flow == flow and step.kind is Kind.DATA:
            parts[-1] += step.data
        elif step.flow == flow and step.kind is Kind.GAP:
            parts.append(b"")
    return [part for part in parts if part]


def pieces(payload: bytes, cuts: Iterable[int]) -> list[bytes]:
    edges = sorted({0, len(payload), *(cut % (len(payload) + 1) for cut in cuts)})
    return [payload[begin:end] for begin, end in pairwise(edges)]


TURNS = st.lists(st.tuples(st.binary(min_size=1, max_size=60), st.lists(st.integers(0, 60), max_size=5)), max_size=8)
NEAR_WRAP = st.integers(2**32 - 120, 2**32 - 1) | st.integers(0, 2**32 - 1)


@st.composite
def conversations(draw: st.DrawFn) -> tuple[list[tuple[str, bytes]], list[Segment]]:
    """A request and an answer in turn, each in any segments, with bare ACKs between; and what was said in order."""
    wire = Wire(draw(NEAR_WRAP), draw(NEAR_WRAP)).handshake()
    said = []
    for number, (payload, cuts) in enumerate(draw(TURNS)):
        flow = (CLIENT, SERVER)[number % 2]
        for piece in pieces(payload, cuts):
            wire.send(flow, piece)
            if draw(st.booleans()):
                wire.send(flow.back)
        said.append((("client", "server")[number % 2], payload))
    return said, wire.segments


def witnessed(draw: st.DrawFn, segments: Sequence[Segment], spread_ms: int) -> list[Segment]:
    """The same segments as a capture may have them after the handshake: up to `spread_ms` late, once or twice."""
    late = [(one, draw(st.integers(0, spread_ms))) for one in segments[3:] for _ in range(draw(st.integers(1, 2)))]
    moved = [one._replace(at_ns=one.at_ns + late_ms * MS) for one, late_ms in late]
    return [*segments[:3], *sorted(moved, key=lambda one: one.at_ns)]


@given(st.data())
def test_any_segmentation_order_and_duplication_gives_the_conversation(data: st.DataObject) -> None:
    """Both sides' bytes, over the wrap too, and each answer after the request it acknowledges; nothing is missing."""
    said, segments = data.draw(conversations())
    found, account = told(witnessed(data.draw, segments, PATIENCE_MS - 1))
    client_opened, *rest, _over = brief(found)
    assert client_opened == ("client", Kind.OPENED, b"")
    assert rest == [(side, Kind.DATA, payload) for side, payload in said]
    assert (account.connections, account.gaps, account.conflicting, account.mid_stream) == (1, 0, 0, 0)


@given(st.data())
def test_loss_gives_gaps_and_every_other_byte(data: st.DataObject) -> None:
    """Of each side exactly the runs between the lost segments come out, whatever order the rest came in."""
    _, segments = data.draw(conversations())
    lost = data.draw(st.sets(st.integers(3, max(len(segments), 4) - 1), max_size=6))
    kept = [one for index, one in enumerate(segments) if index not in lost]
    found, account = told(witnessed(data.draw, kept, PATIENCE_MS - 1))
    missing_bytes = 0
    for flow in (CLIENT, SERVER):
        parts = [b""]
        for index, one in enumerate(segments):
            if one.flow == flow and one.payload:
                parts[-1:] = [parts[-1], b""] if index in lost else [parts[-1] + one.payload]
                missing_bytes += len(one.payload) if index in lost else 0
        assert runs(found, flow) == [part for part in parts if part]
    assert account.gap_bytes <= missing_bytes
    assert account.conflicting == 0
    assert found[-1].kind is Kind.OVER


def test_the_common_case_is_told_at_once() -> None:
    """A segment in its place is one step with its own bytes, moment and direction; a bare ACK is none."""
    wire, reassembler = Wire().handshake(), Reassembler(Account())
    for segment in wire.segments:
        reassembler.feed(segment)
    for payload in (b"GET /", b" HTTP/1.1\r\n\r\n"):
        segment = wire.send(CLIENT, payload)
        assert list(reassembler.feed(segment)) == [Step(segment.at_ns, 0, CLIENT, Kind.DATA, payload)]
        assert list(reassembler.feed(wire.send(SERVER))) == []
    frame = wire.send(SERVER, bytes(64_000))
    assert [step.data for step in reassembler.feed(frame)] == [bytes(64_000)]
    assert [step.kind for step in reassembler.close()] == [Kind.OVER]


def test_the_first_copy_wins_and_other_bytes_are_counted() -> None:
    """A copy of what was told and a copy of what is held, each once the same and once other: the first bytes stay."""
    wire = Wire().handshake()
    first, hole, held = (wire.send(CLIENT, payload) for payload in (b"first ", b"hole ", b"held"))
    copies = [first, first._replace(payload=b"FIRST "), held, held._replace(payload=b"HELD")]
    segments = [*wire.segments[:3], first, held, *copies, hole]
    found, account = told([one._replace(at_ns=held.at_ns) for one in segments])
    assert runs(found, CLIENT) == [b"first hole held"]
    assert (account.duplicates, account.conflicting, account.reordered, account.gaps) == (2, 2, 3, 0)


def test_overlaps_are_trimmed_at_both_ends() -> None:
    """A repeated segment that begins before what was told and ends beyond what is held brings only what is new."""
    wire = Wire().handshake()
    one = wire.send(CLIENT, b"abcd")
    later = one._replace(seq=one.seq + 6, payload=b"gh")
    wide = one._replace(seq=one.seq + 2, payload=b"cdefghij")
    found, account = told([*wire.segments, later, wide])
    assert runs(found, CLIENT) == [b"abcdefghij"]
    assert (account.duplicates, account.conflicting, account.gaps) == (1, 0, 0)


def test_keep_alive_probes_are_no_data() -> None:
    """No byte or one garbage byte before the next one: counted as a probe, told to nobody, in conflict with nothing."""
    wire = Wire().handshake()
    last = wire.send(CLIENT, b"request")
    probe = last._replace(seq=last.seq + 6, payload=b"\0")
    found, account = told([*wire.segments, probe, probe._replace(payload=b""), wire.send(CLIENT, b" more")])
    assert runs(found, CLIENT) == [b"request more"]
    assert (account.probes, account.duplicates, account.conflicting) == (2, 0, 0)


def test_a_probe_after_a_loss_is_no_data_either() -> None:
    """Its garbage byte stands where a lost byte was that the other side has long acknowledged."""
    wire = Wire().handshake()
    lost = wire.send(CLIENT, b"lost request")
    wire.send(SERVER)
    wire.wait_ms(1_000).segments.remove(lost)
    probe = wire.send(CLIENT)._replace(seq=lost.seq + len(lost.payload) - 1, payload=b"\0")
    wire.segments[-1] = probe
    wire.send(SERVER)
    wire.send(CLIENT, b"next request")
    found, account = told(wire.segments)
    assert runs(found, CLIENT) == [b"next request"]
    assert (account.probes, account.gaps, account.gap_bytes) == (1, 1, len(lost.payload))


def test_a_lost_request_is_a_gap_before_its_answer() -> None:
    """The answer acknowledges bytes that nobody saw: the gap is told first, as soon as the patience is over."""
    wire = Wire().handshake()
    lost = wire.send(CLIENT, b"lost")
    wire.send(SERVER)
    wire.wait_ms(2 * PATIENCE_MS).segments.remove(lost)
    wire.send(SERVER, b"answer")
    account = Account()
    reassembler = Reassembler(account)
    found = [step for segment in wire.segments for step in reassembler.feed(segment)]
    assert brief(found)[1:] == [("client", Kind.GAP, b""), ("server", Kind.DATA, b"answer")]
    assert account.gap_bytes == 4


def test_a_hole_that_is_acknowledged_is_waited_for_only_so_long() -> None:
    """Inside the patience it is filled; after it the rest goes on behind a gap, and what comes late is dropped."""
    wire = Wire().handshake()
    hole, rest = wire.send(CLIENT, b"hole"), wire.send(CLIENT, b"rest")
    acknowledged = wire.send(SERVER)
    for late_ms, expected in ((PATIENCE_MS - 1, [b"holerest"]), (PATIENCE_MS, [b"rest"])):
        late = hole._replace(at_ns=acknowledged.at_ns + late_ms * MS)
        found, _ = told([*wire.segments[:3], rest, acknowledged, late])
        assert runs(found, CLIENT) == expected


def test_a_hole_that_nobody_acknowledged_is_waited_for_longer() -> None:
    """The sender will repeat it: seconds later it still counts, but not beyond the limit."""
    wire = Wire().handshake()
    hole, rest = wire.send(CLIENT, b"hole"), wire.send(CLIENT, b"rest")
    for late_s, expected in ((29, [b"holerest"]), (31, [b"rest"])):
        found, _ = told([*wire.segments[:3], rest, hole._replace(at_ns=rest.at_ns + late_s * SECOND)])
        assert runs(found, CLIENT) == expected


def test_one_wrong_acknowledgement_drops_nothing() -> None:
    """A single packet that acknowledges bytes to come makes no gap once the next one says the truth."""
    wire = Wire().handshake()
    wire.send(CLIENT, b"one ")
    wrong = wire.send(SERVER)
    wire.segments[-1] = wrong._replace(ack=wrong.ack + 5_000)
    wire.send(SERVER, b"answer")
    wire.wait_ms(10 * PATIENCE_MS).send(CLIENT, b"two")
    found, account = told(wire.segments)
    assert (runs(found, CLIENT), runs(found, SERVER)) == ([b"one two"], [b"answer"])
    assert account.gaps == 0


def test_the_snap_length_makes_a_gap_after_the_payload() -> None:
    """Cut bytes are missing for good, also of a segment that waited for another."""
    wire = Wire().handshake()
    wire.send(CLIENT, b"head", cut=1_000)
    first, second = wire.send(CLIENT, b"next", cut=7), wire.send(CLIENT, b"last")
    found, account = told([*wire.segments[:4], second, first])
    assert runs(found, CLIENT) == [b"head", b"next", b"last"]
    assert (account.gaps, account.gap_bytes) == (2, 1_007)


def test_a_capture_may_begin_in_the_middle() -> None:
    """Without a SYN the first data opens the connection, the other side stands where it is acknowledged."""
    wire = Wire()
    wire.send(SERVER)
    wire.send(CLIENT, b"rest of a request")
    missing = wire.send(SERVER, b"HTTP/1.1")
    wire.send(SERVER, b" 200 OK")
    wire.segments.remove(missing)
    found, account = told(wire.segments)
    assert brief(found) == [
        ("client", Kind.DATA, b"rest of a request"),
        ("server", Kind.GAP, b""),
        ("server", Kind.DATA, b" 200 OK"),
        ("client", Kind.OVER, b""),
    ]
    assert (account.connections, account.mid_stream) == (1, 1)


def test_packets_that_say_nothing_open_nothing() -> None:
    """A bare ACK, FIN or RST of a connection that nobody saw is the end of something old."""
    wire = Wire()
    for flags in (ACK, FIN | ACK, RST):
        wire.send(CLIENT, flags=flags)
    assert told(wire.segments) == ([], Account())


def test_a_lost_syn_is_known_by_its_answer() -> None:
    """A SYN+ACK says which side is the client, and the SYN that comes after it is no other connection."""
    wire = Wire().handshake()
    wire.send(CLIENT, b"request")
    syn, answer, *rest = wire.segments
    for segments in ([answer, *rest], [answer, syn, *rest]):
        found, account = told(segments)
        assert [(step.flow, step.kind) for step in found] == [
            (CLIENT, Kind.OPENED), (CLIENT, Kind.DATA), (CLIENT, Kind.OVER),
        ]  # fmt: skip
        assert (account.connections, account.mid_stream) == (1, 0)


def test_a_port_used_again_is_another_connection() -> None:
    """A SYN with another first number ends the old connection; the same SYN again does not."""
    old = Wire().handshake()
    old.send(CLIENT, b"old")
    new = Wire(2_000_000_000, 7)
    new.now_ms = old.now_ms
    new.handshake()
    new.send(CLIENT, b"new")
    found, account = told([*old.segments, old.segments[0], *new.segments])
    assert [(step.connection, step.kind, step.data) for step in found] == [
        (0, Kind.OPENED, b""), (0, Kind.DATA, b"old"), (0, Kind.OVER, b""),
        (1, Kind.OPENED, b""), (1, Kind.DATA, b"new"), (1, Kind.OVER, b""),
    ]  # fmt: skip
    assert account.connections == 2


def test_fin_comes_after_the_data_before_it() -> None:
    """Also when it was captured first; the connection is over when both sent one and late packets had their time."""
    wire = Wire().handshake()
    data = wire.send(CLIENT, b"request")
    fin = wire.send(CLIENT, flags=FIN | ACK)
    wire.segments[-2:] = [fin, data._replace(at_ns=fin.at_ns)]
    wire.send(SERVER, b"answer", flags=FIN | ACK)
    wire.send(CLIENT)
    other = Wire(flow=CLIENT._replace(source_port=1)).wait_ms(6_000)
    other.send(other.flow, b"another")
    found, _ = told([*wire.segments, *other.segments])
    assert brief(step for step in found if step.connection == 0) == [
        ("client", Kind.OPENED, b""), ("client", Kind.DATA, b"request"), ("client", Kind.FIN, b""),
        ("server", Kind.DATA, b"answer"), ("server", Kind.FIN, b""), ("client", Kind.OVER, b""),
    ]  # fmt: skip
    assert [step.connection for step in found if step.kind is Kind.OVER or step.data == b"another"] == [0, 1, 1]


def test_reset_comes_after_what_its_sender_had_seen() -> None:
    """The answer's bytes that it acknowledges come first, those under way after it; the second reset is the first."""
    wire = Wire().handshake()
    wire.send(CLIENT, b"request")
    seen = wire.send(SERVER, b"seen ")
    reset = wire.send(CLIENT, flags=RST | ACK)
    wire.segments[-2:] = [reset, seen._replace(at_ns=reset.at_ns)]
    wire.send(SERVER, b"under way")
    wire.segments.append(reset._replace(at_ns=wire.now_ms * MS, flags=RST, ack=0))
    found, account = told(wire.segments)
    assert brief(found)[2:] == [
        ("server", Kind.DATA, b"seen "), ("client", Kind.RESET, b""),
        ("server", Kind.DATA, b"under way"), ("client", Kind.OVER, b""),
    ]  # fmt: skip
    assert account.resets == 1


def test_a_silent_connection_is_over_after_the_idle_limit() -> None:
    """Another connection's packets move the clock; what goes on later is a connection of its own."""
    wire, other = Wire().handshake(), Wire(flow=CLIENT._replace(source_port=1))
    wire.send(CLIENT, b"before")
    other.wait_ms(700_000).send(other.flow, b"other")
    wire.wait_ms(701_000).send(CLIENT, b"after")
    found, account = told([*wire.segments[:4], *other.segments, *wire.segments[4:]])
    said = [(step.connection, step.data) for step in found if step.data]
    assert said == [(0, b"before"), (1, b"other"), (2, b"after")]
    assert [step.connection for step in found if step.kind is Kind.OVER] == [0, 1, 2]
    assert account.idle == 1


@pytest.mark.parametrize("ahead", [20 << 20, 1 << 30, (1 << 31) - 1])
def test_a_number_far_from_its_stream_is_counted_and_costs_nothing(ahead: int) -> None:
    """Garbage in the sequence, to either side, or in the acknowledgement moves nothing and is not kept."""
    wire, account = Wire().handshake(), Account()
    wire.send(CLIENT, b"one ")
    reassembler = Reassembler(account)
    found = [step for segment in wire.segments for step in reassembler.feed(segment)]
    garbage = wire.send(CLIENT)
    for wild in (
        garbage._replace(seq=(garbage.seq + ahead) % 2**32, payload=b"wild"),
        garbage._replace(seq=(garbage.seq - ahead) % 2**32, payload=b"wild"),
        garbage._replace(ack=(garbage.ack + ahead) % 2**32),
    ):
        assert list(reassembler.feed(wild)) == []
    assert (account.far, reassembler.held_bytes) == (3, 0)
    found += [*reassembler.feed(wire.send(CLIENT, b"two")), *reassembler.close()]
    assert runs(found, CLIENT) == [b"one two"]


def test_a_stream_that_goes_on_far_away_is_found_again() -> None:
    """After more is lost than the window holds, the second segment in a row is believed: a gap, and on it goes."""
    wire = Wire().handshake()
    wire.send(SERVER, b"before")
    wire.seqs[SERVER] += 1 << 30
    for payload in (b"first", b"second", b"third"):
        wire.send(SERVER, payload)
    found, account = told(wire.segments)
    assert runs(found, SERVER) == [b"before", b"secondthird"]
    assert (account.far, account.gaps) == (2, 1)


def test_what_is_held_has_a_bound() -> None:
    """Many segments behind a hole, on one connection and on many: never more than the limits, no byte lost."""
    limits = Limits(side_bytes=100_000, total_bytes=300_000)
    sent = [200, *[60] * 39]
    account = Account()
    reassembler = Reassembler(account, limits)
    found: list[Step] = []
    most_bytes = 0
    for port, count in enumerate(sent):
        wire = Wire(flow=CLIENT._replace(source_port=port)).handshake()
        wire.send(wire.flow, b"lost")
        wire.segments.pop()
        for _ in range(count):
            wire.send(wire.flow, bytes(1_000))
        for segment in wire.segments:
            found += reassembler.feed(segment)
            most_bytes = max(most_bytes, reassembler.held_bytes)
    found += reassembler.close()
    assert 200_000 < most_bytes <= 300_000
    assert reassembler.held_bytes == 0
    assert sum(len(step.data) for step in found) == sum(sent) * 1_000
    assert (account.gaps, account.gap_bytes) == (40, 160)


def test_a_side_with_a_hole_holds_back_of_the_other_only_so_much() -> None:
    """An answer that acknowledges a lost request streams on without time going by: the bound on bytes frees it."""
    wire = Wire().handshake()
    wire.send(CLIENT, b"lost")
    wire.segments.pop()
    for _ in range(100):
        wire.send(SERVER, bytes(1_000))
    now = [one._replace(at_ns=MS) for one in wire.segments]
    reassembler = Reassembler(Account(), Limits(side_bytes=20_000))
    found = [step for segment in now for step in reassembler.feed(segment)]
    assert [step.kind for step in found[:3]] == [Kind.OPENED, Kind.GAP, Kind.DATA]
    assert len(found) == 102


def test_connections_have_a_bound() -> None:
    """Beyond it the longest silent are over, and counted; every connection still ends once."""
    wires = [Wire(flow=CLIENT._replace(source_port=port)).handshake() for port in range(1_000)]
    segments = [one for wire in wires for one in wire.segments]
    segments = [one._replace(at_ns=index * MS) for index, one in enumerate(segments)]
    found, account = told(segments, Limits(connections=64))
    ended = [step.connection for step in found if step.kind is Kind.OVER]
    assert sorted(ended) == list(range(1_000))
    assert 1_000 - 64 <= account.crowded < 1_000


def test_copies_are_recognised_within_the_memory_only() -> None:
    """With no memory a copy with other bytes is a copy: the stream is the same, only the count is not."""
    wire = Wire().handshake()
    sent = wire.send(CLIENT, b"bytes")
    segments = [*wire.segments, sent._replace(payload=b"BYTES")]
    for memory_bytes, conflicting in ((1_000, 1), (0, 0)):
        found, account = told(segments, replace(Limits(), memory_bytes=memory_bytes))
        assert runs(found, CLIENT) == [b"bytes"]
        assert (account.conflicting, account.conflicting + account.duplicates) == (conflicting, 1)


def test_the_same_packets_give_the_same_steps_whatever_the_clock_says() -> None:
    """Moments that run backwards, as when files are read in turn, lose no byte and end no connection."""
    wire = Wire().handshake()
    for index in range(50):
        wire.send((CLIENT, SERVER)[index % 2], b"%02d " % index)
    back = [one._replace(at_ns=-one.at_ns * 1_000 + 10**18) for one in wire.segments]
    found, account = told(back)
    assert [step.data for step in found if step.data] == [b"%02d " % index for index in range(50)]
    assert (account.gaps, account.idle, account.connections) == (0, 0, 1)


WILD = st.builds(
    Segment,
    at_ns=st.integers(0, 100 * SECOND),
    flow=st.sampled_from([CLIENT, SERVER, CLIENT._replace(source_port=1), Flow(b"a", 1, b"a", 1)]),
    seq=st.integers(0, 40) | st.integers(2**32 - 40, 2**32 - 1) | st.integers(0, 2**32 - 1),
    ack=st.integers(0, 40) | st.integers(2**32 - 40, 2**32 - 1) | st.integers(0, 2**32 - 1),
    flags=st.sampled_from([ACK, ACK, ACK, SYN, SYN | ACK, FIN | ACK, RST, RST | ACK, 0, 63]),
    payload=st.binary(max_size=12),
    cut=st.sampled_from([0, 0, 0, 0, 5]),
)


@given(st.lists(WILD, max_size=60))
def test_garbage_gives_well_formed_steps(segments: list[Segment]) -> None:
    """Any segments at all: each connection begins as it must, ends once, and nothing stays held."""
    account = Account()
    reassembler = Reassembler(account, Limits(side_bytes=500, total_bytes=900, connections=2))
    found = [step for segment in segments for step in reassembler.feed(segment)]
    assert reassembler.held_bytes <= 900
    found += reassembler.close()
    assert reassembler.held_bytes == 0
    assert {step.connection for step in found} == set(range(account.connections))
    for number in range(account.connections):
        kinds = [step.kind for step in found if step.connection == number]
        assert kinds[0] in (Kind.OPENED, Kind.DATA, Kind.GAP)
        assert (kinds.count(Kind.OVER), kinds[-1]) == (1, Kind.OVER)
        assert kinds.count(Kind.OPENED) <= 1
    assert sum(len(step.data) for step in found) <= sum(len(segment.payload) for segment in segments)
