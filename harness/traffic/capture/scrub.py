"""Secrets and personal data -> fillers of the same length, before anything is written. Pure.

A length never changes, and neither does a name, a delimiter or a line break: a request whose framing was right stays
right, one whose framing was broken stays broken in the same way, and valid JSON stays valid. Nothing is parsed for it,
so heads and bodies that are no HTTP and no JSON are scrubbed by the same rules. A request that cannot be scrubbed in
place, because its body is compressed and holds something, is refused.
"""

import hmac
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from urllib.parse import quote_from_bytes

from harness.traffic.capture import personal
from harness.traffic.capture.coding import Undecodable, decoded
from harness.traffic.recording import Recorded

SECRET_FIELDS = (
    "api_key", "apikey", "api-key", "password", "passwd", "secret", "client_secret", "access_key", "secret_key",
    "token", "access_token", "refresh_token", "id_token", "auth_token", "authorization", "private_key", "credentials",
    "ssn", "email", "phone", "phone_number",
)  # fmt: skip
NAME_FIELDS = ("user", "user_id", "username", "user_name", "safety_identifier", "session_id", "conversation_id")

_FRAMING = (
    rb"host|connection|keep-alive|expect|te|trailer|upgrade|date|accept[\w-]*|content-(?:length|type|encoding)"
    rb"|transfer-encoding"
)
_SECRET = (
    rb"[\w.-]*(?:auth|token(?!s)|secret|passw|api[-_]?key|access[-_]?key|subscription[-_]?key|cookie|credential|signature"
    rb"|private[-_]?key|csrf|jwt)[\w.-]*"
)
_NETWORK = rb"forwarded|[\w.-]*(?:forwarded-for|real-ip|client-ip|connecting-ip|external-address)"
_PERSON = rb"[\w.-]*(?:user(?!-agent)|session|organization|tenant|customer|account)[\w.-]*"
_KINDS = [(kind, re.compile(names, re.IGNORECASE)) for kind, names in (
    ("framing", _FRAMING), ("headers", _SECRET), ("addresses", _NETWORK), ("names", _PERSON),
)]  # fmt: skip
# A line of a head, however broken: blanks or worse before the name, no colon after it.
_LINE = re.compile(rb"([^\w\r\n]*([\w.-]+)[ \t\x00\x0b\x0c]*:?[ \t]*)([^\r\n]*)")
_NAME = re.compile(rb"[\w.-]+")
_LINE_IN_BODY = re.compile(rb"(\n[ \t]*(?i:%b)[ \t]*:[ \t]*)([^\r\n]+)" % _SECRET)
_SCHEME = re.compile(rb"(?i)(?:bearer|basic|digest|token|api-?key|negotiate)[ \t]+")
_ADDRESS = re.compile(rb"(?:[0-9]{1,3}\.){3}[0-9]{1,3}|[0-9A-Fa-f]{0,4}(?::[0-9A-Fa-f]{0,4}){2,7}")
_FIRST_LINE = re.compile(rb"[\r\n]*[^\r\n]*")
_HEAD_END = re.compile(rb"\n\r?\n")
_CHUNKED = re.compile(rb"(?i)[\r\n][^\w\r\n]*transfer-encoding[^\r\n]*chunked")
_CODED = re.compile(rb"(?i)[\r\n][^\w\r\n]*content-encoding[ \t]*:[ \t]*([^\r\n]+)")
_CHUNK_SIZE = re.compile(rb"[ \t]*([0-9A-Fa-f]{1,16})[ \t]*(?:;[^\r\n]*)?\r?\n")
_LINE_END = re.compile(rb"\r?\n")
_VISIBLE = bytes(code if code in b" \t\n\r\f\v" else ord("x") for code in range(256))
_WORD = re.compile(rb"[^\s;,\"']+")
_SHORT_BYTES = 100  # of header names that are remembered
_LEAST_BYTES = 8  # a shorter value may be any word: it is masked where it stands, and not looked for elsewhere

Valued = tuple[str, int, int]  # the kind of a header, and where its value begins and ends


class Unscrubbable(Exception):  # noqa: N818 - it says what a request is
    """A request whose body is compressed, and holds something to hide or cannot be read."""


