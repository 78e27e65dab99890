"""Events that are not parsed, since they differ from one that was in their text alone, say what parsing them says."""

from dataclasses import asdict

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.answers import Answer, read_stream

KEYS = (b"content", b"text", b"reasoning_content")
TEXTS = (
    b" a",
    b"",
    b'\\"',
    b"\\n",
    b"\\\\",
    b"\\u0041",
    b"\\x",
    b"\\",
    b'"',
    b"\xc3\xa9",
    b"\xff",
    b"\xed\xa0\x80",
    b"\t",
    b'x","content":"',
    b'","finish_reason":"stop',
    b'"},"usage":{"prompt_tokens":1},"b":{"c":"',
    b"a\n\ndata: b",
)
LAYOUTS = (
    b'{"id":"a","choices":[{"index":0,"delta":{"KEY":"TEXT"},"finish_reason":null}]}',
    b'{"choices":[{"delta":{"content":"","KEY":"TEXT"}}],"usage":null}',
    b'{"choices":[{"delta":{"KEY":"TEXT","content":""}}]}',
    b'{"choices":[{"delta":{"KEY":"TEXT"}}],"error":""}',
    b'{"choices":[{"KEY": "TEXT","finish_reason":"stop"}]}',
    b'{"choices":[{"delta":{"foo\\"KEY":"TEXT","tool_calls":[1]}}]}',
    b'{"choices":[{"delta":{"content":"x"}}],"usage":{"completion_tokens":1,"KEY":"TEXT"}}',
    b'{"error":{"KEY":"TEXT"},"choices":[{"delta":{"content":"x"}}]}',
    b'{"choices":[{"delta":{"KEY":"TEXT"}}],"error":12}',
    b'{"KEY":"TEXT","type":"other"}',
    b'{"type":"response.output_text.delta","delta":"TEXT"}',
    b"[DONE]",
)
RAW_TEXTS = st.lists(st.sampled_from(TEXTS), max_size=3).map(b"".join) | st.text(max_size=3).map(
    lambda text: text.encode(errors="replace")
)


@st.composite
def streams(draw: st.DrawFn) -> list[bytes]:
    """Events of two layouts, so that most have another of their own before them."""
    layouts = draw(st.lists(st.sampled_from(LAYOUTS), min_size=1, max_size=2))
    key, texts = draw(st.sampled_from(KEYS)), draw(st.lists(RAW_TEXTS, min_size=1, max_size=8))
    first = [b"a", b"b", *texts]
    return [draw(st.sampled_from(layouts)).replace(b"KEY", key).replace(b"TEXT", text) for text in first]


def told(answer: Answer) -> dict[str, object]:
    value = asdict(answer)
    return value | {"done_s": answer.done_s if answer.done else None}


@given(streams(), st.sampled_from([b"\n", b"\r\n"]))
def test_a_stream_says_the_same_an_event_a_piece_or_cut_in_two(events: list[bytes], line_end: bytes) -> None:
    """An event that comes in two pieces is always parsed; one that comes whole may be known by its twin."""
    wholes = [b"data: " + event + 2 * line_end for event in events]
    whole = read_stream([(float(k), piece) for k, piece in enumerate(wholes)], 99.0, set())
    halves = [(float(k), part) for k, piece in enumerate(wholes) for part in (piece[:9], piece[9:])]
    assert told(whole) == told(read_stream(halves, 99.0, set()))


@pytest.mark.parametrize("text", [b"\\", b"\xff", b"\xed\xa0\x80", b"\xc0\xaf", b"\x01", b"\\x"])
def test_what_is_no_text_is_malformed_beside_a_twin(text: bytes) -> None:
    """Alike before and behind is not enough."""
    pieces = [(float(k), b'data: {"choices":[{"text":"%b"}]}\n\n' % each) for k, each in enumerate((b"a", b"b", text))]
    answer = read_stream(pieces)
    assert (answer.content_s, answer.malformed) == ([0.0, 1.0], True)


def test_twins_are_told_with_their_own_moments() -> None:
    """Each brings its token when it comes."""
    pieces = [(float(k), b"data: " + orjson.dumps({"choices": [{"text": "w" * (k + 1)}]}) + b"\n\n") for k in range(5)]
    assert read_stream(pieces, shape=set()).content_s == [0.0, 1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize(
    ("known", "other", "contents"),
    [
        (b'{"choices":[{"text":"a"}],"error":""}', b'{"choices":[{"text":"b"}],"error":12}', 2),
        (b'{"text":"a","type":"other"}', b'{"text":"b","type":"other"}', 0),
        (b'{"choices":[{"text":"a"}],"usage":{"n":1}}', b'{"choices":[{"text":"b"}],"usage":{"n":2}}', 3),
    ],
)
def test_an_event_is_a_twin_only_of_one_that_brought_content_alone(known: bytes, other: bytes, contents: int) -> None:
    """Alike before the text is not enough either, and neither is an event that said nothing or more."""
    pieces = [(float(k), b"data: " + each + b"\n\n") for k, each in enumerate((known, known, other))]
    answer = read_stream(pieces)
    assert len(answer.content_s) == contents
    assert (answer.error, answer.usage) == (b'"error":12' in other, {"n": 2} if b"usage" in other else None)
