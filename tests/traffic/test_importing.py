"""A capture becomes a recording with all that was in it, no secret, and an account; or a sentence why not."""

import gzip
import os
import stat
import weakref
from collections.abc import Iterable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness import cli
from harness.model import UsageError
from harness.traffic import importing, recording
from harness.traffic.capture import filters, tcpdump
from harness.traffic.capture.exchanges import Reader
from harness.traffic.importing import Choices, Source, import_captures, import_from
from harness.traffic.recording import Answered, Recorded
from tests.traffic.capture import links, material
from tests.traffic.capture.links import ACK, SYN, Tcp
from tests.traffic.capture.pipeline import plain

SECOND = 1_000_000_000
HELLO = b'{"model":"m","user":"jane@mail.example.org","messages":[]}'
POST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer sk-topsecret99\r\n"
    b"Content-Length: %d\r\n\r\n"
)
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


@pytest.fixture(scope="module")
def base() -> material.Material:
    return material.base()


def talk(*said: bytes, connection: int = 0) -> list[Tcp]:
    """A connection is opened; client and server take turns, 10 ms apart."""
    opened_ns = material.START_NS + connection * SECOND
    packets = [Tcp(opened_ns, connection, True, (7, 40000 + connection), 999, 0, SYN)]
    ends = [1000, 5000]
    for turn, data in enumerate(said):
        client = turn % 2 == 0
        at_ns = opened_ns + (turn + 1) * SECOND // 100
        mine, other = (0, 1) if client else (1, 0)
        packets.append(Tcp(at_ns, connection, client, (7, 40000 + connection), ends[mine], ends[other], ACK, data))
        ends[mine] += len(data)
    return packets


def post(body: bytes = HELLO) -> bytes:
    return POST % len(body) + body


def written(folder: Path, packets: Iterable[Tcp], name: str = "one.pcap") -> Path:
    (folder / name).write_bytes(plain(packets))
    return folder / name


def only_file(folder: Path, *names: str) -> bool:
    return sorted(path.name for path in folder.iterdir()) == sorted(names)


def test_all_requests_of_a_capture(tmp_path: Path, base: material.Material) -> None:
    """In the order of their moments, byte for byte when secrets are kept, with what was said of them."""
    out = tmp_path / "out.jsonl"
    header = import_captures([written(tmp_path, base.packets)], out, Choices(keep_secrets=True))
    assert (header.requests, header.connections, header.lost_share, header.sources) == (200, 20, 0.0, ("one.pcap",))
    told, recorded = recording.read(out)
    ones = list(recorded)
    truths = sorted(base.truths, key=lambda truth: truth.request.first_ns)
    assert told.account["kept"] == told.account["requests_seen"] == len(ones) == 200
    assert sorted(one.raw for one in ones) == sorted(truth.request.raw for truth in truths)
    first_ns = truths[0].request.first_ns
    assert [one.at_s for one in ones] == pytest.approx([(truth.request.first_ns - first_ns) / 1e9 for truth in truths])
    by_raw = {one.raw: one for one in ones}
    for truth in truths:
        one = by_raw[truth.request.raw]
        assert (one.method, one.turn, one.answer.status) == (truth.method, truth.turn, truth.status), truth.kind
    assert told.lasts_s == pytest.approx(ones[-1].at_s)
    assert {str(one.answer.shape) for one in ones if one.answer.shape} == set(told.shapes)


def test_the_secrets_of_a_capture_are_nowhere(tmp_path: Path) -> None:
    """Not in the recording, and nothing else is left beside it; the same import gives the same bytes."""
    secrets = (b"topsecret99", b"jane", b"10.0.0.7", b"mail.example")
    capture = written(tmp_path, talk(post(), OK.replace(b"{}", b"[]"), post(), OK))
    for out in ("a.jsonl", "b.jsonl"):
        header = import_captures([capture], tmp_path / out)
    data = (tmp_path / "a.jsonl").read_bytes()
    assert not [secret for secret in secrets if secret in data]
    assert data == (tmp_path / "b.jsonl").read_bytes()
    assert only_file(tmp_path, "one.pcap", "a.jsonl", "b.jsonl")
    assert (header.scrubbed["headers"], header.scrubbed["names"]) == (2, 2)
    (one, two) = recording.read(tmp_path / "a.jsonl")[1]
    assert one.session == two.session != ""
    assert one.client == two.client != ""


