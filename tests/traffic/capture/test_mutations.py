"""From 200 requests with the truth beside them: whatever a network or a capture does, what is whole is exact.

What was lost is told as lost, and nothing is ever made up.
"""

import gzip
import json
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.traffic.capture import links, mutations
from tests.traffic.capture.links import ETHERNET, FRAMINGS, frames, pcap, pcapng, squeezed
from tests.traffic.capture.material import ENDINGS
from tests.traffic.capture.pipeline import Found, adds_up, compared, found, imported, material, plain, shifted

SNAP = 400
HEADERS = 66  # Ethernet, IPv4, and TCP with its time stamps
DEAR = ("extended6", "options", "gre", "gre ethernet")  # dissected at half a millisecond a packet: half of them do
TOGETHER = (
    mutations.acknowledged_first, mutations.jittered, mutations.duplicated, mutations.contradicted,
    mutations.overlapping, mutations.probed,
)  # fmt: skip


LONG = pytest.mark.e2e  # not for its processes, for its time


def one_now(values: Iterable[Any]) -> list[Any]:
    """Of many cases the first is tried in every check, the others with what takes long."""
    first, *others = values
    return [first, *(pytest.param(other, marks=LONG) for other in others)]


def all_exact(result: Found, requests: int = 200) -> None:
    assert result.wrong == []
    assert (len(result.requests), len(result.answers)) == (requests, requests)
    assert (result.account.complete, result.account.incomplete) == (requests, {})
    assert all(exchange.interim == truth.interim for truth, exchange in result.paired)
    assert adds_up(result.account)


def test_the_base_is_found_with_every_moment(tmp_path: Path) -> None:
    """All requests and answers, in their turns, with the moments of first and last bytes and of every event."""
    result = found(tmp_path, plain(material().packets), material().truths)
    all_exact(result)
    for truth, exchange in result.paired:
        answer = exchange.answer
        assert answer is not None
        assert (exchange.turn, exchange.pipelined) == (truth.turn, truth.kind == "pipelined" and exchange.pipelined)
        for said, told in ((truth.request, exchange.request), (truth.answer, answer)):
            assert (told.raw, told.first_ns, told.last_ns) == (said.raw, said.first_ns, said.last_ns), truth.kind
        if truth.kind in ("streamed", "until_close"):
            assert answer.pieces == list(truth.answer.pieces)


def test_what_is_odd_about_a_request_is_told(tmp_path: Path) -> None:
    """Flaws of framing, pipelining, and clients that did not wait: only where they are."""
    result = found(tmp_path, plain(material().packets), material().truths)
    flawed = {truth.kind for truth, exchange in result.paired if exchange.request.flaw}
    impatient = {truth.kind for truth, exchange in result.paired if exchange.gave_up_ns is not None}
    pipelined = [exchange.pipelined for truth, exchange in result.paired if truth.kind == "pipelined"]
    closed = {truth.kind for truth, exchange in result.paired if exchange.half_closed_ns is not None}
    assert flawed >= {"two_lengths", "bad_chunk", "short_body"}
    assert flawed <= {"two_lengths", "bad_chunk", "short_body", "too_large", "too_large_goes_on"}
    assert impatient == {"reset", "gave_up"}
    assert closed - {"gave_up"} == {"short_body"}
    assert pipelined.count(True) == 4  # the second and the third of each triple
    assert sum(exchange.pipelined for exchange in result.exchanges) == 4


@pytest.mark.parametrize("mutation", one_now(mutations.LOSSLESS), ids=lambda mutation: mutation.__name__)
def test_what_loses_nothing_changes_nothing(mutation: mutations.Mutation, tmp_path: Path) -> None:
    """Every request and every answer is exact, and none is invented."""
    all_exact(found(tmp_path, plain(mutation(material().packets)), material().truths))


