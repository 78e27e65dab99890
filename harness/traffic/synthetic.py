"""Prompts -> made-up ones of as many tokens, before anything is written.

A prompt's token k is replaced by a word that a keyed hash draws from the tokens 1 .. k of the original. So two prompts
that begin with the same k tokens begin with the same k words, and a prefix cache works as hard as it did; the key is
thrown away, and nobody can try texts against the words. All words have three letters at most: a longer one in a
recording is a leak that anybody can see.

Every string of a JSON body is text unless it is known to be none: a name of the protocol, the model, an identifier.
Names of members stay, and so do numbers; the body is written anew without needless spaces. A body that is no JSON, or
is not what its framing says, keeps its length and its structure and loses its letters and digits, and so does all of
what has no request line; what is compressed cannot be read and is refused.
"""

import hmac
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from harness.model import UsageError
from harness.traffic import corpus
from harness.traffic.capture import scrub
from harness.traffic.capture.framing import starts_request
from harness.traffic.recording import Recorded
from harness.traffic.rewrite import with_content

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_PROTOCOL = frozenset((
    "system", "developer", "user", "assistant", "tool", "function", "text", "input_text", "output_text",
    "image_url", "input_image", "input_audio", "input_file", "refusal", "message", "function_call",
    "function_call_output", "reasoning", "item_reference", "json_object", "json_schema", "object", "array",
    "string", "number", "integer", "boolean", "null", "auto", "none", "required", "low", "medium", "high",
    "minimal", "default", "priority", "flex", "float", "base64", "concise", "detailed", "disabled", "ephemeral",
))  # fmt: skip
_IDENTIFIERS = frozenset(("name", "id", "tool_call_id", "call_id", "previous_response_id", "item_id", "enum"))
_SCHEMAS = ("tools", "functions", "response_format", "guided_json")  # whose lists of required members name members
_TOKEN_LISTS = ("prompt", "input")  # where a list of numbers is a text that was cut into tokens already
_WORD = re.compile(r"[a-z]{1,3}")
_FEWEST_WORDS = 64
_TEXTS_KEPT = 256  # conversations say the same again with each turn

_KEPT_ESCAPE = re.compile(rb"\\u[0-9A-Fa-f]{4}|\\[\"\\/bfnrtu]")
_HIGH = re.compile(rb"[\x80-\xff]")
_SIGN = re.compile(rb"[A-Za-z0-9]")


