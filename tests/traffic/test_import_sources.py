"""Every source becomes a recording: filtered, scrubbed, put in order, with its losses told."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from harness import cli
from harness.model import UsageError
from harness.traffic import recording
from harness.traffic.capture import filters
from harness.traffic.importing import Choices, Source, import_from
from harness.traffic.recording import Answered, Recorded, RecordingHeader

LOG = """10.0.0.7 - - [10/Oct/2026:13:55:40 +0000] "POST /v1/chat/completions HTTP/1.1" 200 2 "-" "-" 5.000
10.0.0.7 - - [10/Oct/2026:13:55:36 +0000] "GET /v1/models HTTP/1.1" 200 2 "-" "-" 0.000
10.0.0.8 - - [10/Oct/2026:13:55:38 +0000] "-" 400 0 "-" "-" 0.000
"""
PROMPT = "Jane Roe was diagnosed yesterday"


def posted(at_s: float, connection: int = 0, **more: Any) -> Recorded:
    body = json.dumps({"messages": [{"role": "user", "content": PROMPT}]}).encode()
    raw = b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    return Recorded(at_s, connection, 0, "POST", "/v1/chat/completions", raw, Answered(200, whole=True), **more)


def test_a_log_is_put_in_order_and_its_losses_are_told(tmp_path: Path) -> None:
    """Addresses become names; times only; a line that was no request counts as lost."""
    (tmp_path / "access.log").write_text(LOG)
    header = import_from(Source.NGINX, [tmp_path / "access.log"], tmp_path / "r.jsonl", Choices())
    ones = list(recording.read(tmp_path / "r.jsonl")[1])
    assert [(one.at_s, one.path) for one in ones] == [(0.0, "/v1/chat/completions"), (1.0, "/v1/models")]
    assert (header.timing_only, header.lost_share) == (True, pytest.approx(1 / 3))
    assert header.account == {"requests_seen": 3, "kept": 2, "lost": {"no request line in the log": 1}}
    assert b"10.0.0" not in (tmp_path / "r.jsonl").read_bytes()
    assert ones[0].client == ones[1].client != ""


def test_recordings_are_laid_over_each_other(tmp_path: Path) -> None:
    """Each from its beginning; connections stay apart, counts are summed, shares weighed."""
    lost = {"lost_share": 0.5, "account": {"requests_seen": 2, "kept": 1, "lost": {"gap": 1}}}
    recording.write(tmp_path / "a.jsonl", RecordingHeader(("a.pcap",), 1, 1, 1.0, **lost), [posted(0.0)])
    recording.write(
        tmp_path / "b.jsonl",
        RecordingHeader(("b.pcap",), 2, 1, 1.0, account={"requests_seen": 2, "kept": 2}, scrubbed={"keys": 1}),
        [posted(0.0), posted(1.0)],
    )
    header = import_from(
        Source.RECORDING, [tmp_path / "a.jsonl", tmp_path / "b.jsonl"], tmp_path / "all.jsonl", Choices()
    )
    ones = list(recording.read(tmp_path / "all.jsonl")[1])
    assert [(one.at_s, one.connection) for one in ones] == [(0.0, 0), (0.0, 1), (1.0, 1)]
    assert (header.sources, header.requests, header.connections) == (("a.pcap", "b.pcap"), 3, 2)
    assert header.account == {"requests_seen": 4, "kept": 3, "lost": {"gap": 1}}
    assert (header.lost_share, header.scrubbed) == (pytest.approx(1 / 4), {"keys": 1})
    bare = RecordingHeader(("c",), 1, 1, 1.0, timing_only=True)
    recording.write(tmp_path / "c.jsonl", bare, [posted(0.0)])
    with pytest.raises(UsageError, match="cannot be one"):
        import_from(Source.RECORDING, [tmp_path / "a.jsonl", tmp_path / "c.jsonl"], tmp_path / "x.jsonl", Choices())


def test_nothing_left_says_why(tmp_path: Path) -> None:
    """Filtered and lost."""
    (tmp_path / "access.log").write_text(LOG)
    chosen = Choices(filters=filters.read(methods=["PUT"]))
    with pytest.raises(UsageError, match="nothing is left of its 3 requests: the filters left out 3"):
        import_from(Source.NGINX, [tmp_path / "access.log"], tmp_path / "r.jsonl", chosen)
    (tmp_path / "access.log").write_text(LOG.splitlines()[2])
    with pytest.raises(UsageError, match="1 requests: lost: 1 no request line"):
        import_from(Source.NGINX, [tmp_path / "access.log"], tmp_path / "r.jsonl", Choices())
    assert [path.name for path in tmp_path.iterdir()] == ["access.log"]


def test_made_up_prompts_and_scrubbing_go_together(tmp_path: Path, tokenizer_dir: Path) -> None:
    """The command replaces prompts before anything is written, and masks the rest as ever."""
    one = posted(0.0, session="jane")
    recording.write(tmp_path / "a.jsonl", RecordingHeader(("a",), 1, 1, 1.0), [one])
    order = ["import", str(tmp_path / "a.jsonl"), "--from", "recording", "-o", str(tmp_path / "r.jsonl")]
    done = CliRunner().invoke(cli.app, [*order, "--synthetic-prompts", "--tokenizer", str(tokenizer_dir)])
    assert done.exit_code == 0, done.output
    assert "1 prompts made up" in done.output
    written = (tmp_path / "r.jsonl").read_text()
    assert not [word for word in (*PROMPT.split(), "jane") if len(word) > 3 and word in written]
    (again,) = recording.read(tmp_path / "r.jsonl")[1]
    head, _, body = again.raw.partition(b"\r\n\r\n")
    assert head.endswith(b"Content-Length: %d" % len(body))
    assert len(json.loads(body)["messages"]) == 1
