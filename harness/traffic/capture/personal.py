"""What gives itself away by its form: keys, e-mail addresses, telephone, card and identity numbers, secrets in URLs.

Each is replaced by a filler of its own length and look (`x` for what is written in letters, `9` for numbers), so that
JSON stays JSON and a prompt keeps about as many tokens. Text may be escaped for JSON: no escape is ever cut in two. It
works on bytes, whole or broken, and refuses to guess at what has no form: names and prose stay.
"""

import re
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from typing import Annotated, NamedTuple

from pydantic import StringConstraints, TypeAdapter

_SECRET_NAMES = (
    rb"(?:[\w-]*(?:api[-_]?key|token|secret|passw(?:or)?d|signature|credential)|key|sig|auth|session|email|user|jwt)"
)
# An escape of JSON, or of JSON within JSON. Those of @, & and = are left: patterns know them in either spelling.
_ESCAPE = re.compile(rb"\\+(?:u(?!00(?:40|26|3[dD]))[0-9A-Fa-f]{4}|[\"/bfnrt])")
_ESCAPED = b"\x00"  # what stands in an escape's place while patterns look
_LETTERS, _DIGITS = re.compile(rb"[A-Za-z0-9]"), re.compile(rb"[0-9]")
_ZEROS = bytes.maketrans(b"123456789", b"000000000")


def fill(text: bytes) -> bytes:
    """Letters and digits as `x`; what joins them stays."""
    return _LETTERS.sub(b"x", text)


def fill_number(text: bytes) -> bytes:
    """Digits as `9`, so that what was a number in JSON is one still."""
    return _DIGITS.sub(b"9", text)


def _sums_up(match: re.Match[bytes]) -> bool:
    """The check digit of cards (ISO/IEC 7812): most long numbers that are no card fail it."""
    digits = [digit - 48 for digit in match[0] if 48 <= digit <= 57]
    doubled = [sum(divmod(2 * digit, 10)) for digit in digits[-2::-2]]
    return (sum(digits[-1::-2]) + sum(doubled)) % 10 == 0


class _Form(NamedTuple):
    """One form: its groups are what is replaced, where `holds`. It is looked for where one of `hints` is; without any,
    where there is a long number."""

    kind: str
    hints: tuple[bytes, ...]
    pattern: re.Pattern[bytes]
    filled: Callable[[bytes], bytes] = fill
    holds: Callable[[re.Match[bytes]], bool] = lambda _: True


# Patterns open with what is rare or with one set of bytes: the scan for it is what makes them quick.
_FORMS = (
    _Form("keys", (b"PRIVATE KEY",), re.compile(rb"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----([^-]+)")),
    _Form("keys", (b"://",), re.compile(rb"://[^/\s:@\"\\\x00]{0,256}:([^/\s@\"\\\x00]{1,256})(?=@)")),
    _Form(
        "query", (b"=", b"u003d", b"u003D"),
        re.compile(rb"(?:[?&;]|\\+u0026)(?i:%b)(?:=|\\+u003[dD])([^&\s#\"'<>\\\x00]+)" % _SECRET_NAMES),
    ),
    _Form(
        "keys",
        (
            b"sk-", b"k_live_", b"k_test_", b"gsk_", b"hf_", b"ghp_", b"gho_", b"ghs_", b"ghu_", b"ghr_", b"github_",
            b"glpat-", b"xox", b"AKIA", b"ASIA", b"AIza", b"nvapi-", b"r8_",
        ),
        re.compile(
            rb"(?<![A-Za-z0-9_])(?:sk-|[spr]k_(?:live|test)_|gsk_|hf_|gh[opsur]_|github_pat_|glpat-|xox[a-z]-|A[KS]IA|AIza"
            rb"|nvapi-|r8_)([A-Za-z0-9_-]{12,})"
        ),
    ),
    _Form("keys", (b"eyJ",), re.compile(rb"eyJ([A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]+){0,4})")),
    _Form("keys", (b"earer",), re.compile(rb"[Bb]earer[ +]+([A-Za-z0-9._~+/=-]{12,})")),
    _Form(
        "e-mail addresses", (b"@", b"u0040", b"%40"),
        re.compile(
            rb"(?<![A-Za-z0-9._+-])([A-Za-z0-9._+-]{1,64}+)(?:@|\\+u0040|%40)"
            rb"((?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,24})"
        ),
    ),
    _Form(
        "identity numbers", (),
        re.compile(rb"([0-9](?<![\w.+/-].)(?:[0-9]{2}-[0-9]{2}-[0-9]{4}|[0-9]{16}[0-9Xx]))(?![\w-])"),
        fill_number,
    ),
    _Form(
        "identity numbers", (),
        re.compile(rb"([A-Z]{2}(?<![\w].{2})[0-9]{2}(?: ?[A-Z0-9]{4}){3,7}(?: ?[A-Z0-9]{1,3})?)(?![\w])"),
        fill_number, lambda match: _is_iban(match[0]),
    ),
    _Form(
        "cards", (),
        re.compile(rb"([2-6](?<![\w.+/-].)[0-9]{3}(?:[ -]?[0-9]){9,15})(?![\w-])"), fill_number, _sums_up,
    ),
    _Form(
        "telephone numbers", (),
        re.compile(
            rb"([+](?<!\w.)[1-9](?:[ ./()-]{0,2}[0-9]){7,14}"
            rb"|[(2-9](?<![\w.+/-].)(?:(?<=\()[2-9])?[0-9]{2}(?:\) ?|[ .-])[2-9][0-9]{2}[ .-][0-9]{4}"
            rb"|1(?<![\w.+/-].)[3-9][0-9]{9}|0(?<![\w.+/-].)[1-9][0-9]{1,3}[ /-][0-9]{5,9})(?![\w-])"
        ),
        fill_number,
    ),
)  # fmt: skip