@pytest.mark.parametrize("mutation", one_now(TOGETHER), ids=lambda mutation: mutation.__name__)
def test_misfortunes_come_together(mutation: mutations.Mutation, tmp_path: Path) -> None:
    """Each kind of disorder on top of offloaded frames whose numbers wrap, without handshakes."""
    packets = mutations.wrapped(mutations.offloaded(mutations.without_handshakes(material().packets)))
    all_exact(found(tmp_path, plain(mutation(packets)), material().truths))


@pytest.mark.parametrize("name", one_now(FRAMINGS))
def test_every_link_and_tunnel(name: str, tmp_path: Path) -> None:
    """The same segments under each link layer, tunnel and kind of IP header."""
    link, shape = FRAMINGS[name]
    packets, truths = material().packets, material().truths
    if name in DEAR:
        packets = [p for p in packets if p.connection < 10 and (p.payload or p.flags != links.ACK)]
        truths = [truth for truth in truths if truth.connection < 10]
    result = found(tmp_path, pcap(frames(packets, shape), link), truths)
    all_exact(result, len(truths))
    assert bool(result.account.slow_path) == (name in DEAR)


@LONG
@pytest.mark.parametrize("name", ["little", "big", "gzip", "pcapng", "pcapng, big", "pcapng, gzip"])
def test_every_format(name: str, tmp_path: Path) -> None:
    """The same frames in each format; moments are kept as finely as it can hold them."""
    fine = name != "little"
    captured = shifted(frames(material().packets, links.ethernet), 123 if fine else 0)
    write = pcapng if "pcapng" in name else pcap
    data = write(captured, ETHERNET, ">" if "big" in name else "<", nanoseconds=fine)
    result = found(tmp_path, squeezed(data) if "gzip" in name else data, material().truths)
    all_exact(result)
    assert all(e.request.first_ns == t.request.first_ns + (123 if fine else 0) for t, e in result.paired)


@LONG
def test_several_files_are_one_capture(tmp_path: Path) -> None:
    """A ring of files, named in any order and of different formats, with messages cut at their borders."""
    captured = list(frames(material().packets, links.ethernet))
    third = len(captured) // 3
    parts = {
        "c": pcap(captured[:third], ETHERNET),
        "a": pcapng(captured[third : 2 * third], ETHERNET),
        "b": squeezed(pcap(captured[2 * third :], ETHERNET, ">", nanoseconds=True)),
    }
    for name, data in parts.items():
        (tmp_path / name).write_bytes(data)
    all_exact(compared(*imported([tmp_path / name for name in "abc"]), material().truths))


@LONG
@pytest.mark.parametrize("ended", [True, False], ids=["closed", "never closed"])
def test_new_connections_on_used_ports(ended: bool, tmp_path: Path) -> None:
    """The same addresses again, seconds later: another connection, whether or not the first was seen to end."""
    packets, truths = mutations.twice()
    if not ended:
        packets = mutations.without_ends(packets)
        truths = [truth for truth in truths if truth.kind in ("streamed", "plain")]
    result = found(tmp_path, plain(packets), truths)
    if ended:
        all_exact(result, 400)
    assert result.requests.keys() == {t.name for t in truths}
    assert result.account.connections == 40


@pytest.mark.parametrize("mutation", one_now(mutations.LOSSY), ids=lambda mutation: mutation.__name__)
def test_what_is_lost_is_told_and_the_rest_is_exact(mutation: mutations.Mutation, tmp_path: Path) -> None:
    """Of the requests that are whole in the capture at most one is missed; nothing wrong is taken for right."""
    packets = mutation(material().packets)
    result = found(tmp_path, plain(packets), material().truths)
    whole = mutations.recoverable(material().truths, packets)
    assert result.wrong == []
    assert adds_up(result.account)
    missed = {t.name for t in whole} - result.requests.keys()
    assert len(missed) <= 1, missed
    assert len(result.requests) <= len(whole)


@pytest.mark.parametrize("seed", one_now(range(10)))
def test_nothing_wrong_however_much_is_lost(seed: int, tmp_path: Path) -> None:
    """From one packet in a thousand to one in three: never a request or an answer that was not so."""
    packets = mutations.lossy(material().packets, seed, share=0.001 * 1.9**seed)
    result = found(tmp_path, plain(packets), material().truths)
    assert result.wrong == []
    assert adds_up(result.account)


