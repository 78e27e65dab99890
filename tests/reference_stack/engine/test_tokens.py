"""Counting with the model's own tokenizer and template."""

import threading
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from reference_stack.engine.tokens import Tokens

CHAT = [{"role": "user", "content": "hello world"}]


def test_special_tokens_are_added_only_when_asked(tokens: Tokens) -> None:
    """A prompt begins with BOS; the same text without special tokens does not."""
    assert tokens.encode("hello") == [0, *tokens.encode("hello", special=False)]


def test_chat_without_template_is_role_lines(tokens: Tokens) -> None:
    """A tokenizer without a chat template gets one line per message and the beginning of the answer."""
    assert tokens.render(CHAT) == "user: hello world\nassistant:"


def test_template_of_the_model_is_used(tokens: Tokens) -> None:
    """The model's own template is rendered, with its special tokens by name."""
    template = "{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}{{ eos_token }}"
    own = replace(tokens, config={"bos_token": "<s>", "chat_template": template})
    assert own.render(CHAT) == "<s>[hello world]"


def test_template_cannot_reach_the_machine(tokens: Tokens) -> None:
    """A template is run in a sandbox: attributes that lead out of it are refused."""
    own = replace(tokens, config={"chat_template": "{{ messages.__class__.__mro__ }}"})
    with pytest.raises(Exception, match="unsafe"):
        own.render(CHAT)


def test_words_are_whole_tokens(tokens: Tokens) -> None:
    """Every word for answers is one token of its own when it follows another."""
    assert " hello" in tokens.words
    for word in tokens.words:
        assert len(tokens.encode(word, special=False)) == 1


def test_others_run_while_a_long_text_is_counted(tokens: Tokens) -> None:
    """A thread that counts leaves the interpreter to the others: no pause of theirs is nearly as long as the count."""
    counting = threading.Thread(target=tokens.encode, args=("hello world " * 200_000,))
    moments_s = [time.monotonic()]
    counting.start()
    while counting.is_alive():
        time.sleep(0.0005)  # how late it wakes is what is measured
        moments_s.append(time.monotonic())
    pauses_s = [later - one for one, later in pairwise(moments_s)]
    assert max(pauses_s) < (moments_s[-1] - moments_s[0]) / 2


def test_missing_tokenizer_is_named(tmp_path: Path) -> None:
    """A directory without a tokenizer is refused by its path."""
    with pytest.raises(FileNotFoundError, match=r"no tokenizer at .*tokenizer\.json"):
        Tokens.read(tmp_path)
