"""Counting: sound without tokenising, exact when it matters."""

import functools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from reference_stack.gateway.tokens import CHARS_PER_TOKEN, Tokens, TooManyTokensError


@functools.cache
def exactly(tokenizer: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tokenizer / "tokenizer.json"))


def fits(tokens: Tokens, text: str, limit: int) -> bool:
    try:
        tokens.check_texts([text], limit)
    except TooManyTokensError:
        return False
    return True


@given(text=st.text(max_size=60), limit=st.integers(1, 80))
def test_verdict_is_the_exact_count(tokens: Tokens, tokenizer: Path, text: str, limit: int) -> None:
    """Whether it was counted or not, a text passes exactly when its tokens, <s> included, are within the limit."""
    exact = len(exactly(tokenizer).encode(text).ids)
    if len(text) <= CHARS_PER_TOKEN * limit:
        assert fits(tokens, text, limit) == (exact <= limit)


def test_special_tokens_count(tokens: Tokens, tokenizer: Path) -> None:
    """A text of exactly the limit without its <s> is one token too long."""
    bare = len(exactly(tokenizer).encode("hello world", add_special_tokens=False))
    assert not fits(tokens, "hello world", bare)
    assert fits(tokens, "hello world", bare + 1)


def test_hopeless_text_is_not_counted(tokens: Tokens) -> None:
    """More than fifteen characters per token of the limit are refused by their number alone."""
    with pytest.raises(TooManyTokensError, match="151 characters"):
        tokens.check_texts(["hello worl" * 15 + "d"], 10)


def test_list_is_bounded_as_a_whole(tokens: Tokens) -> None:
    """A thousand texts that would each pass may not together cost what no single one may."""
    with pytest.raises(TooManyTokensError, match="5000 characters"):
        tokens.check_texts(["hello"] * 1000, 10)


def test_chat_counts_what_the_template_adds(tokens: Tokens) -> None:
    """Messages are counted as rendered: role, separators and <s> included."""
    messages = [{"role": "user", "content": "hello"}] * 4
    with pytest.raises(TooManyTokensError):
        tokens.check_chat(messages, None, 12)
    tokens.check_chat(messages, None, 60)


def test_chat_content_in_parts(tokens: Tokens) -> None:
    """Text parts count like one text; null content counts nothing."""
    parts = [{"type": "text", "text": "again " * 20}, {"type": "image_url", "image_url": {}}, "odd"]
    with pytest.raises(TooManyTokensError):
        tokens.check_chat([{"role": "user", "content": parts}], None, 12)
    tokens.check_chat([{"role": "assistant", "content": None}, {}], None, 40)


def test_template_that_fails_still_bounds(tokenizer: Path, tmp_path: Path) -> None:
    """A template that rejects the messages leaves the bare texts to be counted."""
    (tmp_path / "tokenizer.json").write_bytes((tokenizer / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    refusing = Tokens(tmp_path)
    refusing.check_chat([{"role": "user", "content": "hello"}], None, 40)
    with pytest.raises(TooManyTokensError):
        refusing.check_chat([{"role": "user", "content": "xyz " * 30}], None, 40)