_SHORT_BYTES = 200  # as header values are: many, and the same again and again
# Most texts have none: whether one has any hint is one look of an automaton that reads each byte once, which `re` has
# not, and pydantic has.
_HINTS = "|".join(re.escape(hint.decode()) for hint in sorted({hint for form in _FORMS for hint in form.hints}))
_LONG_NUMBER = "[0-9](?:[ ./()-]*[0-9]){6}"


def _finder(pattern: str) -> Callable[[str], bool]:
    return TypeAdapter(Annotated[str, StringConstraints(pattern=pattern)]).validator.isinstance_python


_has_hint, _has_hint_or_number = _finder(_HINTS), _finder(f"{_HINTS}|{_LONG_NUMBER}")


def _is_iban(text: bytes) -> bool:
    """ISO 13616: the first four signs at the end, letters as numbers from 10, gives 1 modulo 97."""
    packed = text.replace(b" ", b"").decode()
    return int("".join(str(int(sign, 36)) for sign in packed[4:] + packed[:4])) % 97 == 1


def masked(text: bytes, counts: Counter[str], numbers: bool = True, before: bytes = b"") -> bytes:
    """The text with fillers; what was found is added to `counts` by its kind. Without `numbers` these stay. `before` is
    what to see before the text."""
    if _is_short_and_bare(text, numbers) if len(text) < _SHORT_BYTES else _is_bare(text, numbers):
        return text
    numeric, text = numbers and _is_numeric(text), before + text
    forms = [form for form in _FORMS if (any(hint in text for hint in form.hints) if form.hints else numeric)]
    kept = [(match.start(), match[0]) for match in _ESCAPE.finditer(text)]
    seen = _seen(text, kept)
    for form in forms:
        seen = _replaced(form, seen, counts)
    return (_restored(seen, kept) if kept else seen)[len(before) :]


def _is_bare(text: bytes, numbers: bool) -> bool:
    """Whether no form can be in a text."""
    seen = text.decode("latin-1")  # whatever it is: all that is looked for is ASCII
    return not (_has_hint_or_number(seen) if numbers else _has_hint(seen))


_is_short_and_bare = lru_cache(maxsize=4096)(_is_bare)


def _is_numeric(text: bytes) -> bool:
    """Whether there is a number of seven digits or more, however it is written: quick, for most texts have none."""
    return b"0000000" in text.translate(_ZEROS, b" ./()-")


def _seen(text: bytes, escapes: list[tuple[int, bytes]]) -> bytes:
    if not escapes:
        return text
    seen = bytearray(text)
    for start, escape in escapes:
        seen[start : start + len(escape)] = _ESCAPED * len(escape)
    return bytes(seen)


def _restored(seen: bytes, escapes: list[tuple[int, bytes]]) -> bytes:
    text = bytearray(seen)
    for start, escape in escapes:
        text[start : start + len(escape)] = escape
    return bytes(text)


def _replaced(form: _Form, text: bytes, counts: Counter[str]) -> bytes:
    def replacement(match: re.Match[bytes]) -> bytes:
        if not form.holds(match):
            return match[0]
        found = match[0]
        for group in range(match.re.groups, 0, -1):
            start, end = match.start(group) - match.start(), match.end(group) - match.start()
            found = found[:start] + form.filled(found[start:end]) + found[end:]
        counts[form.kind] += found != match[0]
        return found

    return form.pattern.sub(replacement, text)
