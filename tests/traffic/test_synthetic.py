"""Prompts are replaced by made-up ones: as long in tokens, alike where they were alike, and nothing of them is left."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from harness.model import UsageError
from harness.traffic.capture.scrub import Unscrubbable
from harness.traffic.recording import Answered, Recorded
from harness.traffic.synthetic import Synthetic, masked_text

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\n"
SECRET = 'The patient Jane Roe called about her diagnosis; Ärzte sagten: 她病了 "quoted"\n\tand (more) 12345.'


@pytest.fixture(scope="module")
def made_up(tokenizer_dir: Path) -> Synthetic:
    return Synthetic(b"salt", tokenizer_dir)


def one(raw: bytes) -> Recorded:
    return Recorded(0.0, 0, 0, "POST", "/v1/chat/completions", raw, Answered())


def posted(body: bytes) -> bytes:
    return HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)


def body_of(made_up: Synthetic, asked: Any) -> Any:
    """What becomes of a body; its length is told right."""
    raw = made_up.recorded(one(posted(json.dumps(asked).encode())))[0].raw
    head, _, body = raw.partition(b"\r\n\r\n")
    assert head.endswith(b"Content-Length: %d" % len(body))
    return json.loads(body)


def strings(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for each in value.values() for text in strings(each)]
    if isinstance(value, list):
        return [text for each in value for text in strings(each)]
    return [value] if isinstance(value, str) else []


def words(text: str) -> set[str]:
    return set(re.findall(r"\w{4,}", text.lower()))


ASKED = {
    "model": "tiny",
    "messages": [
        {"role": "system", "content": SECRET},
        {"role": "user", "name": "Roberta", "content": [{"type": "text", "text": SECRET[4:]}]},
        {
            "role": "assistant",
            "tool_calls": [
                {
                    "id": "call_secret",
                    "type": "function",
                    "function": {"name": "lookup_patient", "arguments": '{"who": "Jane Roe"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_secret", "content": "diagnosis found"},
    ],
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "lookup_patient",
                "description": "Finds a patient in the hospital",
                "parameters": {
                    "type": "object",
                    "properties": {"who": {"type": "string", "enum": ["inpatient", "outpatient"]}},
                    "required": ["who"],
                },
            },
        }
    ],
    "max_tokens": 7,
    "temperature": 0.5,
    "stream": True,
    "stop": ["Patient:"],
    "metadata": {"clinic": "Northwest"},
}


def test_no_word_of_four_letters_is_left(made_up: Synthetic) -> None:
    """But for the model, names of the protocol, and members that a schema requires by their names."""
    told = body_of(made_up, ASKED)
    said = {word for text in strings(ASKED) for word in words(text)}
    left = {word for text in strings(told) for word in words(text)}
    assert left & said == {"tiny", "system", "user", "text", "assistant", "function", "tool", "object", "string"}
    assert {**told, "messages": 0, "tools": 0, "stop": 0, "metadata": 0} == {
        **ASKED, "messages": 0, "tools": 0, "stop": 0, "metadata": 0
    }  # fmt: skip
    assert told["tools"][0]["function"]["parameters"]["required"] == ["who"]


def test_what_names_another_thing_still_does(made_up: Synthetic) -> None:
    """A call of a tool and its answer; a tool and its calls; the JSON of its arguments stays JSON."""
    told = body_of(made_up, ASKED)
    call = told["messages"][2]["tool_calls"][0]
    assert call["id"] == told["messages"][3]["tool_call_id"]
    assert call["function"]["name"] == told["tools"][0]["function"]["name"]
    assert set(json.loads(call["function"]["arguments"])) == {"who"}


@given(st.text(max_size=200), st.text(max_size=50), st.text(max_size=50))
def test_lengths_and_beginnings_are_kept(
    made_up: Synthetic, tokenizer: Tokenizer, before: str, first: str, second: str
) -> None:
    """Exactly as many tokens; what begins with the same k tokens begins with the same k, and no more is alike."""
    texts = [before + first, before + second]
    olds = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    news = [tokenizer.encode(made_up.text(text), add_special_tokens=False).ids for text in texts]
    assert [len(ids) for ids in olds] == [len(ids) for ids in news]
    same = next((k for k, (a, b) in enumerate(zip(*olds, strict=False)) if a != b), min(map(len, olds)))
    assert news[0][:same] == news[1][:same]


def test_what_differs_goes_on_differently(made_up: Synthetic, tokenizer: Tokenizer) -> None:
    """One other word at the beginning, and hardly a later token is the same."""
    rest = " and this goes on for quite some time, long enough to tell" * 5
    first, second = made_up.text("Hello" + rest).split(), made_up.text("Goodbye" + rest).split()
    shared = sum(a == b for a, b in zip(first, second, strict=False))
    assert shared < len(first) / 4


def test_prompts_of_tokens_are_replaced_too(made_up: Synthetic, tokenizer: Tokenizer) -> None:
    """They can be read by anybody who has the tokenizer."""
    ids = tokenizer.encode(SECRET, add_special_tokens=False).ids
    told = body_of(made_up, {"model": "m", "prompt": ids, "logprobs": [1, 2]})
    assert (len(told["prompt"]), told["logprobs"]) == (len(ids), [1, 2])
    assert words(tokenizer.decode(told["prompt"])) == set()
    other = body_of(made_up, {"input": [SECRET, "alike"], "prompt": [ids]})
    assert len(other["prompt"][0]) == len(ids)
    assert other["input"][0] == made_up.text(SECRET)


def test_another_key_gives_other_words(made_up: Synthetic, tokenizer_dir: Path) -> None:
    """And the same key the same, in another import too."""
    assert Synthetic(b"other", tokenizer_dir).text(SECRET) != made_up.text(SECRET)
    assert Synthetic(b"salt", tokenizer_dir).text(SECRET) == made_up.text(SECRET)


def test_chunked_bodies_stay_chunked(made_up: Synthetic) -> None:
    """In one chunk, whose size is right."""
    body = json.dumps({"prompt": SECRET}).encode()
    framed = b"%x\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (9, body[:9], len(body) - 9, body[9:])
    raw = made_up.recorded(one(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + framed))[0].raw
    size, _, rest = raw.partition(b"\r\n\r\n")[2].partition(b"\r\n")
    content, end = rest[: int(size, 16)], rest[int(size, 16) :]
    assert (json.loads(content)["prompt"], end) == (made_up.text(SECRET), b"\r\n0\r\n\r\n")


BAD = b'{"model":"m","messages":[{"role":"user","content":"Jane \\"Roe\\" \\u00e4\\n diagn\xc3\xb6sis 4711"}]'
BROKEN = [
    posted(BAD),
    HEAD + b"Content-Length: 999\r\n\r\n" + BAD,
    HEAD + b"Content-Length: 9\r\nContent-Length: 9\r\n\r\n" + BAD + b"}",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(BAD), BAD),
    HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" + BAD,
    HEAD + b"\r\n" + BAD + b"}",
    posted(BAD + b"\xff"),
    posted(b"Jane Roe, diagnosis: plain text"),
    posted(b"[" * 300 + b'"Jane"' + b"]" * 300),
    posted(b"[" * 900 + b'"Jane"' + b"]" * 900),
]


@pytest.mark.parametrize("raw", BROKEN)
def test_what_is_broken_keeps_its_length_and_its_structure(made_up: Synthetic, raw: bytes) -> None:
    """No letter and no digit of the body is left, and it is broken in the same way."""
    told, counts = made_up.recorded(one(raw))
    assert (len(told.raw), counts["bodies masked"]) == (len(raw), 1)
    head, _, body = told.raw.partition(b"\r\n\r\n")
    assert head == raw.partition(b"\r\n\r\n")[0]
    assert not re.search(rb"(?i)jane|roe|diagn|4711|role|sis", body)
    assert re.sub(rb"[^{}\[\]:,]", b"", body) == re.sub(rb"[^{}\[\]:,]", b"", raw.partition(b"\r\n\r\n")[2])


@pytest.mark.parametrize("raw", BROKEN)
def test_wherever_a_request_ends_nothing_leaks(made_up: Synthetic, raw: bytes) -> None:
    """A capture may cut it anywhere, or begin anywhere in it."""
    for cut in range(0, len(raw), 3):
        for part in (raw[:cut], raw[cut:]):
            told = made_up.recorded(one(part))[0]
            assert not re.search(rb"Jane|Roe|diagn|4711", told.raw + told.path.encode())


@given(st.binary(max_size=60), st.sampled_from([b"", posted(b'{"a":"b"}'), BROKEN[3], BROKEN[4]]))
def test_any_bytes_can_be_taken(made_up: Synthetic, after: bytes, before: bytes) -> None:
    """None is too broken; what has no request line comes back masked."""
    told = made_up.recorded(one(before + after))[0]
    assert told.raw.startswith(b"POST /v1/chat/completions HTTP/1.1\r\n" if before else masked_text(after))


@pytest.mark.parametrize(
    "raw", [b"Jane Roe called\r\n\r\nand more", HEAD + b'{"prompt":"Jane Roe called"}', b'{"a":"Jane"}']
)
def test_what_is_no_request_is_masked_whole(made_up: Synthetic, raw: bytes) -> None:
    """Any part of it may be a prompt."""
    told, counts = made_up.recorded(one(raw))
    assert (len(told.raw), told.method, told.path, counts["requests masked"]) == (len(raw), "", "", 1)
    assert b"Jane" not in told.raw


@given(st.binary(max_size=80))
def test_masked_text_has_no_sign_of_the_original(text: bytes) -> None:
    """It is as long, and no UTF-8 only where it was none."""
    masked = masked_text(text)
    assert len(masked) == len(text)
    assert set(re.findall(rb"[A-Za-z0-9]", re.sub(rb"\\.(0078)?", b"", masked))) <= {b"x"}
    assert is_utf8(masked) == is_utf8(text)


def is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_requests_without_a_body_stay(made_up: Synthetic) -> None:
    """And so do those of a source without bytes."""
    for raw in (b"GET /v1/models HTTP/1.1\r\nHost: h\r\n\r\n", b""):
        assert made_up.recorded(one(raw))[0].raw == raw


def test_what_is_packed_is_refused(made_up: Synthetic) -> None:
    """Nobody can see what is in it."""
    with pytest.raises(Unscrubbable, match="compressed"):
        made_up.recorded(one(HEAD + b"Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\n\x1f\x8b\x08\x00"))


def test_a_tokenizer_that_cannot_be_used(tmp_path: Path) -> None:
    """There is none, or it has no short words."""
    with pytest.raises(UsageError, match=r"there is no .*tokenizer\.json"):
        Synthetic(b"", tmp_path)
    Tokenizer(models.WordLevel({"hello": 0, "x": 1}, unk_token="x")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UsageError, match="too few short words"):
        Synthetic(b"", tmp_path)
