"""Bytes and moments to one observation: the table of stream shapes that tools get wrong, and that cuts never matter."""

import math
import zlib
from dataclasses import replace
from itertools import pairwise

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.answers import Answer, EventStream, read_stream
from harness.drivers.stream import Reply, observe
from harness.model import NEVER, Outcome, Request, Tag

ASKED = Request(index=3, due_s=1.0, class_name="short", stream=True)
PLAIN = replace(ASKED, stream=False)
BAD = replace(ASKED, flaw="empty_body", expect=("400", "422"))


def chunk(content: str | None = None, finish: str | None = None, **more: object) -> bytes:
    delta: dict[str, object] = {} if content is None else {"content": content}
    return orjson.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}], **more})


def sse_events(*documents: bytes) -> list[bytes]:
    return [b"data: " + document + b"\n\n" for document in documents]


def sse(*documents: bytes) -> bytes:
    return b"".join(sse_events(*documents))


ROLE = orjson.dumps({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
USAGE = orjson.dumps({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}})
DONE = b"[DONE]"
BODY = sse(ROLE, chunk("a"), chunk("b"), chunk("c", "length"), USAGE, DONE)


def reply_of(*pieces: bytes, status: int = 200, broken: Outcome | None = None) -> Reply:
    """A reply whose piece k arrived at 10 + k."""
    timed = [(10.0 + k, piece) for k, piece in enumerate(pieces)]
    return Reply(sent_s=9.0, first_byte_s=10.0, ended_s=10.0 + len(pieces), status=status, pieces=timed, broken=broken)


def outcome_of(*pieces: bytes, request: Request = ASKED, status: int = 200, broken: Outcome | None = None) -> Outcome:
    return observe(request, reply_of(*pieces, status=status, broken=broken), 0.0, 0).outcome


def events_of(data: bytes) -> list[tuple[str, bytes]]:
    stream = EventStream()
    return [(name, found) for _, name, found in [*stream.feed(0.0, data), *stream.close(0.0)]]


@pytest.mark.parametrize(
    ("data", "events"),
    [
        (b"data: x\r\n\r\ndata: y\r\n\r\n", [b"x", b"y"]),
        (b"data: x\r\rdata: y\r\r", [b"x", b"y"]),
        (b"data:x\n\n", [b"x"]),
        (b"data:  x\n\n", [b" x"]),
        (b"data: x\ndata: y\n\n", [b"x\ny"]),
        (b"data\n\n", [b""]),
        (b": keep-alive\n\n: keep-alive\n\ndata: x\n\n", [b"x"]),
        (b"id: 4\nretry: 10\ndata: x\n\n", [b"x"]),
        (b"\xef\xbb\xbfdata: x\n\n", [b"x"]),
        (b"data: x\n\ndata: y", [b"x", b"y"]),
        ("data: a\u2028b\u0085c\u000bd\n\n".encode(), ["a\u2028b\u0085c\u000bd".encode()]),
        (b"data: " + b"z" * 1_000_000 + b"\n\n", [b"z" * 1_000_000]),
        (b"event: ping\n\n", []),
    ],
)
def test_events_are_cut_by_the_rules_of_whatwg(data: bytes, events: list[bytes]) -> None:
    """Line ends, comments, fields, the byte order mark and long lines are read as WHATWG says."""
    assert [found for _, found in events_of(data)] == events


def test_an_event_has_the_type_that_its_event_field_names() -> None:
    """`event:` names one event only; the next is a message again."""
    assert events_of(b"event: error\ndata: x\n\ndata: y\n\n") == [("error", b"x"), ("message", b"y")]


STREAMS = [
    BODY,
    BODY.replace(b"\n", b"\r\n"),
    BODY.replace(b"\n", b"\r"),
    b"\xef\xbb\xbf: hi\n\n" + sse(ROLE, '{"choices":[{"delta":{"content":"日\u2028本"}}]}'.encode()) + BODY,
    BODY.removesuffix(b"\n\n"),
]


@given(stream=st.sampled_from(STREAMS), cuts=st.sets(st.integers(1, 800)))
def test_any_cut_of_the_bytes_gives_the_same_tokens(stream: bytes, cuts: set[int]) -> None:
    """Where TCP cuts a stream changes no token, and moments never go back."""
    edges = [0, *sorted(cut for cut in cuts if cut < len(stream)), len(stream)]
    pieces = [(float(begin), stream[begin:end]) for begin, end in pairwise(edges)]
    cut, whole = read_stream(pieces), read_stream([(0.0, stream)])
    assert said(cut) == said(whole)
    assert cut.content_s == sorted(cut.content_s)


@pytest.mark.parametrize("stream", STREAMS)
def test_byte_by_byte_gives_the_same_tokens(stream: bytes) -> None:
    """The finest cut there is changes no token."""
    assert said(read_stream((float(k), stream[k : k + 1]) for k in range(len(stream)))) == said(
        read_stream([(0.0, stream)])
    )


def said(answer: Answer) -> tuple[object, ...]:
    return len(answer.content_s), answer.usage, answer.finished, answer.done, answer.error, answer.malformed


def test_the_moments_of_a_stream_are_those_of_its_content() -> None:
    """The role chunk is no token: the first byte comes before the first token, and gaps are between content events."""
    seen = observe(
        ASKED,
        reply_of(*[b"data: " + d + b"\n\n" for d in (ROLE, chunk("a"), chunk("b"), chunk("c", "stop"), USAGE, DONE)]),
        8.0,
        5,
    )
    assert (seen.sent_s, seen.first_byte_s, seen.first_token_s, seen.last_token_s, seen.ended_s) == (1, 2, 3, 5, 7)
    assert (seen.gaps_s, seen.tokens_in, seen.tokens_out, seen.worker) == ((1.0, 1.0), 7, 3, 5)
    assert seen.outcome is Outcome.OK
    assert seen.tags == Tag.STREAMED


@pytest.mark.parametrize(
    "delta",
    [{"content": "a"}, {"reasoning_content": "a"}, {"reasoning": "a"}, {"tool_calls": [{"index": 0}]}],
)
def test_text_reasoning_and_tool_calls_are_tokens(delta: dict[str, object]) -> None:
    """The first event with any of them is the first token."""
    body = sse(ROLE, orjson.dumps({"choices": [{"delta": delta, "finish_reason": "stop"}]}), DONE)
    assert len(read_stream([(0.0, body)]).content_s) == 1


def test_completions_say_text_where_chats_say_delta() -> None:
    """The streams of /v1/completions are read as well."""
    body = sse(
        b'{"choices":[{"text":"a","finish_reason":null}]}', b'{"choices":[{"text":"","finish_reason":"stop"}]}', DONE
    )
    assert outcome_of(body) is Outcome.OK


def event(kind: str, **more: object) -> bytes:
    return orjson.dumps({"type": f"response.{kind}", **more})


def response(status: str, *output: object) -> dict[str, object]:
    return {"object": "response", "status": status, "output": output, "usage": {"input_tokens": 7, "output_tokens": 2}}


WORDS = event("output_text.delta", delta="a"), event("output_text.delta", delta="b")
MESSAGE = {"type": "message", "content": [{"type": "output_text", "text": "ab"}]}


def test_a_streamed_response_has_its_tokens_and_its_end() -> None:
    """Deltas are its content, `response.completed` its end and usage; it says no [DONE]."""
    pieces = [sse(event("created", response=response("in_progress"))), *map(sse, WORDS)]
    seen = observe(ASKED, reply_of(*pieces, sse(event("completed", response=response("completed")))), 0.0, 0)
    assert (seen.outcome, seen.tokens_in, seen.tokens_out) == (Outcome.OK, 7, 2)
    assert (seen.first_token_s, seen.gaps_s, seen.ended_s) == (11.0, (1.0,), 13.0)
    assert seen.tags == Tag.STREAMED


@pytest.mark.parametrize(
    ("end", "outcome"),
    [
        ((event("incomplete", response=response("incomplete")),), Outcome.OK),
        ((event("failed", response=response("failed")),), Outcome.ERROR_IN_STREAM),
        ((), Outcome.TRUNCATED),
    ],
)
def test_a_streamed_response_is_judged_by_its_end(end: tuple[bytes, ...], outcome: Outcome) -> None:
    """Cut at its length it is served; failed, or without an end, it is not."""
    assert outcome_of(sse(*WORDS, *end)) is outcome


@pytest.mark.parametrize(
    ("body", "outcome"),
    [
        (response("completed", MESSAGE), Outcome.OK),
        (response("completed"), Outcome.EMPTY),
        (response("failed", MESSAGE), Outcome.ERROR_IN_STREAM),
        (response("in_progress", MESSAGE), Outcome.EMPTY),
        ({"object": "list", "data": [{"embedding": [0.5]}], "usage": {"prompt_tokens": 7}}, Outcome.OK),
        ({"object": "list", "data": []}, Outcome.EMPTY),
    ],
)
def test_answers_without_choices_are_judged_by_what_they_hold(body: object, outcome: Outcome) -> None:
    """A whole response and a list of embeddings: served when something is in it and nothing failed."""
    seen = observe(PLAIN, reply_of(orjson.dumps(body)), 0.0, 0)
    assert seen.outcome is outcome
    assert not seen.tags & Tag.USAGE_MISSING


def test_without_usage_the_content_events_are_counted_and_it_is_said() -> None:
    """A missing usage, or a null one, is a tag and not a guess."""
    body = sse(chunk("a", usage=None), chunk("b", "stop", usage=None), DONE)
    seen = observe(ASKED, reply_of(body), 0.0, 0)
    assert (seen.tokens_out, Tag.USAGE_MISSING in seen.tags) == (2, True)


def test_the_last_of_continuous_usages_counts() -> None:
    """A server that sends usage with every chunk is counted once."""
    usage = [{"prompt_tokens": 7, "completion_tokens": k} for k in (5, 10)]
    body = sse(chunk("abcde", usage=usage[0]), chunk("fghij", "stop", usage=usage[1]), DONE)
    seen = observe(ASKED, reply_of(body), 0.0, 0)
    assert (seen.tokens_out, Tag.CHUNKED_TOKENS in seen.tags) == (10, True)


def test_a_token_that_only_ends_the_answer_makes_no_chunk() -> None:
    """An end-of-text token counts in the usage and shows no content: gaps are still between tokens."""
    body = sse(chunk("a"), chunk("b"), chunk(None, "stop"), USAGE, DONE)
    assert Tag.CHUNKED_TOKENS not in observe(ASKED, reply_of(body), 0.0, 0).tags


def test_tokens_that_share_a_read_are_told() -> None:
    """When the first two tokens came in one read, TTFT is an upper bound."""
    assert Tag.COALESCED in observe(ASKED, reply_of(BODY), 0.0, 0).tags
    assert Tag.COALESCED not in observe(ASKED, reply_of(sse(chunk("a")), sse(chunk("b", "stop"), DONE)), 0.0, 0).tags


@pytest.mark.parametrize(
    ("body", "outcome"),
    [
        (BODY, Outcome.OK),
        (sse(b'{"choices":[],"prompt_filter_results":[]}') + BODY, Outcome.OK),
        (BODY + sse(chunk("late"), b'{"error":{"message":"late"}}'), Outcome.OK),
        (BODY.removesuffix(b"\n\n"), Outcome.OK),
        (sse(chunk("a"), b'{"error":{"message":"engine died"}}', DONE), Outcome.ERROR_IN_STREAM),
        (sse(chunk("a"), b'{"object":"error","message":"engine died"}', DONE), Outcome.ERROR_IN_STREAM),
        (b'event: error\ndata: {"detail":"x"}\n\n', Outcome.ERROR_IN_STREAM),
        (b'{"error":{"message":"no stream for you"}}', Outcome.ERROR_IN_STREAM),
        (sse(DONE), Outcome.EMPTY),
        (b"", Outcome.EMPTY),
        (sse(ROLE, chunk(None, "stop"), DONE), Outcome.EMPTY),
        (sse(ROLE, chunk("a"), chunk("b", "stop")), Outcome.TRUNCATED),
        (sse(ROLE, chunk("a"), DONE), Outcome.TRUNCATED),
        (b"<html><body>502 upstream\n</body></html>", Outcome.MALFORMED),
        (sse(chunk("a"), b'{"choices": [', DONE), Outcome.MALFORMED),
        (sse(chunk("a"), b'{"choices": "none"}', DONE), Outcome.MALFORMED),
        (sse(chunk("a"), b"[1]", DONE), Outcome.MALFORMED),
        (b'{"choices":[{"message":{"content":"not a stream"}}]}', Outcome.MALFORMED),
    ],
)
def test_a_stream_with_status_200_is_judged_by_what_it_holds(body: bytes, outcome: Outcome) -> None:
    """Only content, a finish and [DONE] without an error make a success."""
    assert outcome_of(body) is outcome


@pytest.mark.parametrize(
    ("body", "outcome"),
    [
        (
            b'{"choices":[{"message":{"content":"a"},"finish_reason":"stop"}],"usage":{"completion_tokens":1}}',
            Outcome.OK,
        ),
        (b'{"choices":[{"text":"a","finish_reason":"length"}]}', Outcome.OK),
        (b'{"choices":[{"text":"a"}]}', Outcome.TRUNCATED),
        (b'{"choices":[{"text":"a","finish_reason":"abort"}]}', Outcome.ERROR_IN_STREAM),
        (b'{"choices":[{"message":{"content":""}}]}', Outcome.EMPTY),
        (b'{"error":{"message":"x"}}', Outcome.ERROR_IN_STREAM),
        (b"<html>", Outcome.MALFORMED),
        (b"", Outcome.MALFORMED),
        (BODY, Outcome.MALFORMED),
    ],
)
def test_a_plain_answer_is_judged_by_what_it_holds(body: bytes, outcome: Outcome) -> None:
    """A plain answer is one JSON document with content."""
    assert outcome_of(body, request=PLAIN) is outcome


def test_a_plain_answer_has_no_token_moments() -> None:
    """TTFT and gaps are of streams; a plain answer does not pretend to have them."""
    seen = observe(PLAIN, reply_of(b'{"choices":[{"text":"a"}]}'), 0.0, 0)
    assert math.isnan(seen.first_token_s)
    assert Tag.STREAMED not in seen.tags


@pytest.mark.parametrize(
    ("request_", "status", "outcome"),
    [
        (ASKED, 429, Outcome.RATE_LIMITED),
        (replace(ASKED, expect=("2xx", "429")), 429, Outcome.REJECTED_AS_EXPECTED),
        (ASKED, 400, Outcome.REJECTED),
        (ASKED, 499, Outcome.REJECTED),
        (ASKED, 500, Outcome.HTTP_5XX),
        (ASKED, 503, Outcome.HTTP_5XX),
        (ASKED, 302, Outcome.MALFORMED),
        (BAD, 422, Outcome.REJECTED_AS_EXPECTED),
        (BAD, 413, Outcome.REJECTED),
        (BAD, 500, Outcome.HTTP_5XX),
        (BAD, 200, Outcome.ACCEPTED_BUT_BAD),
        (replace(ASKED, expect=("4xx",)), 418, Outcome.REJECTED_AS_EXPECTED),
    ],
)
def test_a_status_is_judged_by_what_the_plan_expects(request_: Request, status: int, outcome: Outcome) -> None:
    """The same status is right for one request and wrong for another."""
    assert outcome_of(b"{}", request=request_, status=status) is outcome


@pytest.mark.parametrize("broken", [Outcome.RESET, Outcome.STALLED, Outcome.TRUNCATED, Outcome.OPEN])
def test_what_breaks_a_success_is_its_outcome(broken: Outcome) -> None:
    """Tokens that came before are kept; the request has failed."""
    seen = observe(ASKED, reply_of(sse(chunk("a"), chunk("b")), broken=broken), 0.0, 0)
    assert (seen.outcome, seen.tokens_out) == (broken, 2)


def test_a_refusal_stands_though_its_body_breaks_off() -> None:
    """Whoever reads 413 knows the answer, also when the server then slams the door."""
    request = replace(ASKED, flaw="oversized_body", expect=("413",))
    assert outcome_of(b"too", request=request, status=413, broken=Outcome.RESET) is Outcome.REJECTED_AS_EXPECTED


def test_nothing_after_done_can_break_an_answer() -> None:
    """A [DONE] without its line end, then a closed socket: the user had everything."""
    body = sse(chunk("a", "stop")) + b"data: [DONE]"
    assert outcome_of(body, broken=Outcome.TRUNCATED) is Outcome.OK


def test_without_an_answer_there_is_only_how_it_broke() -> None:
    """Refused, timed out or cancelled: no status, no moments, and the words of the closed set."""
    for broken in (Outcome.REFUSED, Outcome.TIMEOUT, Outcome.CANCELLED_BY_US, Outcome.RESET):
        seen = observe(ASKED, Reply(sent_s=1.0, ended_s=2.0, broken=broken), 0.0, 0)
        assert (seen.outcome, seen.status, math.isnan(seen.first_byte_s)) == (broken, 0, True)


@given(data=st.binary(max_size=300), streamed=st.booleans())
def test_no_bytes_are_too_strange_to_judge(data: bytes, streamed: bool) -> None:
    """Whatever a server sends becomes an outcome, never an exception."""
    assert outcome_of(data, request=ASKED if streamed else PLAIN) in Outcome


@given(
    value=st.recursive(
        st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(max_size=3),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["choices", "delta", "usage", "error", "content", "completion_tokens", "text"]),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    )
)
def test_no_document_is_too_strange_to_judge(value: object) -> None:
    """JSON of any shape becomes an outcome, never an exception."""
    assert outcome_of(sse(orjson.dumps(value)), request=ASKED) in Outcome