class Scrubber:
    """The rules of one import. `salt` makes the names that stand for people, sessions and addresses, the same for the
    same; `fields` are further JSON members to mask, `names` further headers whose value becomes a name."""

    def __init__(self, salt: bytes, fields: Iterable[str] = (), names: Iterable[str] = ()) -> None:
        persons = frozenset(name.lower().encode() for name in names)
        self._kind_of = lru_cache(maxsize=4096)(lambda name: "names" if name.lower() in persons else _kind(name))
        self._digest = lru_cache(maxsize=4096)(lambda value: hmac.digest(salt, value, "sha256"))
        self._members = _members((*SECRET_FIELDS, *fields), NAME_FIELDS)

    def recorded(self, one: Recorded) -> tuple[Recorded, Counter[str]]:
        """The request with nothing in it that may not be written, and what was found by kind. Raises Unscrubbable."""
        raw, counts = self.request(one.raw)
        session = self.name(one.session.encode()).decode() if one.session else ""
        client = self.name(one.client.encode()).decode() if one.client else ""
        return replace(one, raw=raw, path=_path(one, raw), session=session, client=client), counts

    def request(self, raw: bytes) -> tuple[bytes, Counter[str]]:
        """The bytes of a request, as long as before, and what was found in them by kind. Raises Unscrubbable."""
        counts: Counter[str] = Counter()
        head, body = parted(raw)
        first = _FIRST_LINE.match(head)
        at = first.end() if first else 0
        lines = head[at:]
        values = list(self._values(lines))
        secrets = _secrets(lines, values)
        line = personal.masked(_hide(head[:at], secrets, counts), counts)
        head = line + self._lines(lines, values, secrets, counts)
        if (coded := _CODED.search(head)) and not _is_text(body):
            self._check_coded(body, coded[1], bool(_CHUNKED.search(head)), secrets)
            return head + body, counts
        spans = content_spans(head, body)
        return head + self._body(body, spans, secrets, counts), counts

    def name(self, value: bytes, length: int = 12) -> bytes:
        """What stands for a person, a session or an address: nothing that anybody could look up, the same each time."""
        digest: bytes = self._digest(value)
        if value.isdigit():
            return (b"%078d" % int.from_bytes(digest)).replace(b"0", b"1")[: -length - 1 : -1].ljust(length, b"1")
        return (digest.hex().encode() * (length // 64 + 1))[:length]

    def _lines(self, lines: bytes, values: Iterable[Valued], secrets: Sequence[bytes], counts: Counter[str]) -> bytes:
        """Header lines, or the trailer of a chunked body."""
        scrubbed = bytearray(lines)
        for kind, start, end in values:
            value = lines[start:end]
            found = self._value(kind, value, secrets, counts)
            if found is not value:
                scrubbed[start:end] = found
            if kind not in ("", "framing"):
                counts[kind] += found != value
        return bytes(scrubbed)

    def _values(self, lines: bytes) -> Iterator[Valued]:
        """What kind of header each line is of, and where its value is: all of it, in a line that goes on with one."""
        before, at = "", 0
        for line in lines.splitlines(keepends=True):
            kind, value, end = self._line(line)
            folded = line[:1] in (b" ", b"\t") and before not in ("", "framing")
            if folded and end and (before == "headers" or kind != "headers"):
                yield before, at, at + end
            elif end:
                yield kind, at + (value if kind else 0), at + end
                before = kind
            at += len(line)

    def _line(self, line: bytes) -> tuple[str, int, int]:
        """The kind of header that a line is of, where its value begins and where it ends: 0 if nothing is in it."""
        name, colon, value = line.partition(b":")
        if colon and len(name) < _SHORT_BYTES and _is_name(name):
            return self._kind_of(name), len(line) - len(value.lstrip(b" \t")), len(line.rstrip(b"\r\n"))
        found = _LINE.match(line)
        return (self._kind_of(found[2]), found.start(3), found.end()) if found else ("", 0, 0)

    def _value(self, kind: str, value: bytes, secrets: Sequence[bytes], counts: Counter[str]) -> bytes:
        if kind == "framing":  # its numbers and its words say how long the body is
            return personal.masked(value, counts, numbers=False)
        if kind == "headers":
            return _hidden(value)
        if kind == "addresses":
            return _ADDRESS.sub(lambda match: re.sub(rb"[0-9A-Fa-f]", b"1", match[0]), value)
        if kind == "names":
            return _WORD.sub(lambda match: self.name(match[0], len(match[0])), value)
        return personal.masked(_hide(value, secrets, counts), counts)

    def _body(self, body: bytes, spans: list[tuple[int, int]], secrets: Sequence[bytes], counts: Counter[str]) -> bytes:
        """The content is scrubbed as one text, then put back between the lines that frame it."""
        content = self._content(b"".join([body[start:end] for start, end in spans]), secrets, counts)
        if spans == [(0, len(body))]:
            return content
        framed, at = bytearray(body), 0
        for start, end in spans:
            framed[start:end] = content[at : at + end - start]
            at += end - start
        after = spans[-1][1] if spans else 0
        trailer = bytes(framed[after:])
        return bytes(framed[:after]) + self._lines(trailer, self._values(trailer), secrets, counts)

    def _content(self, text: bytes, secrets: Sequence[bytes], counts: Counter[str]) -> bytes:
        text = self._members.sub(lambda match: self._member(match, counts), _hide(text, secrets, counts))
        if b"\n" in text:
            text, found = _LINE_IN_BODY.subn(lambda match: match[1] + _hidden(match[2]), text)
            counts["headers"] += found
        return personal.masked(text, counts, before=b"&")  # a form opens with its first field

    def _member(self, match: re.Match[bytes], counts: Counter[str]) -> bytes:
        """A JSON member whose value is not to be told: `secret` ones are filled, `person` ones get their name."""
        value = match["value"] or match["escaped"] or match["number"] or b""
        person = match["person"] is not None
        counts["names" if person else "fields"] += bool(value)
        filled = self.name(value, len(value)) if person else (b"9" if match["number"] else b"x") * len(value)
        return match[0][: len(match[0]) - len(value)] + filled

    def _check_coded(self, body: bytes, codings: bytes, chunked: bool, secrets: Sequence[bytes]) -> None:
        spans = _chunks(body) if chunked else [(0, len(body))]
        try:
            pieces = decoded([(0, body[start:end]) for start, end in spans], codings.decode(errors="replace"))
            text = b"".join(piece for _, piece in pieces)
        except Undecodable as error:
            raise Unscrubbable(str(error)) from None
        if self._content(text, secrets, Counter()) != text:
            raise Unscrubbable("a compressed body that holds secrets")


def parted(raw: bytes) -> tuple[bytes, bytes]:
    """Head, with the empty line that ends it, and body, however broken; without that line all is head."""
    end = _HEAD_END.search(raw)
    return (raw[: end.end()], raw[end.end() :]) if end else (raw, b"")


def ends_head(head: bytes) -> bool:
    """Whether there is the empty line that ends a head."""
    return _HEAD_END.search(head) is not None


def is_packed(head: bytes, body: bytes) -> bool:
    """Whether a body is compressed: its head says so, and it is no text."""
    return _CODED.search(head) is not None and not _is_text(body)


def content_spans(head: bytes, body: bytes) -> list[tuple[int, int]]:
    """Where the content of a body stands, between the lines that frame its chunks if it has some."""
    return _chunks(body) if _CHUNKED.search(head) else [(0, len(body))]


def _members(secret: Sequence[str], person: Sequence[str]) -> re.Pattern[bytes]:
    """Members of JSON by their names, also of JSON within a string of JSON, and also where the text breaks off."""
    either = [b"|".join(re.escape(name.encode()) for name in names) for names in (secret, person)]
    initials = re.escape(
        "".join({initial for name in (*secret, *person) for initial in name[:1] + name[:1].swapcase()})
    )
    return re.compile(
        rb'"(?=[%b])(?i:(?P<secret>%b)|(?P<person>%b))\\*"\s*:\s*'  # a look at the initial spares most names the rest
        rb'(?:"(?P<value>(?:[^"\\\r\n]|\\[^\r\n])*+)|\\+"(?P<escaped>[^"\\\r\n]*)|(?P<number>[0-9]+))'
        % (initials.encode(), *either),
    )


@lru_cache(maxsize=4096)
def _is_name(name: bytes) -> bool:
    """Whether a line that begins so, and then has a colon, is as it should be."""
    return _NAME.fullmatch(name) is not None


def _kind(name: bytes) -> str:
    return next((kind for kind, names in _KINDS if names.fullmatch(name)), "")


def _hidden(value: bytes) -> bytes:
    """The value of a secret header; the name of its scheme stays."""
    scheme = _SCHEME.match(value)
    at = scheme.end() if scheme else 0
    return value[:at] + value[at:].translate(_VISIBLE)


def _secrets(lines: bytes, values: Iterable[Valued]) -> Sequence[bytes]:
    """The values of secret headers, whole and in their parts, with what they look like in a URL; the longest first."""
    found: set[bytes] = set()
    for kind, start, end in values:
        if kind == "headers":
            words = _WORD.findall(_SCHEME.sub(b"", lines[start:end], count=1))
            found.update(words, (word.partition(b"=")[2] for word in words))
    found = {secret for secret in found if len(secret) >= _LEAST_BYTES}
    found |= {quote_from_bytes(secret, safe="").encode() for secret in found}
    return sorted(found, key=len, reverse=True)


def _hide(text: bytes, secrets: Sequence[bytes], counts: Counter[str]) -> bytes:
    """What was a secret in a header is one wherever else it stands."""
    for secret in secrets:
        if secret in text:
            counts["repeated"] += text.count(secret)
            text = text.replace(secret, b"x" * len(secret))
    return text


def _is_text(body: bytes) -> bool:
    """Whether a body can be read as it stands, whatever its head says of it: nothing that is packed is UTF-8."""
    try:
        body.decode()
    except UnicodeDecodeError:
        return False
    return True


def _chunks(body: bytes) -> list[tuple[int, int]]:
    """Where the content of a chunked body stands; from where the framing makes no sense on, all is content."""
    spans: list[tuple[int, int]] = []
    at = 0
    while size := _CHUNK_SIZE.match(body, at):
        start, end = size.end(), size.end() + int(size[1], 16)
        if start == end:
            return spans
        spans.append((start, min(end, len(body))))
        if end >= len(body):
            return spans
        line_end = _LINE_END.match(body, end)
        at = line_end.end() if line_end else end
    return [*spans, (at, len(body))]


def _path(one: Recorded, raw: bytes) -> str:
    """The path as it stands in the scrubbed request, in the very place where it stood."""
    path = one.path.encode("latin-1", errors="replace")
    at = one.raw.find(path)
    found = raw[at : at + len(path)] if at >= 0 else personal.masked(path, Counter())
    return found.decode("latin-1")
