"""Simulated answers: seeded, as long as asked, and the tokens they claim to be."""

import pytest

from reference_stack.engine.answers import NATURAL_LENGTH, Envelope, answer
from reference_stack.engine.tokens import Tokens

WORDS = [" one", " two", " three"]


def test_same_prompt_and_seed_same_answer() -> None:
    """The answer is a function of seed and prompt: another of either gives another answer."""
    first = answer(0, [1, 2, 3], WORDS, 50, ignore_eos=True)
    assert answer(0, [1, 2, 3], WORDS, 50, ignore_eos=True) == first
    assert answer(1, [1, 2, 3], WORDS, 50, ignore_eos=True) != first
    assert answer(0, [1, 2, 4], WORDS, 50, ignore_eos=True) != first


@pytest.mark.parametrize("limit", [1, 16, 5000])
def test_ignore_eos_is_honoured(limit: int) -> None:
    """With ignore_eos an answer has exactly max_tokens tokens and ends by length."""
    answered = answer(0, [1], WORDS, limit, ignore_eos=True)
    assert (len(answered.pieces), answered.finish_reason) == (limit, "length")


def test_short_limit_ends_by_length() -> None:
    """An answer cut before it would stop ends by length."""
    answered = answer(0, [1], WORDS, NATURAL_LENGTH[0] - 1, ignore_eos=False)
    assert (len(answered.pieces), answered.finish_reason) == (NATURAL_LENGTH[0] - 1, "length")


def test_answer_stops_by_itself() -> None:
    """Given room, an answer stops at its own length, with a last token that has no text."""
    answered = answer(0, [1], WORDS, 5000, ignore_eos=False)
    assert NATURAL_LENGTH[0] <= len(answered.pieces) <= NATURAL_LENGTH[1]
    assert (answered.pieces[-1], answered.finish_reason) == ("", "stop")


def test_text_has_as_many_tokens_as_pieces(tokens: Tokens) -> None:
    """The text of an answer is counted by the tokenizer as the usage counts it."""
    answered = answer(7, [1], tokens.words, 40, ignore_eos=True)
    assert len(tokens.encode(answered.text, special=False)) == 40


def test_frames_keep_scripts_and_line_ends_apart() -> None:
    """A piece with a line end stays in one SSE line, and other scripts are sent as UTF-8, not escaped."""
    frame = Envelope("cmpl-1", 0, "tiny", chat=False, prompt_tokens=1).token("naïve\n\n一", None, None, False)
    assert frame.count(b"\n") == 2
    assert frame.endswith(b"}\n\n")
    assert "naïve\\n\\n一".encode() in frame