def test_moments_are_those_of_the_first_request(tmp_path: Path) -> None:
    """Also when another one ends first, and when the files come in another order."""
    late = talk(post(), OK, connection=0)
    late[2] = late[2]._replace(at_ns=late[1].at_ns + 5 * SECOND)
    files = [written(tmp_path, talk(post(), OK, connection=1), "b.pcap"), written(tmp_path, late, "a.pcap")]
    import_captures(files, tmp_path / "out.jsonl")
    ones = list(recording.read(tmp_path / "out.jsonl")[1])
    assert [one.at_s for one in ones] == [0.0, 1.0]
    assert [one.answer.ended_s for one in ones] == pytest.approx([5.0, 0.01])


def test_what_was_lost_is_held_against_what_would_have_been_kept(tmp_path: Path) -> None:
    """Seen is kept, lost and filtered together; a filter takes what it can know of lost requests out of both."""
    packets = [
        *talk(post(), OK, connection=0),
        *talk(post()[:-5], OK, post(), OK, connection=1)[:2],
        *talk(b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n", OK, connection=2),
    ]
    capture = written(tmp_path, packets)
    header = import_captures([capture], tmp_path / "out.jsonl")
    assert (header.account["requests_seen"], header.requests) == (3, 2)
    assert (header.lost_share, sum(header.account["lost"].values())) == (pytest.approx(1 / 3), 1)
    chosen = Choices(filters=filters.read(paths=["/health"]))
    header = import_captures([capture], tmp_path / "out.jsonl", chosen)
    assert (header.requests, header.lost_share, header.account["filtered"]) == (1, 0.0, 2)


def test_a_body_that_cannot_be_scrubbed_is_lost_and_not_written(tmp_path: Path) -> None:
    """It is compressed, and holds an address."""
    body = gzip.compress(HELLO)
    coded = post(body).replace(b"Host: h", b"Host: h\r\nContent-Encoding: gzip")
    header = import_captures([written(tmp_path, talk(coded, OK, post(), OK))], tmp_path / "out.jsonl")
    assert (header.requests, header.account["lost"]) == (1, {"could not be scrubbed": 1})


def test_an_upgraded_connection_is_no_request_to_replay(tmp_path: Path) -> None:
    """What follows is another protocol."""
    switch = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n"
    asked = b"GET /ws HTTP/1.1\r\nHost: h\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"
    packets = [*talk(post(), OK), *talk(asked, switch, b"\x81\x05", connection=1)]
    header = import_captures([written(tmp_path, packets)], tmp_path / "out.jsonl")
    assert (header.requests, header.account["lost"]) == (1, {"goes on with another protocol": 1})


TLS = b"\x16\x03\x01\x00\xc8\x01\x00\x00\xc4\x03\x03" + bytes(200)
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ([TLS, b"\x16\x03\x03\x00\x02\x02\x00"], r"of TLS.*editcap"),
        ([HTTP2, bytes(9)], "HTTP/2"),
        ([b"SSH-2.0-OpenSSH_9.6\r\n", b"SSH-2.0-OpenSSH_9.6\r\n"], "no HTTP request in 3 packets.*interface"),
        ([post()[:-5]], "not one answer.*one direction"),
        ([post(), b"", post(), b""], "2 requests and not one answer"),
    ],
)
def test_a_capture_with_nothing_to_replay_says_why(tmp_path: Path, said: list[bytes], told: str) -> None:
    """One sentence, with what to do; nothing is written, and what was there stays."""
    out = tmp_path / "out.jsonl"
    out.write_bytes(b"before")
    with pytest.raises(UsageError, match=told):
        import_captures([written(tmp_path, talk(*said))], out)
    assert out.read_bytes() == b"before"
    assert only_file(tmp_path, "one.pcap", "out.jsonl")


