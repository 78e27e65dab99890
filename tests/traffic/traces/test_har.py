"""HTTP archives give whole requests and what their answers said, or name the entry that is wrong."""

import json
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest

from harness.model import Finish, UsageError
from harness.traffic.capture.account import Account
from harness.traffic.capture.exchanges import Reader
from harness.traffic.recording import Recorded
from harness.traffic.traces import har

BODY = '{"model":"m","messages":[{"role":"user","content":"hé"}],"stream":true,"max_tokens":9}'
EVENTS = (
    'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
    'data: {"choices":[{"delta":{"content":"b"},"finish_reason":"length"}]}\n\n'
    'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":2}}\n\ndata: [DONE]\n\n'
)


def entry(**more: Any) -> dict[str, Any]:
    return {
        "startedDateTime": "2026-10-10T13:55:36.500+02:00",
        "connection": "77",
        "request": {
            "method": "POST",
            "url": "https://api.example/v1/chat/completions?x=1",
            "httpVersion": "h2",
            "headers": [
                {"name": ":authority", "value": "api.example"},
                {"name": "authorization", "value": "Bearer sk-topsecret99"},
                {"name": "Content-Length", "value": "1"},
            ],
            "bodySize": len(BODY),
            "postData": {"mimeType": "application/json", "text": BODY},
        },
        "response": {
            "status": 200,
            "headers": [
                {"name": "content-type", "value": "text/event-stream"},
                {"name": "content-encoding", "value": "br"},
            ],
            "content": {"size": len(EVENTS), "mimeType": "text/event-stream", "text": EVENTS},
        },
        "timings": {"blocked": 100, "dns": -1, "connect": 50, "ssl": 20, "send": 1, "wait": 199, "receive": 800},
    } | more


def read(tmp_path: Path, *entries: dict[str, Any]) -> list[tuple[Recorded, str]]:
    (tmp_path / "a.har").write_text(json.dumps({"log": {"version": "1.2", "entries": entries}}))
    return list(har.read(tmp_path / "a.har", Reader(0, Account())))


def test_a_request_is_written_anew(tmp_path: Path) -> None:
    """As HTTP/1.1 with its own headers, a host and the right length; moments count from its first byte."""
    ((one, lost), (_, _)) = read(tmp_path, entry(), entry())
    head, _, body = one.raw.partition(b"\r\n\r\n")
    assert head.split(b"\r\n") == [
        b"POST /v1/chat/completions?x=1 HTTP/1.1",
        b"Host: api.example",
        b"authorization: Bearer sk-topsecret99",
        b"Content-Length: %d" % len(body),
    ]
    assert (body.decode(), one.path, one.flaw, lost) == (BODY, "/v1/chat/completions", "", "")
    assert one.at_s == pytest.approx(1791633336.65, abs=1e-3)
    assert (one.stream, one.max_tokens, one.prompt_tokens) == (True, 9, 5)


def test_an_answer_is_read(tmp_path: Path) -> None:
    """Its tokens came together as far as anybody knows; connections keep their requests in order."""
    (first, _), (second, _), (alone, _) = read(tmp_path, entry(), entry(), entry(connection=None))
    answer = first.answer
    assert (answer.status, answer.finish, answer.tokens_out, answer.whole) == (200, Finish.LENGTH, 2, True)
    assert (answer.first_byte_s, answer.ended_s, answer.gaps_s) == (pytest.approx(0.2), pytest.approx(1.0), (0.0,))
    assert [(one.connection, one.turn) for one in (first, second, alone)] == [(0, 0), (0, 1), (1, 0)]


def test_what_an_archive_leaves_out(tmp_path: Path) -> None:
    """A body that it does not hold is lost; an answer that it does not hold says nothing; no answer is none."""
    bare = entry()["request"] | {"postData": {"mimeType": "x"}}
    silent = entry()["response"] | {"content": {"size": 9, "mimeType": "text/event-stream"}}
    untold = entry()["response"] | {"content": {"size": -1, "mimeType": "text/event-stream"}}
    refused = entry()["response"] | {"status": 0}
    coded = {"mimeType": "x", "text": b64encode(b"{}").decode(), "encoding": "base64"}
    posted = entry()["request"] | {"postData": coded}
    (_, lost), (unread, _), (unmeasured, _), (unanswered, _), (decoded, _) = read(
        tmp_path,
        entry(request=bare),
        entry(response=silent),
        entry(response=untold),
        entry(response=refused),
        entry(request=posted),
    )
    assert lost == "its body is not in the archive"
    assert (unread.answer.status, unread.answer.lost) == (200, "not in the archive")
    assert (unmeasured.answer.status, unmeasured.answer.lost) == (200, "not in the archive")
    assert unanswered.answer.status == 0
    assert decoded.raw.endswith(b"Content-Length: 2\r\n\r\n{}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{\n\n!", r"a\.har:3: no JSON"),
        ("[]", r"a\.har:1: no HTTP archive"),
        ('{"log":{"entries":{}}}', r"a\.har:1: no HTTP archive"),
        ('{"log":{"entries":[{}]}}', r"a\.har: entry 1: not as HAR 1\.2 has it: KeyError"),
        (json.dumps({"log": {"entries": [entry(), entry(startedDateTime="today")]}}), "entry 2: 'today' is no date"),
    ],
)
def test_an_archive_that_is_none_is_refused(tmp_path: Path, text: str, said: str) -> None:
    """With its place."""
    (tmp_path / "a.har").write_text(text)
    with pytest.raises(UsageError, match=said):
        list(har.read(tmp_path / "a.har", Reader(0, Account())))


def test_a_file_that_is_missing(tmp_path: Path) -> None:
    """Is told by its name."""
    with pytest.raises(UsageError, match=r"no\.har cannot be read"):
        list(har.read(tmp_path / "no.har", Reader(0, Account())))
