"""What an answer may not say does not leave, however it is cut (ORC-4)."""

import orjson
from hypothesis import given
from hypothesis import strategies as st

from reference_stack.orchestrator.guardrail import Guardrail, blocked_answer, closing, whole_text

PHRASES = ("top secret", "aab")


def event(text: str) -> bytes:
    return b"data: " + orjson.dumps({"id": "c", "choices": [{"index": 0, "delta": {"content": text}}]}) + b"\n\n"


def told(events: list[bytes]) -> str:
    return "".join(orjson.loads(one[6:])["choices"][0]["delta"]["content"] for one in events)


def played(pieces: list[str]) -> tuple[str, bool]:
    guard = Guardrail(PHRASES)
    sent = [one for piece in pieces for one in guard.pass_on(event(piece))]
    return told(sent + guard.rest()), guard.blocked


@given(st.lists(st.sampled_from(["a", "b", "top ", "SEC", "ret", "top secre", "x", "", "ß", "İ"]), max_size=30))
def test_any_cut(pieces: list[str]) -> None:
    """A stream is blocked exactly when its whole text says a phrase; else it arrives whole; no phrase ever leaves."""
    text, blocked = played(pieces)
    assert blocked == Guardrail(PHRASES).breaks("".join(pieces))
    assert blocked or text == "".join(pieces)
    assert not Guardrail(PHRASES).breaks(text)


@given(st.text(alphabet="abx", max_size=20))
def test_nothing_of_a_phrase_leaves(before: str) -> None:
    """What leaves of a blocked answer ends before the phrase begins."""
    text, blocked = played([*before, *"top secret", "z"])
    assert blocked
    assert before.startswith(text)


def test_long_streams_flow() -> None:
    """Events leave while the stream goes on; no more are held than a phrase is long."""
    guard = Guardrail(PHRASES)
    left = sum(len(guard.pass_on(event("x"))) for _ in range(100))
    assert left == 100 - (len("top secret") - 1)


def test_closing_and_whole() -> None:
    """A blocked answer ends with the reason content_filter, streamed or whole."""
    document = orjson.loads(closing(event("x"))[6:])
    assert (document["id"], document["choices"][0]["finish_reason"]) == ("c", "content_filter")
    whole = {"id": "c", "choices": [{"index": 0, "message": {"role": "assistant", "content": "Top Secret"}}]}
    assert Guardrail(PHRASES).breaks(whole_text(whole))
    blocked = blocked_answer(whole)["choices"][0]
    assert (blocked["message"]["content"], blocked["finish_reason"]) == ("", "content_filter")
