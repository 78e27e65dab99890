"""What a recording keeps of an exchange is what was sent, and what the player would have measured."""

import gzip
import zlib
from dataclasses import replace
from typing import Any

import brotli
import orjson
import pytest
import zstandard

from harness.drivers.stream import Reply, observe
from harness.model import Finish, Request
from harness.traffic.capture.account import Account
from harness.traffic.capture.coding import Undecodable, decoded
from harness.traffic.capture.exchanges import Reader
from harness.traffic.capture.messages import Exchange, Said
from harness.traffic.capture.packets import Flow
from harness.traffic.recording import Answered

SECOND = 1_000_000_000
START = 1_700_000_000 * SECOND
FLOW = Flow(bytes([10, 0, 0, 7]), 40000, bytes([10, 0, 0, 1]), 8000)
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 7, "stream": True}
EVENTS = [
    b'data: {"id":"1","choices":[{"delta":{"role":"assistant"}}]}\n\n',
    b'data: {"id":"1","choices":[{"delta":{"content":"a"}}]}\n\n',
    b'data: {"id":"1","choices":[{"delta":{"content":"b"}}]}\n\n',
    b'data: {"id":"1","choices":[{"delta":{"content":"c"},"finish_reason":"length"}]}\n\n',
    b'data: {"id":"1","choices":[],"usage":{"prompt_tokens":12,"completion_tokens":3}}\n\n',
    b"data: [DONE]\n\n",
]