def test_answers_alone_are_one_direction(tmp_path: Path) -> None:
    """As a filter on the source port leaves them."""
    packets = [packet for packet in talk(post(), OK, post(), OK) if not packet.from_client]
    with pytest.raises(UsageError, match=r"2 answers and no request.*one direction"):
        import_captures([written(tmp_path, packets)], tmp_path / "out.jsonl")


def test_a_wrong_port_is_told_with_the_right_one(tmp_path: Path) -> None:
    """The capture is looked at again."""
    capture = written(tmp_path, talk(post(), OK))
    with pytest.raises(UsageError, match="no HTTP on port 9, but on 8000"):
        import_captures([capture], tmp_path / "out.jsonl", Choices(frozenset([9])))
    assert import_captures([capture], tmp_path / "out.jsonl", Choices(frozenset([9, 8000]))).requests == 1


def test_a_short_snap_length_is_told(tmp_path: Path) -> None:
    """When it left no request whole."""
    cut = links.frames(talk(post(), OK), links.ethernet, snap=120)
    (tmp_path / "one.pcap").write_bytes(links.pcap(cut, links.ETHERNET))
    with pytest.raises(UsageError, match=r"snap length cut 1 of 3 packets.*tcpdump -s 0"):
        import_captures([tmp_path / "one.pcap"], tmp_path / "out.jsonl")


def test_files_that_cannot_be(tmp_path: Path) -> None:
    """No capture, an empty one, one without packets, the recording in place of the capture, a folder."""
    capture, out = written(tmp_path, talk(post(), OK)), tmp_path / "out.jsonl"
    (tmp_path / "text").write_text("hello, this is no capture at all")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "silent").write_bytes(plain([]))
    for path in ("text", "empty", "silent", "missing"):
        with pytest.raises(UsageError, match=path):
            import_captures([tmp_path / path], out)
    with pytest.raises(UsageError, match="another name"):
        import_from(Source.CAPTURE, [capture], capture, Choices())
    with pytest.raises(UsageError, match="is a folder"):
        import_from(Source.CAPTURE, [capture], tmp_path, Choices())
    with pytest.raises(UsageError, match="nothing can be written to"):
        import_captures([capture], tmp_path / "no" / "out.jsonl")
    assert not out.exists()


def test_filters_that_leave_nothing(tmp_path: Path) -> None:
    """Say how much there was."""
    with pytest.raises(UsageError, match="the filters left nothing of its 1 requests"):
        chosen = Choices(filters=filters.read(methods=["DELETE"]))
        import_captures([written(tmp_path, talk(post(), OK))], tmp_path / "out.jsonl", chosen)


def test_a_recording_can_be_filtered_again(tmp_path: Path, base: material.Material) -> None:
    """Its account goes on, what it lost stays lost."""
    capture, all_, some = written(tmp_path, base.packets), tmp_path / "all.jsonl", tmp_path / "some.jsonl"
    first = import_captures([capture], all_)
    refused = Choices(filters=filters.read(statuses=["4xx"]))
    header = import_from(Source.RECORDING, [all_], some, refused)
    ones = list(recording.read(some)[1])
    assert ones
    assert all(400 <= one.answer.status < 500 for one in ones)
    assert (ones[0].at_s, header.account["filtered"] + header.requests) == (0.0, first.requests)
    assert (header.sources, header.shapes) == (first.sources, first.shapes)


class Held(Recorded):
    """One that can be asked for later without being held."""

    __slots__ = ("__weakref__",)