@LONG
def test_a_short_snap_length_is_told(tmp_path: Path) -> None:
    """What was cut off is lost and said to be; requests that fit are exact."""
    data = pcap(frames(material().packets, links.ethernet, snap=SNAP), ETHERNET)
    result = found(tmp_path, data, material().truths)
    fitting = mutations.recoverable(material().truths, material().packets, room=SNAP - HEADERS)
    assert result.wrong == []
    assert adds_up(result.account)
    assert result.account.cut_packets == sum(len(p.payload) > SNAP - HEADERS for p in material().packets)
    assert {t.name for t in fitting} == result.requests.keys()
    assert sum(result.account.incomplete.values()) >= 150


@LONG
def test_one_direction_alone(tmp_path: Path) -> None:
    """Without the server's side requests are still exact, and none has an answer."""
    result = found(tmp_path, plain([p for p in material().packets if p.from_client]), material().truths)
    assert (result.wrong, result.answers) == ([], {})
    assert len(result.requests) >= 190


@LONG
def test_others_are_counted_as_what_they_are(tmp_path: Path) -> None:
    """TLS, HTTP/2, another protocol, and a connection that says nothing."""
    account = found(tmp_path, plain(mutations.in_company(material().packets)), material().truths).account
    assert (account.http, account.tls, account.http2, account.not_http, account.empty) == (20, 1, 1, 1, 1)


def test_conflicts_are_counted(tmp_path: Path) -> None:
    """Other bytes for what was there already; a copy that comes when the first is forgotten is a duplicate."""
    account = found(tmp_path, plain(mutations.contradicted(material().packets)), material().truths).account
    assert account.conflicting + account.duplicates == 42
    assert account.conflicting >= 38


@LONG
def test_the_shipped_capture_is_this_material() -> None:
    """`scripts/make-captures` makes it, and what it makes has not changed since."""
    shipped = Path(__file__).parents[3] / "replays" / "captures" / "base.pcap.gz"
    assert gzip.decompress(shipped.read_bytes()) == plain(material().packets)


@LONG
def test_tshark_sees_the_same(tmp_path: Path) -> None:
    """Wireshark's engine as a witness: on disordered packets it finds the same bodies under the same names."""
    if not shutil.which("tshark"):  # a second opinion: what is right is proven by the ground truth of the other tests
        pytest.skip("tshark is not installed: the Debian package tshark has it")
    packets = mutations.reordered(mutations.wrapped(material().packets))
    (tmp_path / "capture").write_bytes(plain(packets))
    ours = {_name(exchange.request.raw): exchange.request.body for exchange in imported([tmp_path / "capture"])[0]}
    theirs = _by_tshark(tmp_path / "capture")
    common = [_name(t.request.raw) for t in material().truths if t.kind not in ("pipelined", *ENDINGS)]
    assert len(common) == 186
    assert {name: ours[name] for name in common} == {name: theirs.get(name) for name in common}


def _by_tshark(capture: Path) -> dict[bytes, bytes]:
    """Request bodies by the requests' names. Of several requests in one packet its JSON keeps one."""
    command = ["tshark", "-n", "-r", str(capture), "-d", f"tcp.port=={links.SERVER_PORT},http", "-Y", "http.request"]
    command += ["-o", "tcp.reassemble_out_of_order:TRUE", "-T", "jsonraw", "-j", "http"]
    done = subprocess.run(command, capture_output=True, check=True, timeout=120)
    layers = [row["_source"]["layers"] for row in json.loads(done.stdout)]
    return {
        _name(bytes.fromhex(each["http_raw"][0])): bytes.fromhex(each["http"].get("http.file_data_raw", [""])[0])
        for each in layers
    }


def _name(raw: bytes) -> bytes:
    found = re.search(rb"X-Request-Id: (\S+)", raw)
    assert found
    return found[1]
