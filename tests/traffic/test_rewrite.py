"""Captured bytes stay as they are, but for the host, the credentials, the model and the path."""

import json
from itertools import pairwise

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.model import Request
from harness.traffic.prompts import Composer
from harness.traffic.rewrite import Rewrites, model_of

OURS = Rewrites(
    host="127.0.0.1:8080",
    headers={"authorization": "Bearer ours", "x-tenant": "gate"},
    model=("captured-70b", "tiny"),
    paths={"/api": "/", "/api/v2": "/v1", "/a/": "/b/"},
)
BODY = '{"messages":[{"role":"user","content":"\\"model\\": {łódź}"}], "model" : "captured-70b","stream":true}'.encode()


def raw(body: bytes = BODY, *headers: bytes, line: bytes = b"POST /v1/chat/completions HTTP/1.1") -> bytes:
    framing = headers or (b"Content-Length: %d" % len(body),)
    return b"\r\n".join((line, b"Host: prod.example", *framing, b"", body))


def chunked(*pieces: bytes, trailer: bytes = b"") -> bytes:
    return b"".join(b"%X;a=b\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n" + trailer + b"\r\n"


def test_four_things_change_and_nothing_else() -> None:
    """Host, credentials, model with its Content-Length, path; order, case, blanks and other headers stay."""
    captured = (
        b"POST /api/v1/chat/completions?x=1 HTTP/1.1\r\nhOsT:prod.example:443 \r\nAUTHORIZATION:  Bearer ****\r\n"
        b"x-request-id: 7\r\nContent-Length:\t%d\r\nX-Odd:  a  b \r\n\r\n%b" % (len(BODY), BODY)
    )
    body = BODY.replace(b'"captured-70b"', b'"tiny"')
    assert OURS.apply(captured) == (
        b"POST /v1/chat/completions?x=1 HTTP/1.1\r\nhOsT:127.0.0.1:8080 \r\nAUTHORIZATION:  Bearer ours\r\n"
        b"x-request-id: 7\r\nContent-Length:\t%d\r\nX-Odd:  a  b \r\n\r\n%b" % (len(body), body)
    )


@pytest.mark.parametrize(
    ("captured", "sent"),
    [
        (b"/api/v1/models", b"/v1/models"),
        (b"/api/v2/models", b"/v1/models"),  # the longest beginning wins
        (b"/api?x", b"/?x"),
        (b"/api", b"/"),
        (b"/a/c", b"/b/c"),
        (b"/apix/models", b"/apix/models"),  # a beginning ends at a slash
        (b"/v1/api", b"/v1/api"),
    ],
)
def test_the_beginning_of_a_path_is_replaced(captured: bytes, sent: bytes) -> None:
    """Cut at a slash or at the query."""
    assert OURS.apply(b"GET %b HTTP/1.1\r\n\r\n" % captured) == b"GET %b HTTP/1.1\r\n\r\n" % sent


def test_no_header_is_added_and_a_refused_one_is_kept() -> None:
    """Who sent no key sends none again, and who was refused for a key does not get ours."""
    bare, masked = raw(b""), raw(b"", b"Content-Length: 0", b"Authorization: Bearer ****")
    assert b"ours" not in OURS.apply(bare)
    assert b"Bearer ours" in OURS.apply(masked)
    assert b"Bearer ****" in OURS.apply(masked, credentials=False)
    plain = Rewrites(host="h")
    assert plain.apply(masked) == masked.replace(b"prod.example", b"h")


@pytest.mark.parametrize("status", ["401", "403", "404"])
def test_the_composer_keeps_the_credentials_of_those_refused_for_them(status: str) -> None:
    """The plan's span is sent with the run's rewrites, and nothing is added to it."""
    captured = raw(BODY, b"Authorization: Bearer ****", b"Content-Length: %d" % len(BODY))
    rewrite = {"model": "captured-70b", "path": {}}
    composer = Composer(b"--" + captured, "tiny", "h:1", {"Authorization": "Bearer ours"}, rewrite=rewrite)
    one = Request(0, 0.0, "chat", text=(2, 2 + len(captured)), raw=True, expect=(status,))
    wire = composer.wire(one)
    assert (b"Bearer ours" in wire) == (status == "404")
    assert b"x-request-id" not in wire
    assert model_of(wire) == "tiny"


LEFT = {
    "another model": raw(BODY.replace(b"captured-70b", b"no-such-model")),
    "bad JSON": raw(BODY[:-1]),
    "a length that is wrong": raw(BODY, b"Content-Length: 7"),
    "a truncated body": raw(BODY[:40], b"Content-Length: %d" % len(BODY)),
    "two lengths": raw(BODY, *2 * (b"Content-Length: %d" % len(BODY),)),
    "length and chunks": raw(BODY, b"Content-Length: %d" % len(BODY), b"Transfer-Encoding: chunked"),
    "a blank before the colon": raw(BODY, b"Content-Length : %d" % len(BODY)),
    "broken chunks": raw(chunked(BODY)[:-1] + b"x", b"Transfer-Encoding: chunked"),
    "a chunk size that lies": raw(chunked(BODY).replace(b";", b"0;", 1), b"Transfer-Encoding: chunked"),
    "bytes after the last chunk": raw(chunked(BODY) + b"GET / HTTP/1.1\r\n\r\n", b"Transfer-Encoding: chunked"),
    "another coding": raw(chunked(BODY), b"Transfer-Encoding: gzip, chunked"),
    "a nested name": raw(b'{"x":{"model":"captured-70b"}}'),
    "no object": raw(b'["model","captured-70b"]'),
    "bytes that are no text": raw(b'{"model":"captured-70b","x":"\xff"}'),
    "no body": raw(b""),
}


@pytest.mark.parametrize("captured", LEFT.values(), ids=LEFT.keys())
def test_what_is_not_found_beyond_doubt_stays_to_the_byte(captured: bytes) -> None:
    """But for the host, which stands in a line of its own."""
    assert OURS.apply(captured) == captured.replace(b"prod.example", b"127.0.0.1:8080")


MALFORMED = {
    "folded": b"GET / HTTP/1.1\r\nHost: prod.example\r\n folded\r\nAuthorization: a\r\n\tb\r\n\r\n",
    "two hosts in one": b"GET / HTTP/1.1\r\nHost: a b\r\n\r\n",
    "no host": b"GET / HTTP/1.1\r\nHost:\r\n\r\n",
    "no head": b"\x16\x03\x01\x00\xff",
    "cut inside a header": b"GET / HTTP/1.1\r\nHost: prod.exa",
    "no version": b"GET /api/x\r\n\r\n",
    "nothing": b"",
}


@pytest.mark.parametrize("captured", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_head_stays_to_the_byte(captured: bytes) -> None:
    """Folded and empty headers, hosts that are none, what is no request at all."""
    assert OURS.apply(captured) == captured


def test_lines_that_end_in_a_bare_newline_keep_it() -> None:
    """Some clients send them, and some servers refuse them: the body still begins after the empty line."""
    captured = b"POST / HTTP/1.1\nHost: prod.example\nContent-Length: %d\n\n%b" % (len(BODY), BODY)
    sent = OURS.apply(captured)
    assert sent.startswith(b"POST / HTTP/1.1\nHost: 127.0.0.1:8080\nContent-Length: %d\n\n" % (len(BODY) - 8))
    assert model_of(sent) == "tiny"


@given(st.lists(st.integers(1, len(BODY) - 1), max_size=6), st.sampled_from([b"", b"X-Sum: 1\r\n"]))
def test_a_chunked_body_keeps_its_chunks(cuts: list[int], trailer: bytes) -> None:
    """Wherever the name is cut: the body says the new model, and chunks without it keep every byte."""
    bounds = [0, *sorted(set(cuts)), len(BODY)]
    pieces = [BODY[low:high] for low, high in pairwise(bounds)]
    sent = OURS.apply(raw(chunked(*pieces, trailer=trailer), b"Transfer-Encoding: chunked"))
    assert model_of(sent) == "tiny"
    body = sent.partition(b"\r\n\r\n")[2]
    assert body.endswith(b"0\r\n" + trailer + b"\r\n")
    begin = BODY.index(b'"captured')
    for piece, low in zip(pieces, bounds, strict=False):
        if low + len(piece) <= begin or low >= begin + len(b'"captured-70b"'):
            assert chunked(piece)[: -len(b"0\r\n\r\n")] in body


def test_a_name_that_stands_elsewhere_too_is_found_where_it_counts() -> None:
    """In a prompt, in a nested member, after another one's end: the outermost member is meant."""
    body = b'{"a":{"model":"captured-70b"},"b":"\\"model","c":["model"],"model":"captured-70b","model2":"captured-70b"}'
    assert OURS.apply(raw(body)).endswith(b'"c":["model"],"model":"tiny","model2":"captured-70b"}')


@given(st.binary(max_size=200), st.sampled_from([b"", b"Content-Length: 3", b"Transfer-Encoding: chunked"]))
def test_any_bytes_pass_through(body: bytes, framing: bytes) -> None:
    """What has nothing to rewrite comes out as it went in, whatever it is."""
    captured = b"\r\n".join((b"PUT /x HTTP/1.1", framing, b"", body)) if framing else body
    if b"captured-70b" not in captured and b"ost" not in captured.lower():
        assert OURS.apply(captured) == captured


@given(st.dictionaries(st.text(max_size=8), st.recursive(st.text() | st.none(), st.lists, max_leaves=5), max_size=5))
def test_only_the_value_of_the_model_changes_in_json(members: dict[str, object]) -> None:
    """Whatever stands around it, escaped or nested."""
    body = json.dumps({**members, "model": "captured-70b"}).encode()
    sent = OURS.apply(raw(body)).partition(b"\r\n\r\n")[2]
    assert orjson.loads(sent) == {**orjson.loads(body), "model": "tiny"}
    assert len(sent) == len(body) - len(b"captured-70b") + len(b"tiny")