def test_memory_does_not_hold_the_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is on the shelf, and only there, once it has been read."""
    read: list[weakref.ref[Held]] = []
    alive: list[int] = []

    def recorded(_self: Reader, _exchange: object) -> Recorded:
        alive.append(sum(each() is not None for each in read))
        one = Held(0.0, 0, len(read), "GET", "/", b"GET / HTTP/1.1\r\n\r\n", Answered(200, whole=True))
        read.append(weakref.ref(one))
        return one

    monkeypatch.setattr(Reader, "recorded", recorded)
    said = [part for _ in range(30) for part in (post(), OK)]
    header = import_captures([written(tmp_path, talk(*said))], tmp_path / "out.jsonl")
    assert header.requests == len(read) == 30
    assert max(alive) <= 2


def test_the_command_tells_the_account(tmp_path: Path, base: material.Material) -> None:
    """As a short table, with the options that a user gives."""
    capture, out = written(tmp_path, base.packets), tmp_path / "out.jsonl"
    arguments = ["import", str(capture), "-o", str(out), "--port", "8000", "--status", "2xx", "--method", "post"]
    ran = CliRunner().invoke(cli.app, arguments)
    assert ran.exit_code == 0, ran.output
    header = recording.read_header(out)
    assert header.requests < 200
    for told in (
        "requests seen",
        "left out by the filters",
        "scrubbed",
        f"{header.requests} on 20 connections",
        "replay: ",
    ):
        assert told in ran.output


def test_the_account_tells_of_every_loss() -> None:
    """Nothing that counts against a recording is left out of what is printed."""
    account = {"requests_seen": 9, "lost": {"gap": 1}, "answers_lost": {"gap": 2, "closed": 3}, "damage": ["cut off"]}
    header = recording.RecordingHeader(("a",), 8, 2, 1.0, 1 / 9, account, {"headers": 4})
    told = dict(importing.told(header))
    assert told["requests lost"] == "11.11%: 1 gap"
    assert (told["answers not captured whole"], told["damage"], told["scrubbed"]) == ("2 gap", "cut off", "4 headers")


@pytest.mark.parametrize(
    ("url", "interface", "what"),
    [
        ("http://127.0.0.1:8080", "lo", "tcp port 8080"),
        ("http://localhost", "lo", "tcp port 80"),
        ("http://[::1]:81", "lo", "tcp port 81"),
        ("https://models.example.org", "any", "host models.example.org and tcp port 443"),
        ("http://10.0.0.5:8000", "any", "host 10.0.0.5 and tcp port 8000"),
    ],
)
def test_the_command_for_a_target(url: str, interface: str, what: str) -> None:
    """Whole packets, a large buffer, and the target's traffic only."""
    command = " ".join(tcpdump.command(url, Path("a b.pcap")))
    assert f"-i {interface} " in command
    assert command.endswith(what)
    assert {"-s", "0", "-U", "-B"} <= set(command.split())
    told = "\n".join(tcpdump.told(url, Path("a b.pcap"), 60))
    assert told.startswith("timeout --signal=INT 60 tcpdump ")
    assert "harness import 'a b.pcap'" in told
    assert ("TLS" in told) == url.startswith("https")


def fake(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tcpdump of ours, first on the path, run as if by root."""
    (folder / "tcpdump").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "tcpdump").chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(os, "geteuid", lambda: 0)


LISTENS = "echo 'tcpdump: listening on lo, link-type EN10MB' >&2"
COUNTS = (
    "echo '12 packets captured' >&2; echo '14 packets received by filter' >&2; echo '2 packets dropped by kernel' >&2"
)


@pytest.mark.e2e
def test_tcpdump_is_run_and_asked_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says what it took and what the kernel dropped."""
    fake(
        tmp_path,
        f"{LISTENS}\ntrap '{COUNTS.replace(chr(39), chr(34))}; exit 0' TERM\nwhile :; do sleep 0.02; done",
        monkeypatch,
    )
    assert tcpdump.run("http://127.0.0.1:1", tmp_path / "a.pcap", 0.2) == tcpdump.Captured(12, 2)


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("echo 'tcpdump: lo: no permission' >&2; exit 1", "did not start: tcpdump: lo: no permission"),
        (f"{LISTENS}; echo 'disk full' >&2; exit 1", "ended early: disk full"),
        ("exit 1", "it said nothing"),
    ],
)
def test_a_tcpdump_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, told: str) -> None:
    """In its own words."""
    fake(tmp_path, script, monkeypatch)
    with pytest.raises(UsageError, match=told):
        tcpdump.run("http://127.0.0.1:1", tmp_path / "a.pcap", 60)


def test_capturing_needs_tcpdump_and_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is asked for before anything is started."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="not installed"):
        tcpdump.run("http://127.0.0.1:1", tmp_path / "a.pcap", 1)
    fake(tmp_path, "exit 9", monkeypatch)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UsageError, match="only root"):
        tcpdump.run("http://127.0.0.1:1", tmp_path / "a.pcap", 1)