def test_an_answer_without_events_ended_when_it_ended() -> None:
    """The end of a request is that of its last byte; a stream's is its [DONE]."""
    assert observe(ASKED, reply_of(sse(chunk("a", "stop")), sse(DONE), b": bye\n\n"), 0.0, 0).ended_s == 11.0
    assert math.isnan(observe(ASKED, Reply(sent_s=1.0, ended_s=NEVER), 0.0, 0).ended_s)


@pytest.mark.parametrize("wbits", [31, 15])
def test_a_compressed_stream_is_read_at_the_moments_of_its_bytes(wbits: int) -> None:
    """A captured client may have asked for gzip or deflate: each token comes with the bytes that made it readable."""
    packer = zlib.compressobj(wbits=wbits)
    pieces = [
        packer.compress(event) + packer.flush(zlib.Z_SYNC_FLUSH) for event in sse_events(ROLE, chunk("a"), chunk("b"))
    ]
    pieces.append(packer.compress(sse(chunk(None, "stop"), DONE)) + packer.flush())
    reply = reply_of(*pieces)
    reply.coding = "gzip" if wbits == 31 else "deflate"
    seen = observe(ASKED, reply, 0.0, 0)
    assert (seen.outcome, seen.first_token_s, seen.last_token_s) == (Outcome.OK, 11.0, 12.0)


def test_what_cannot_be_decoded_is_malformed() -> None:
    """A body that is not what its coding says answers nobody."""
    reply = reply_of(BODY)
    reply.coding = "gzip"
    assert observe(ASKED, reply, 0.0, 0).outcome is Outcome.MALFORMED


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/v1/responses/resp_1", "/metrics?x=/chat/completions"])
def test_what_asks_no_model_owes_no_content(path: str) -> None:
    """A captured request to another path is right when its answer is whole, and only then."""
    request = replace(PLAIN, raw=True, path=path)
    assert outcome_of(b"ready", request=request) is Outcome.OK
    assert outcome_of(b"", request=request, status=204) is Outcome.OK
    assert outcome_of(b"rea", request=request, broken=Outcome.TRUNCATED) is Outcome.TRUNCATED
    assert outcome_of(b"ready", request=replace(request, path="/v1/completions?x=1")) is Outcome.MALFORMED
