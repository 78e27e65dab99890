"""Where an answer ends: HTTP/1.1 framing of every kind, cut anywhere."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.drivers.stream import Reply
from harness.drivers.wire import Answers
from harness.model import Outcome

CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def fed(data: bytes, step: int, *, stream: bool = False) -> tuple[Answers, Reply]:
    answers, reply = Answers(), Reply()
    answers.expect(reply, stream)
    for at in range(0, len(data), step):
        answers.feed(float(at), data[at : at + step])
    return answers, reply


def body(reply: Reply) -> bytes:
    return b"".join(piece for _, piece in reply.pieces)


@pytest.mark.parametrize("step", [1, 3, 10_000])
@pytest.mark.parametrize(
    ("data", "status", "text", "keep_alive"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi", 200, b"hi", True),
        (CHUNKED + b"2\r\nhi\r\n0\r\n\r\n", 200, b"hi", True),
        (b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nhi", 200, b"hi", False),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nhi", 200, b"hi", False),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 413 No\r\ncontent-length: 2\r\n\r\nno", 413, b"no", True),
        (b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n", 204, b"", True),
    ],
)
def test_a_whole_message_ends_the_request(data: bytes, status: int, text: bytes, keep_alive: bool, step: int) -> None:
    """However it is framed and cut, the last byte ends it and tells whether the connection lives on."""
    answers, reply = fed(data, step)
    assert (answers.over, answers.whole, answers.keep_alive) == (True, True, keep_alive)
    assert (reply.status, body(reply), reply.broken) == (status, text, None)


@pytest.mark.parametrize("step", [1, 5, 10_000])
@pytest.mark.parametrize("done", [b"data: [DONE]\n\n", b"data:[DONE]\n\n", b"data: [DONE]\r\n\r\n"])
def test_done_ends_the_request_though_the_message_goes_on(done: bytes, step: int) -> None:
    """The user has everything at [DONE]; the connection waits for the end of the message."""
    data = CHUNKED + b"%x\r\ndata: {}\n\n%b\r\n" % (len(done) + 10, done)
    answers, reply = fed(data, step, stream=True)
    assert (answers.over, answers.whole, reply.broken) == (True, False, None)
    answers.feed(1e9, b"0\r\n\r\n")
    assert (answers.whole, answers.keep_alive) == (True, True)


def test_a_model_may_write_the_word_done() -> None:
    """[DONE] inside a token, or in a plain answer, ends nothing."""
    text = b'data: {"content":"say data: [DONE]"}\n\n'
    assert not fed(CHUNKED + b"%x\r\n%b\r\n" % (len(text), text), 10_000, stream=True)[0].over
    line = b"\ndata: [DONE]\n\n"
    assert not fed(CHUNKED + b"%x\r\n%b\r\n" % (len(line), line), 10_000, stream=False)[0].over


@pytest.mark.parametrize(
    "data", [b"SSH-2.0-OpenSSH\r\n", CHUNKED + b"ZZ\r\n", b"HTTP/1.1 101 X\r\nupgrade: h2c\r\n\r\n"]
)
def test_bytes_that_are_no_http_are_malformed(data: bytes) -> None:
    """They end the request and the connection."""
    answers, reply = fed(data, 10_000)
    assert (answers.over, answers.keep_alive, reply.broken) == (True, False, Outcome.MALFORMED)


@pytest.mark.parametrize(
    ("data", "broken"),
    [
        (b"", Outcome.RESET),
        (b"HTTP/1.1 200", Outcome.RESET),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhi", Outcome.TRUNCATED),
        (CHUNKED + b"5\r\nhi", Outcome.TRUNCATED),
        (b"HTTP/1.1 200 OK\r\n\r\nhi", None),
    ],
)
def test_a_peer_that_closes_ends_only_what_has_no_length(data: bytes, broken: Outcome | None) -> None:
    """A body read to the close is whole when the peer closes; anything else lacks something."""
    assert fed(data, 10_000)[0].closed() is broken


def test_one_connection_answers_many_requests() -> None:
    """The next answer is read into the next reply."""
    answers = Answers()
    for word in (b"ab", b"cd"):
        reply = Reply()
        answers.expect(reply, False)
        answers.feed(1.0, b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n" + word)
        assert (body(reply), answers.keep_alive) == (word, True)


def test_bytes_that_nobody_asked_for_end_the_connection() -> None:
    """An idle connection that speaks cannot be trusted with the next request."""
    answers, _ = fed(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", 10_000)
    answers.feed(1.0, b"HTTP/1.1 408 Request Timeout\r\n\r\n")
    assert not answers.keep_alive


def test_chunks_that_wait_to_be_parsed_keep_their_own_moments() -> None:
    """A stream's middle is parsed when its end is in sight, and every piece is then dated as it came."""
    events = [b'data: {"n":%d}\n\n' % number for number in range(4)] + [b"data: [DONE]\n\n"]
    answers, reply = Answers(), Reply()
    answers.expect(reply, True)
    answers.feed(0.0, CHUNKED)
    for moment, event in enumerate(events, start=1):
        answers.feed(float(moment), b"%x\r\n%b\r\n" % (len(event), event))
    assert reply.pieces == [(float(moment), event) for moment, event in enumerate(events, start=1)]


