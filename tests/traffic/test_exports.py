"""Recordings are written in the formats of other tools, and what these cannot hold is counted."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from harness import cli
from harness.model import UsageError
from harness.traffic import recording
from harness.traffic.exports import Format, export
from harness.traffic.importing import Choices, Source, import_from
from harness.traffic.recording import Answered, Recorded, RecordingHeader

SERVED = Answered(status=200, first_byte_s=0.1, ended_s=0.6, tokens_in=700, tokens_out=3, whole=True)


def chat(at_s: float, *said: str, tokens: int = 700, **more: Any) -> Recorded:
    asked = {"model": "m", "messages": [{"role": "user", "content": text} for text in said]}
    return posted(at_s, json.dumps(asked, indent=1).encode(), prompt_tokens=tokens, **more)


def posted(at_s: float, body: bytes, path: str = "/v1/chat/completions", **more: Any) -> Recorded:
    raw = b"POST %b?a=b HTTP/1.1\r\nHost: h:1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
    usual: dict[str, Any] = {"answer": SERVED, "max_tokens": 9}
    return Recorded(at_s, 4, 0, "POST", path, raw % (path.encode(), len(body), body), **usual | more)


def exported(tmp_path: Path, to: Format, *ones: Recorded, **header: Any) -> tuple[bytes, dict[str, int]]:
    told = RecordingHeader(("test",), len(ones), 1, 1.0, **header)
    recording.write(tmp_path / "r.jsonl", told, ones)
    done = export(tmp_path / "r.jsonl", to, tmp_path / "out")
    assert done.written + sum(done.left_out.values()) == len(ones)
    return (tmp_path / "out").read_bytes(), dict(done.left_out)


BROKEN = posted(5.0, b'{"messages": [', flaw="bad_json", prompt_tokens=0)
LOOK = Recorded(6.0, 4, 1, "GET", "/v1/models", b"GET /v1/models HTTP/1.1\r\nHost: h\r\n\r\n", SERVED)


def test_mooncake_has_lengths_and_shared_beginnings(tmp_path: Path) -> None:
    """A block has the same number wherever everything up to its end is the same, and only there."""
    long = "word " * 700
    ones = [
        chat(0.0, long, "first", tokens=1500),
        chat(1.2345, long, "second", tokens=1500, answer=Answered()),
        chat(2.0, long, "first", tokens=1500),
        chat(3.0, "other " * 600, tokens=1500),
    ]
    data, left_out = exported(tmp_path, Format.MOONCAKE, *ones, BROKEN, LOOK)
    rows = [json.loads(line) for line in data.splitlines()]
    assert [row["timestamp"] for row in rows] == [0, 1234, 2000, 3000]
    assert [(row["input_length"], row["output_length"]) for row in rows] == [(1500, 3), (1500, 9), (1500, 3), (1500, 3)]
    first, second, again, other = (row["hash_ids"] for row in rows)
    assert {len(ids) for ids in (first, second, other)} == {3}
    assert first == again
    assert first[:2] == second[:2]
    assert first[2] != second[2]
    assert not set(first) & set(other)
    assert left_out == {"without a count of their tokens": 1, "to a path that takes no prompt": 1}


def test_a_mooncake_trace_survives(tmp_path: Path) -> None:
    """Read, written and read again: which prompts begin alike is the same."""
    trace = tmp_path / "trace.jsonl"
    lengths = [(0, 1100, 52, [46, 47, 48]), (3052, 600, 1, [46, 49]), (4000, 90, 2, [])]
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    trace.write_text("\n".join(json.dumps(dict(zip(names, row, strict=True))) for row in lengths))
    header = import_from(Source.MOONCAKE, [trace], tmp_path / "r.jsonl", Choices())
    assert (header.requests, header.timing_only, header.account["requests_seen"]) == (3, True, 3)
    export(tmp_path / "r.jsonl", Format.MOONCAKE, tmp_path / "again.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "again.jsonl").read_text().splitlines()]
    assert [tuple(row.values()) for row in rows] == [
        (0, 1100, 52, [0, 1, 2]),
        (3052, 600, 1, [0, 3]),
        (4000, 90, 2, [4]),
    ]


def test_aiperf_has_bodies(tmp_path: Path) -> None:
    """One a line, conversations only; chunked ones are taken out of their framing."""
    body = b'{"messages":[],\n "n":1}'
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunked = Recorded(
        0.0, 1, 0, "POST", "/v1/chat/completions", head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body), SERVED
    )
    embed = posted(0.0, b'{"input":"x"}', "/v1/embeddings")
    deep = posted(0.0, b'{"messages":' + b"[" * 300 + b"]" * 300 + b"}")
    data, left_out = exported(tmp_path, Format.AIPERF, chat(0.0, "hi"), chunked, BROKEN, embed, LOOK, deep)
    first, second = map(json.loads, data.splitlines())
    assert (first["messages"][0]["content"], second) == ("hi", {"messages": [], "n": 1})
    assert left_out == {"malformed": 1, "without messages": 2, "nested too deep": 1}


def test_an_archive_can_be_imported_again(tmp_path: Path) -> None:
    """Requests, statuses and moments are the same; JSON that is none is text like any other."""
    short = Recorded(
        7.0, 4, 2, "POST", "/v1/x", b"POST /v1/x HTTP/1.1\r\nHost: h\r\nContent-Length: 9\r\n\r\n{}", Answered()
    )
    binary = posted(8.0, b"\xff\xfe")
    ones = (chat(0.0, "hé"), chat(1.5, "later", stream=True), BROKEN, LOOK, short, binary)
    data, left_out = exported(tmp_path, Format.HAR, *ones)
    assert left_out == {"malformed": 1, "with a body that is no text": 1}
    log = json.loads(data)["log"]
    assert (log["version"], len(log["entries"])) == ("1.2", 4)
    assert log["entries"][0]["request"]["url"] == "http://h:1/v1/chat/completions?a=b"
    (tmp_path / "a.har").write_bytes(data)
    header = import_from(Source.HAR, [tmp_path / "a.har"], tmp_path / "again.jsonl", Choices(keep_secrets=True))
    again = list(recording.read(tmp_path / "again.jsonl")[1])
    assert (header.requests, header.lost_share) == (4, 0.0)
    assert [(one.at_s, one.method, one.path, one.flaw) for one in again] == [
        (pytest.approx(one.at_s), one.method, one.path, one.flaw) for one in ones[:4]
    ]
    assert [one.raw.partition(b"\r\n\r\n")[2] for one in again] == [
        one.raw.partition(b"\r\n\r\n")[2] for one in ones[:4]
    ]
    assert {(one.answer.status, one.connection) for one in again} == {(200, 0)}
    assert again[0].answer.ended_s == pytest.approx(0.6)


def test_what_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    """Nothing that the format can hold, no recording, the recording itself, nowhere to write; nothing is left."""
    with pytest.raises(UsageError, match="can be said as aiperf: 1 malformed, 1 without messages"):
        exported(tmp_path, Format.AIPERF, BROKEN, LOOK)
    with pytest.raises(UsageError, match="is no recording"):
        export(Path(__file__), Format.HAR, tmp_path / "out")
    with pytest.raises(UsageError, match="another name"):
        export(tmp_path / "r.jsonl", Format.HAR, tmp_path / "r.jsonl")
    with pytest.raises(UsageError, match="cannot be written"):
        export(tmp_path / "r.jsonl", Format.HAR, tmp_path / "no" / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["r.jsonl"]


def test_the_command(tmp_path: Path) -> None:
    """Says what was left out."""
    recording.write(tmp_path / "r.jsonl", RecordingHeader(("test",), 2, 1, 1.0), [chat(0.0, "hi"), LOOK])
    done = CliRunner().invoke(
        cli.app, ["export", str(tmp_path / "r.jsonl"), "--to", "aiperf", "-o", str(tmp_path / "out")]
    )
    assert done.exit_code == 0, done.output
    assert done.output.splitlines() == ["1 left out: without messages", f"{tmp_path / 'out'}: 1 requests"]