class Synthetic:
    """The prompts of one import. `key` is secret; `directory` holds the tokenizer that lengths are measured with.

    Raises UsageError when there is no tokenizer, or it has too few short words.
    """

    def __init__(self, key: bytes, directory: Path) -> None:
        self._key = hmac.digest(key, b"made-up prompts", "sha256")
        self._tokenizer = corpus.tokenizer(directory)
        self._first, self._later = _words(self._tokenizer, directory)
        self._ids = [self._tokenizer.encode(f".{word}", add_special_tokens=False).ids[-1] for word in self._later]
        self.text = lru_cache(_TEXTS_KEPT)(self._made_up)

    def recorded(self, one: Recorded) -> tuple[Recorded, Counter[str]]:
        """The request with a made-up prompt, and what became of its body by kind. Raises Unscrubbable."""
        head, body = scrub.parted(one.raw)
        known = starts_request(one.raw.lstrip(b"\r\n")) and scrub.ends_head(head)
        if one.raw and not known:  # any part of it may be a prompt
            return replace(one, raw=masked_text(one.raw), method="", path=""), Counter({"requests masked": 1})
        if not body:
            return one, Counter()
        if scrub.is_packed(head, body):
            raise scrub.Unscrubbable("a compressed body")
        try:
            raw = with_content(one.raw, self._content)
        except (orjson.JSONDecodeError, orjson.JSONEncodeError, RecursionError):  # no JSON, or too deep to be written
            raw = None
        if raw is None:
            return replace(one, raw=head + masked_body(head, body)), Counter({"bodies masked": 1})
        return replace(one, raw=raw), Counter({"prompts made up": 1})

    def _content(self, content: bytes) -> bytes:
        return orjson.dumps(self._value(orjson.loads(content), ()))

    def _value(self, value: Any, path: tuple[str, ...]) -> Any:
        """A value of the body with made-up text; `path` are the names of the members that lead to it."""
        if isinstance(value, dict):
            return {name: self._value(each, (*path, name)) for name, each in value.items()}
        if isinstance(value, list):
            if path and path[-1] in _TOKEN_LISTS and value and all(type(each) is int for each in value):
                return [self._ids[draw % len(self._ids)] for draw in self._drawn(value)]
            return [self._value(each, path) for each in value]
        return self._string(value, path) if isinstance(value, str) else value

    def _string(self, value: str, path: tuple[str, ...]) -> str:
        if value in _PROTOCOL or path == ("model",) or (path[-1:] == ("required",) and path[0] in _SCHEMAS):
            return value
        if path and path[-1] in _IDENTIFIERS:
            return "n" + hmac.digest(self._key, value.encode(), "sha256").hex()[:12]
        if path[-1:] == ("arguments",) and value[:1] in ("{", "["):
            try:
                return orjson.dumps(self._value(orjson.loads(value), ("",))).decode()
            except orjson.JSONDecodeError:
                pass
        return str(self.text(value))

    def _made_up(self, text: str) -> str:
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        draws = self._drawn(ids)
        words = [self._first[draws[0] % len(self._first)]] if draws else []
        return "".join(words + [self._later[draw % len(self._later)] for draw in draws[1:]])

    def _drawn(self, ids: Iterable[int]) -> list[int]:
        """For each token a number that all tokens up to it decide."""
        digest, draws = blake2b(key=self._key, digest_size=8), []
        for each in ids:
            digest.update(b"%d " % each)
            draws.append(int.from_bytes(digest.copy().digest()))
        return draws


def masked_body(head: bytes, body: bytes) -> bytes:
    """A body with neither letters nor digits in its content, as long as before; the lines that frame chunks stay."""
    masked = bytearray(body)
    for start, end in scrub.content_spans(head, body):
        masked[start:end] = masked_text(body[start:end])
    return bytes(masked)


def masked_text(text: bytes) -> bytes:
    """Each letter and digit as `x`, as long as before. Escapes stay escapes, and what was no UTF-8 is none still."""
    try:
        text.decode()
        high = b"x"
    except UnicodeDecodeError:
        high = b"\x80"
    pieces, at = [], 0
    for escape in _KEPT_ESCAPE.finditer(text):
        pieces += [_SIGN.sub(b"x", text[at : escape.start()]), b"\\u0078" if len(escape[0]) == 6 else escape[0]]
        at = escape.end()
    return _HIGH.sub(high, b"".join([*pieces, _SIGN.sub(b"x", text[at:])]))


def _words(tokenizer: "Tokenizer", directory: Path) -> tuple[Sequence[str], Sequence[str]]:
    """Short words that are one token each: at the beginning of a text, and after a space behind another word."""
    known = {tokenizer.decode([number]).strip() for number in tokenizer.get_vocab().values()}
    forms = sorted(word for word in known if _WORD.fullmatch(word))

    def ones(texts: list[str], tokens: int) -> list[str]:
        found = tokenizer.encode_batch(texts, add_special_tokens=False)
        return [word for word, each in zip(forms, found, strict=True) if len(each) == tokens]

    first = ones(forms, 1)
    later = [f" {word}" for word in ones([f"{first[0]} {word}" for word in forms], 2)] if first else []
    whole = "".join([*first[:1], *later])
    if len(later) < _FEWEST_WORDS or len(tokenizer.encode(whole, add_special_tokens=False)) != len(later) + 1:
        raise UsageError(f"the tokenizer in {directory} has too few short words of one token to make up prompts of")
    return first, later