def exchange(
    body: bytes, answer: list[bytes] | None = None, status: int = 200, headers: Any = (), sent: Any = (), **more: Any
) -> Exchange:
    """Sent at once, 5 s into the capture; each piece of the answer comes 10 ms after the one before."""
    raw = b"POST /v1/chat/completions HTTP/1.1\r\n\r\n" + body
    begun = START + 5 * SECOND
    request = Said(raw, begun, begun, tuple(sent), [(begun, body)], flaw=more.pop("flaw", ""))
    said = None
    if answer is not None:
        pieces = [(begun + (k + 1) * SECOND // 100, piece) for k, piece in enumerate(answer)]
        last_ns = pieces[-1][0] if pieces else begun + SECOND // 100
        said = Said(b"", begun + SECOND // 200, last_ns, tuple(headers), pieces, more.pop("lost", ""))
    values = {"method": "POST", "target": "/v1/chat/completions?key=1", "opened_ns": None, "turn": 0} | more
    return Exchange(connection=3, flow=FLOW, request=request, status=status, answer=said, **values)


def read(one: Exchange, **more: Any) -> Any:
    return Reader(START, Account(), **more).recorded(one)


def test_a_stream_is_measured_as_the_player_measures_it() -> None:
    """The same bytes at the same moments give the same record on both sides of the comparison."""
    one = read(exchange(orjson.dumps(BODY), EVENTS))
    pieces = [((k + 1) / 100, piece) for k, piece in enumerate(EVENTS)]
    reply = Reply(0.0, 0.005, 0.06, 200, pieces, broken=None)
    seen = observe(Request(0, 0.0, "chat", stream=True, raw=True), reply, 0.0, 0)
    answer = one.answer
    assert (answer.status, answer.whole, answer.error, answer.lost) == (200, True, False, "")
    assert (answer.tokens_in, answer.tokens_out, answer.finish) == (12, 3, Finish.LENGTH)
    assert (answer.tokens_in, answer.tokens_out, answer.finish) == (seen.tokens_in, seen.tokens_out, seen.finish)
    assert answer.shape == seen.shape != 0
    moments = (answer.first_byte_s, answer.first_token_s, answer.last_token_s, answer.ended_s, *answer.gaps_s)
    ours = (seen.first_byte_s, seen.first_token_s, seen.last_token_s, seen.ended_s, *seen.gaps_s)
    assert moments == pytest.approx(ours)
    assert answer.gaps_s == pytest.approx((0.01, 0.01))


def test_what_a_request_says_of_itself() -> None:
    """Where it stood, what it asked for and who sent it; moments count from the capture's first packet."""
    one = read(
        exchange(orjson.dumps(BODY), EVENTS, opened_ns=START + 5 * SECOND - 2_000_000, gave_up_ns=START + 6 * SECOND)
    )
    assert (one.at_s, one.connection, one.turn, one.method) == (5.0, 3, 0, "POST")
    assert (one.path, one.client, one.stream, one.max_tokens, one.prompt_tokens) == (
        "/v1/chat/completions", "10.0.0.7", True, 7, 12,
    )  # fmt: skip
    assert (one.lead_s, one.give_up_s, one.half_close_s) == (0.002, 1.0, None)
    assert read(exchange(b"{}", EVENTS, target="http://gateway:80/v1/models?x=1")).path == "/v1/models"
    assert read(exchange(b"{}", EVENTS, turn=1, opened_ns=START)).lead_s is None


def test_the_shapes_of_answers_are_told_in_words() -> None:
    """Each checksum stands for the members of an answer."""
    reader = Reader(START, Account())
    plain = reader.recorded(
        exchange(b"{}", [b'{"id":"x","choices":[{"message":{"content":"a"},"finish_reason":"stop"}]}'])
    )
    assert reader.shapes[str(plain.answer.shape)] == [
        "choices[].finish_reason:text", "choices[].message.content:text", "id:text",
    ]  # fmt: skip
    assert (plain.stream, plain.answer.finish, plain.answer.tokens_out) == (False, Finish.STOP, 1)
    assert plain.answer.first_token_s != plain.answer.first_token_s  # a plain answer has no first token


@pytest.mark.parametrize("squeeze", [
    ("gzip", gzip.compress), ("deflate", zlib.compress), ("br", brotli.compress), ("zstd", zstandard.compress),
    ("gzip", lambda data: gzip.compress(data[:50]) + gzip.compress(data[50:])),
    ("deflate", lambda data: zlib.compress(data)[2:-4]),
    ("gzip, br", lambda data: brotli.compress(gzip.compress(data))),
])  # fmt: skip
def test_a_compressed_answer_reads_as_a_plain_one(squeeze: Any) -> None:
    """In every coding, cut into pieces anywhere."""
    coding, compress = squeeze
    packed = compress(b"".join(EVENTS))
    pieces = [packed[k : k + 7] for k in range(0, len(packed), 7)]
    one = read(exchange(orjson.dumps(BODY), pieces, headers=[(b"Content-Encoding", coding.encode())]))
    assert (one.answer.tokens_out, one.answer.finish, one.answer.whole) == (3, Finish.LENGTH, True)


def test_events_of_a_compressed_stream_keep_the_moment_of_the_piece_that_completed_them() -> None:
    """A server that flushes after each event is dated as one that does not compress."""
    packer = zlib.compressobj(wbits=31)
    pieces = [packer.compress(event) + packer.flush(zlib.Z_SYNC_FLUSH) for event in EVENTS]
    squeezed = read(exchange(orjson.dumps(BODY), pieces, headers=[(b"content-encoding", b"gzip")]))
    assert squeezed.answer == read(exchange(orjson.dumps(BODY), EVENTS)).answer


@pytest.mark.parametrize("answer", [(b"gzip", b"no gzip"), (b"compress", b"x")])
def test_an_answer_that_cannot_be_decoded_is_counted(answer: tuple[bytes, bytes]) -> None:
    """Its status and its times stand; nothing is made up for the rest."""
    account = Account()
    one = Reader(START, account).recorded(exchange(b"{}", [answer[1]], headers=[(b"content-encoding", answer[0])]))
    assert (account.unread_answers, one.answer.status, one.answer.tokens_out, one.answer.shape) == (1, 200, 0, 0)


def test_a_body_that_swells_is_refused() -> None:
    """A small body may not fill the memory."""
    bombs = [("gzip", gzip.compress), ("br", brotli.compress), ("zstd", zstandard.compress)]
    for coding, compress in bombs:
        with pytest.raises(Undecodable, match=r"more than 65536 bytes|too large"):
            list(decoded([(0, compress(bytes(1 << 20)))], coding, limit_bytes=1 << 16))


def test_an_error_answer_is_told_by_its_status() -> None:
    """Its body is not read, as the player does not read it."""
    answer = read(exchange(b"{}", [b'{"error":{"message":"no"}}'], status=422)).answer
    assert (answer.status, answer.whole, answer.shape, answer.error) == (422, True, 0, False)


def test_an_answer_that_the_capture_lost_says_so() -> None:
    """What was said before the gap counts; a stream that said [DONE] is whole whatever came after."""
    cut = read(exchange(orjson.dumps(BODY), EVENTS[:3], lost="gap")).answer
    assert (cut.whole, cut.lost, cut.tokens_out) == (False, "gap", 2)
    done = read(exchange(orjson.dumps(BODY), EVENTS, lost="gap")).answer
    assert (done.whole, done.lost) == (True, "")
    assert read(exchange(orjson.dumps(BODY), EVENTS[:3], lost="closed")).answer.lost == ""  # that is what the stack did
    unseen = read(exchange(b"{}", [], status=0, lost="not captured")).answer
    assert (unseen, read(exchange(b"{}", None, status=0)).answer) == (
        replace(Answered(), lost="not captured"),
        Answered(),
    )


@pytest.mark.parametrize(
    ("body", "flaw", "said"),
    [
        (b'{"a":1', "", "bad_json"),
        (b"", "", "empty_body"),
        (b'{"a":1', "bad_chunk", "bad_chunk"),
        (b"[1]", "", ""),
        (b'{"max_tokens":true,"stream":"yes"}', "", ""),
    ],
)
def test_what_is_wrong_with_a_request(body: bytes, flaw: str, said: str) -> None:
    """Its framing first, then its JSON; odd values are no flaw and no fault of ours."""
    one = read(exchange(body, [b"x"], status=400, flaw=flaw))
    assert (one.flaw, one.stream, one.max_tokens) == (said, False, 0)


def test_a_path_that_speaks_no_json_has_no_bad_json() -> None:
    """A form, or a GET, need not be JSON; a body that says it is must be."""
    assert read(exchange(b"a=1", [b""], target="/upload")).flaw == ""
    assert read(exchange(b"", [b""], method="GET", target="/health")).flaw == ""
    assert read(exchange(b"a=1", [b""], target="/x", sent=[(b"Content-Type", b"application/json")])).flaw == "bad_json"


def test_the_conversation_of_a_request() -> None:
    """The header that was named, before the members of the body; numbers count as names."""
    body = orjson.dumps({"user": "u", "session_id": 7})
    assert read(exchange(body, EVENTS)).session == "7"
    assert read(exchange(body, EVENTS, sent=[(b"X-Session-Id", b"s")])).session == "s"
    assert read(exchange(body, EVENTS, sent=[(b"X-Chat", b"c")]), session_headers=("x-chat",)).session == "c"
    assert read(exchange(b'{"user":["u"]}', EVENTS)).session == ""


@pytest.mark.parametrize(
    "body", [b"[" * 1020 + b"]" * 1020, b'{"a":' * 1020 + b"1" + b"}" * 1020, b"\xff", b"null", b"7"]
)
def test_an_answer_of_any_shape_is_read(body: bytes) -> None:
    """Nested without end, no text, no object: it is no answer of the API, and no fault of ours."""
    one = read(exchange(body, [body]))
    assert (one.answer.status, one.answer.tokens_out, one.max_tokens) == (200, 0, 0)
    assert read(exchange(orjson.dumps(BODY), [b"data: " + body + b"\n\n"])).answer.first_token_s != 0
