"""Prompts have exactly the tokens that the plan says, and do not begin alike."""

import json
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from harness.model import UsageError
from harness.traffic import corpus as corpora
from harness.traffic.corpus import Corpus


@pytest.fixture(scope="module")
def corpus(tokenizer_dir: Path) -> Corpus:
    return corpora.build(tokenizer_dir, seed=3, longest_tokens=32_768)


def text_of(corpus: Corpus, begin: int, end: int) -> str:
    text: str = json.loads(b'"' + corpus.text[begin:end] + b'"')
    return text


def test_spans_hold_exactly_the_tokens_they_say(corpus: Corpus, tokenizer: Tokenizer) -> None:
    """Random spans, from the last start too, counted again by the tokenizer: not one token of difference."""
    draw = random.Random(5)
    starts = [0, corpus.starts - 1, *(draw.randrange(corpus.starts) for _ in range(60))]
    for start in starts:
        wanted = draw.choice([1, 16, 300, 4000])
        begin, end, tokens = corpus.span(start, wanted)
        assert tokens == len(tokenizer.encode(text_of(corpus, begin, end), add_special_tokens=False))
        assert tokens <= wanted or " " not in text_of(corpus, begin, end)
    assert corpus.worst_difference == 0


def test_a_span_is_never_shorter_than_it_must_be(corpus: Corpus) -> None:
    """When whole words cannot make `tokens` exactly, the span stays below; at a class's lower end it goes above."""
    for start in range(500):
        assert 8 <= corpus.span(start, 17)[2] <= 17
        assert corpus.span(start, 17, at_least=17)[2] >= 17


def test_the_last_start_has_room_for_the_longest_prompt(corpus: Corpus) -> None:
    """Whatever the start, a prompt of the longest length is whole."""
    for start in (corpus.starts - 1, corpus.starts - 2, corpus.starts // 2):
        _, end, tokens = corpus.span(start, 32_768, at_least=32_768)
        assert tokens >= 32_768
        assert end <= len(corpus.text)


def test_spans_are_cut_between_words(corpus: Corpus) -> None:
    """A prompt neither begins nor ends inside a word or with white space."""
    words = set(corpora.WORDS.read_text(encoding="utf-8").split())
    for start in range(0, 200_000, 997):
        assert set(text_of(corpus, *corpus.span(start, 20)[:2]).split(" ")) <= words


def test_the_corpus_is_a_function_of_the_seed(tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same seed gives the same bytes, another seed other bytes."""
    monkeypatch.setattr(corpora, "DRAWN_WORDS", 1000)
    first, again, other = (corpora.build(tokenizer_dir, seed, 100).text for seed in (3, 3, 4))
    assert first == again != other


def test_own_text_is_escaped_and_counted(tmp_path: Path, tokenizer_dir: Path, tokenizer: Tokenizer) -> None:
    """The business's own prompts, with quotes, line ends and Chinese, become spans that are valid inside JSON."""
    path = tmp_path / "own.txt"
    path.write_text('Say "hello"\tto C:\\new\nand 总结这份合同,列出风险。 Thanks — ünïcode!\n' * 3, encoding="utf-8")
    corpus = corpora.build(tokenizer_dir, 1, 500, path)
    assert corpus.starts < 100
    for start in range(corpus.starts):
        begin, end, tokens = corpus.span(start, 40, at_least=40)
        assert tokens == len(tokenizer.encode(text_of(corpus, begin, end), add_special_tokens=False))


def test_what_is_missing_is_named(tmp_path: Path, tokenizer_dir: Path) -> None:
    """No tokenizer, one that is none, no text, an empty text: one sentence with the file."""
    with pytest.raises(UsageError, match=r"nowhere/tokenizer\.json"):
        corpora.build(tmp_path / "nowhere", 1, 100)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UsageError, match="is no tokenizer"):
        corpora.build(tmp_path, 1, 100)
    with pytest.raises(UsageError, match=r"prompts\.txt cannot be read"):
        corpora.build(tokenizer_dir, 1, 100, tmp_path / "prompts.txt")
    (tmp_path / "prompts.txt").write_text(" \n")
    with pytest.raises(UsageError, match="holds no words"):
        corpora.build(tokenizer_dir, 1, 100, tmp_path / "prompts.txt")