CHUNK_FORMS = (b"%x\r\n%b\r\n", b"%X\r\n%b\r\n", b"0%x\r\n%b\r\n", b"%x;name=value\r\n%b\r\n")
TEXTS = st.sampled_from(
    [b"data: {}\n\n", b"data: a\r\n\r\n", b"\n\n", b": still here\n\n", b"data: [DO", b"x" * 5000, b"1\r\n"]
)


@given(
    chunks=st.lists(st.tuples(TEXTS, st.sampled_from(CHUNK_FORMS)), min_size=1, max_size=30),
    cuts=st.lists(st.integers(0, 40), max_size=12),
    ending=st.sampled_from([b"0\r\n\r\n", b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n", b"", b"zz\r\n", b"5\r\nhal"]),
)
def test_a_stream_is_the_same_however_its_chunks_arrive(
    chunks: list[tuple[bytes, bytes]], cuts: list[int], ending: bytes
) -> None:
    """Each chunk in a read of its own, several in one, or one in two: what is read is what single bytes give."""
    parts = [CHUNKED] + [form % (len(text), text) for text, form in chunks] + [ending]
    for cut in cuts:  # a part loses its beginning to the one before it, so that reads and chunks begin apart
        at = 1 + cut % len(chunks)
        parts[at - 1 : at + 1] = [parts[at - 1] + parts[at][: cut % 7], parts[at][cut % 7 :]]
    answers, reply = Answers(), Reply()
    answers.expect(reply, True)
    for moment, part in enumerate(parts):
        answers.feed(float(moment), part)
    answers.catch_up()
    truth, said = fed(b"".join(parts), 1, stream=True)
    truth.catch_up()
    assert (answers.over, answers.whole, answers.keep_alive) == (truth.over, truth.whole, truth.keep_alive)
    assert (reply.broken, reply.status) == (said.broken, said.status)
    assert body(reply).rstrip() == body(said).rstrip()  # blank lines after a [DONE] are read or not, by the cut


def test_a_read_that_only_looks_like_a_chunk_is_none() -> None:
    """The end of a size, and the begin of its chunk, can look like a smaller chunk that is whole."""
    text = b"data: {}\n\n\r\n" + b": fourteen\n\n\n\n"
    assert len(text) == 0x1A
    reads = [b"2\r\n\n\n\r\n1", b"a\r\n" + text[:12], text[12:] + b"\r\n", b"0\r\n\r\n"]
    answers, reply = fed(CHUNKED, 10_000, stream=True)
    for moment, read in enumerate(reads, start=1):
        answers.feed(float(moment), read)
    assert (body(reply), answers.whole, reply.broken) == (b"\n\n" + text, True, None)


def test_what_was_not_parsed_is_caught_up_with() -> None:
    """A stream that breaks off keeps the chunks that came, and bytes among them that are no HTTP are found."""
    event = b"data: {}\n\n"
    for size, broken in ((len(event), Outcome.OPEN), (1, Outcome.MALFORMED)):
        answers, reply = fed(CHUNKED, 10_000, stream=True)
        answers.feed(1.0, b"%x\r\n%b\r\n" % (size, event))
        answers.catch_up()
        assert (len(reply.pieces), reply.broken) == (1, broken)


@pytest.mark.parametrize("step", [1, 7, 10_000])
@pytest.mark.parametrize(
    "framing", [b"content-length: 1000\r\n", b"transfer-encoding: chunked\r\n", b"content-length: 0\r\n"]
)
def test_an_answer_to_head_ends_with_its_head(framing: bytes, step: int) -> None:
    """Whatever its headers say of a body, none comes, and the next answer is read as its own."""
    answers = Answers()
    for head, text in ((True, b""), (False, b"hi"), (True, b"")):
        reply = Reply()
        answers.expect(reply, stream=False, head=head)
        data = b"HTTP/1.1 103 Early\r\n\r\nHTTP/1.1 200 OK\r\n%b\r\n" % (framing if head else b"content-length: 2\r\n")
        for at in range(0, len(data + text), step):
            answers.feed(1.0, (data + text)[at : at + step])
        assert (answers.over, answers.whole, answers.keep_alive) == (True, True, True)
        assert (reply.status, body(reply), reply.broken) == (200, text, None)


def test_a_body_after_the_answer_to_head_ends_the_connection() -> None:
    """A server that sends one all the same cannot be trusted with the next request."""
    answers, reply = Answers(), Reply()
    answers.expect(reply, stream=False, head=True)
    answers.feed(1.0, b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n")
    answers.feed(1.0, b"hi")
    assert (answers.keep_alive, reply.broken) == (False, None)


@pytest.mark.parametrize("status", [204, 304])
def test_answers_without_a_body_by_their_status_end_with_their_head(status: int) -> None:
    """No length is needed to know it."""
    answers, reply = fed(b"HTTP/1.1 %d X\r\n\r\n" % status, 10_000)
    assert (answers.whole, answers.keep_alive, reply.status) == (True, True, status)


def test_a_request_whose_connection_is_wanted_waits_for_the_end_of_the_message() -> None:
    """Its [DONE] does not end it: the next of its group needs the connection."""
    answers, reply = Answers(), Reply()
    answers.expect(reply, stream=True, to_the_end=True)
    answers.feed(1.0, CHUNKED + b"e\r\ndata: [DONE]\n\n\r\n")
    assert not answers.over
    answers.feed(2.0, b"0\r\n\r\n")
    assert (answers.over, reply.broken, body(reply)) == (True, None, b"data: [DONE]\n\n")
