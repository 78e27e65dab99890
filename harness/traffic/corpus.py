"""The text that all prompts of a run are cut from, with the exact token count of every cut.

Prompts are spans of one corpus, escaped for JSON once, so that a plan line names a 120 kB prompt by two numbers and
sending it is one slice. Spans are cut between words, where token counts add up; that they do with this tokenizer is
checked on samples, and the worst difference is part of the plan's facts. Chat templates and special tokens are the
server's business and are not counted here.
"""

import json
import math
import random
import re
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, count, cycle
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from harness.model import UsageError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

WORDS = Path(__file__).with_name("words.txt")
DRAWN_WORDS = 200_000  # as many prompts as this begin differently: no prefix cache helps by accident
_PIECE = re.compile(r"\s*[^\s,。!?;:、]+[,。!?;:、]*|\s*[,。!?;:、]+")  # a word with the space before it
_CHECKS = 16


@dataclass(frozen=True)
class Corpus:
    """`text` is UTF-8, escaped for JSON. Piece k is a word; prompts may start at any of the first `starts` pieces.

    `begins[k] : ends[k]` is the word in `text`; `before[k]` counts the tokens of all pieces before it, and `alone[k]`
    its own when nothing stands before it. The head of the text is repeated at its end, so that every start has room.
    """

    text: bytes
    starts: int
    begins: Sequence[int]
    ends: Sequence[int]
    before: Sequence[int]
    alone: Sequence[int]
    worst_difference: int = 0

    def places(self, rng: random.Random) -> Iterator[int]:
        """Pieces for prompts to start at, for ever: far apart, and none again before all had their turn."""
        stride = next(n for n in count(int(self.starts * 0.618)) if math.gcd(n, self.starts) == 1)
        first = rng.randrange(self.starts)
        return ((first + k * stride) % self.starts for k in count())

    def span(self, start: int, tokens: int, at_least: int = 1, joined: bool = False) -> tuple[int, int, int]:
        """(begin, end, exact tokens) of a prompt from piece `start`: as many whole words as `tokens` hold, but enough
        for `at_least`. One that is `joined` goes on behind another, and has the space before its first word."""
        base = self.before[start] if joined else self.before[start + 1] - self.alone[start]
        stop = max(bisect_right(self.before, base + tokens, start + 1) - 1, start + 1)
        if self.before[stop] - base < at_least:
            stop += 1
        begin = (self.ends[start - 1] if start else 0) if joined else self.begins[start]
        return begin, self.ends[stop - 1], self.before[stop] - base


def build(tokenizer_dir: Path, seed: int, longest_tokens: int, own_text: Path | None = None) -> Corpus:
    """A corpus of words drawn with Zipf's frequencies, or of the business's own text; any start has `longest_tokens`.

    Raises UsageError when the tokenizer or the text is missing.
    """
    measure = tokenizer(tokenizer_dir)
    pieces = _pieces_of(own_text) if own_text else _drawn(random.Random(f"{seed}/corpus"))
    words = _measured(measure, sorted(set(pieces)))
    corpus = _assembled([words[piece] for piece in pieces], longest_tokens)
    return replace(corpus, worst_difference=_worst_difference(corpus, measure, longest_tokens))


def tokenizer(directory: Path) -> "Tokenizer":
    """The tokenizer of a model's directory. Raises UsageError when there is none."""
    from tokenizers import Tokenizer

    path = directory / "tokenizer.json"
    if not path.exists():
        raise UsageError(f"there is no {path}: lengths are measured with the model's own tokenizer")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise UsageError(f"{path} is no tokenizer: {error}") from None


def _drawn(draw: random.Random) -> list[str]:
    words = WORDS.read_text(encoding="utf-8").split()
    ranked = draw.sample(words, len(words))
    weights = [1 / rank for rank in range(1, len(ranked) + 1)]
    return [f" {word}" for word in draw.choices(ranked, cum_weights=list(accumulate(weights)), k=DRAWN_WORDS)]


def _pieces_of(path: Path) -> list[str]:
    try:
        pieces = _PIECE.findall(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the prompts' text {path} cannot be read: {error}") from None
    if not pieces:
        raise UsageError(f"the prompts' text {path} holds no words")
    return pieces


class _Word(NamedTuple):
    escaped: bytes
    indent: int  # bytes of white space before it
    inside: int  # tokens, with something before it
    alone: int  # tokens, with nothing before it


def _measured(tokenizer: "Tokenizer", pieces: Sequence[str]) -> dict[str, _Word]:
    def counts(texts: Iterable[str]) -> list[int]:
        return [len(encoding) for encoding in tokenizer.encode_batch(list(texts), add_special_tokens=False)]

    before = "."  # tokenizers may treat the start of a text in their own way: measure behind something
    (lead,) = counts([before])
    inside, alone = counts(before + piece for piece in pieces), counts(piece.lstrip() for piece in pieces)
    return {
        piece: _Word(escaped := _escaped(piece), len(escaped) - len(_escaped(piece.lstrip())), within - lead, first)
        for piece, within, first in zip(pieces, inside, alone, strict=True)
    }


def _escaped(text: str) -> bytes:
    return json.dumps(text, ensure_ascii=False)[1:-1].encode()


def _assembled(words: Sequence[_Word], longest_tokens: int) -> Corpus:
    text, begins, ends = bytearray(), array("Q"), array("Q")
    before, alone = array("Q", [0]), array("Q")
    enough = sum(word.inside for word in words) + longest_tokens
    for word in cycle(words):
        begins.append(len(text) + word.indent)
        text += word.escaped
        ends.append(len(text))
        before.append(before[-1] + word.inside)
        alone.append(word.alone)
        # The last starts must hold the longest prompt and one word more.
        if len(begins) > len(words) + 1 and before[-1] > enough + word.inside:
            break
    return Corpus(bytes(text), len(words), begins, ends, before, alone)


def _worst_difference(corpus: Corpus, tokenizer: "Tokenizer", longest_tokens: int) -> int:
    """The largest difference, in tokens, between what `span` says and what the tokenizer counts, over some spans."""
    worst = 0
    for check in range(_CHECKS):
        start, tokens = check * corpus.starts // _CHECKS, min(longest_tokens, 1 << check)
        begin, end, claimed = corpus.span(start, tokens)
        text = json.loads(b'"%b"' % corpus.text[begin:end])
        worst = max(worst, abs(claimed - len(tokenizer.encode(text, add_special_tokens=False))))
    return worst
