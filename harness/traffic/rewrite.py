"""What is changed in a captured request before it is sent again: four named things, and not one byte besides.

Pure, bytes in and bytes out. The Host becomes the target's. A header that the target has a value for, its credentials
above all, takes that value where the captured request had the header. The captured model's name becomes the target's.
The beginning of the path may be another. Nothing is added and nothing is repaired: a request keeps what is wrong with
it, and whatever cannot be found beyond doubt (a folded header, a body that is not what its framing says, a body that is
no JSON) stays as it was captured. The Content-Length follows the body only where it was right.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import orjson

_HEAD_END = re.compile(rb"\r?\n\r?\n")
_HEADER = re.compile(rb"([^:]+:[ \t]*)(.*?)([ \t]*\r?)")
_HOST = re.compile(rb"[\w.:\[\]-]+")
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,8})([ \t]*(?:;[^\r\n]*)?\r\n)")
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')
_STRUCTURE = re.compile(rb"[{}\[\]]|" + _STRING.pattern)
_KEY = b'"model"'
_COLON = re.compile(rb"\s*:\s*")


@dataclass(frozen=True)
class Rewrites:
    """The changes that a run makes to every captured request.

    `headers` are the target's own, by lower-case name. `model` is the captured name and the one that takes its place;
    another name stays, for a request for an unknown model must stay one. `paths` maps beginnings of paths, each cut at
    a `/`.
    """

    host: str
    headers: Mapping[str, str] = field(default_factory=dict)
    model: tuple[str, str] | None = None
    paths: Mapping[str, str] = field(default_factory=dict)

    def apply(self, raw: bytes, credentials: bool = True) -> bytes:
        """The request to send. Without `credentials` the captured headers stay: it was refused for the ones it had."""
        head, body = _split(raw)
        lines = head.split(b"\n")
        changed = _renamed(lines, body, *self.model) if self.model else body
        lines[0] = self._request_line(lines[0])
        ours = {b"host": self.host.encode()}
        if credentials:
            ours |= {name.encode(): value.encode() for name, value in self.headers.items()}
        if changed is not body:
            ours[b"content-length"] = b"%d" % len(changed)
        for k, line in enumerate(lines[1:-1], start=1):
            if (name := _name(line)) in ours and not lines[k + 1].startswith((b" ", b"\t")):
                lines[k] = _with_value(line, ours[name])
        return b"\n".join(lines) + changed

    def _request_line(self, line: bytes) -> bytes:
        parts = line.split(b" ")
        if len(parts) != 3:
            return line
        for old, new in sorted(self.paths.items(), key=lambda pair: -len(pair[0])):
            rest = parts[1].removeprefix(old.encode())
            if rest != parts[1] and (old.endswith("/") or rest[:1] in (b"", b"/", b"?")):
                new_end = new.removesuffix("/") if rest.startswith(b"/") else new
                return b" ".join((parts[0], new_end.encode() + rest, parts[2]))
        return line


def model_of(raw: bytes) -> str | None:
    """The model that a captured request names, or None when its body is not what its framing says, or names none."""
    head, body = _split(raw)
    content = _content(head.split(b"\n"), body)
    return _model(b"".join(chunk.data for chunk in content)) if content is not None else None


def with_content(raw: bytes, change: Callable[[bytes], bytes]) -> bytes | None:
    """The request with its body's content changed and its framing after it; None when the framing is not right.

    A chunked body becomes one chunk.
    """
    head, body = _split(raw)
    lines = head.split(b"\n")
    chunks = _content(lines, body)
    if chunks is None:
        return None
    content = b"".join(chunk.data for chunk in chunks)
    changed = b"".join(_framed(_replaced(chunks, 0, len(content), change(content)))) if content else body
    for k, line in enumerate(lines):
        if _name(line) == b"content-length":
            lines[k] = _with_value(line, b"%d" % len(changed))
    return b"\n".join(lines) + changed


def _name(line: bytes) -> bytes:
    """What stands before the colon of a header, in lower case."""
    return line.partition(b":")[0].lower()


def _with_value(line: bytes, value: bytes) -> bytes:
    """A header with another value; a Host that is none stays what it is."""
    found = _HEADER.fullmatch(line)
    if not found or (_name(line) == b"host" and not _HOST.fullmatch(found[2])):
        return line
    return b"".join((found[1], value, found[3]))


class _Chunk(NamedTuple):
    """Bytes of a body. `ends` is what follows the size of a chunk on its line; None where the body has no chunks."""

    data: bytes
    size: bytes = b""
    ends: bytes | None = None


def _split(raw: bytes) -> tuple[bytes, bytes]:
    """Head, with the empty line that ends it, and body. A request without that line is all head."""
    end = _HEAD_END.search(raw)
    return (raw[: end.end()], raw[end.end() :]) if end else (raw, b"")


def _content(lines: list[bytes], body: bytes) -> list[_Chunk] | None:
    """The body without its framing; None unless one right Content-Length, or one whole chunked message, frames it."""
    framing = [
        (name, line.partition(b":")[2].strip(b" \t\r").lower())
        for line in lines[1:]
        if (name := _name(line)) in (b"content-length", b"transfer-encoding")
    ]
    if framing == [(b"content-length", b"%d" % len(body))]:
        return [_Chunk(body)]
    return _chunks(body) if framing == [(b"transfer-encoding", b"chunked")] else None


def _chunks(body: bytes) -> list[_Chunk] | None:
    """The chunks of one whole message; its last, the empty one, holds the trailer in `ends`."""
    chunks: list[_Chunk] = []
    at = 0
    while size := _CHUNK_SIZE.match(body, at):
        begin, end = size.end(), size.end() + int(size[1], 16)
        if begin == end:
            whole = body.find(b"\r\n\r\n", begin - 2) == len(body) - 4
            return [*chunks, _Chunk(b"", size[1], body[size.end(1) :])] if whole else None
        if body[end : end + 2] != b"\r\n":
            return None
        chunks.append(_Chunk(body[begin:end], size[1], size[2]))
        at = end + 2
    return None


def _renamed(lines: list[bytes], body: bytes, old: str, new: str) -> bytes:
    """The body with the model's new name, or the very same object when it stays."""
    chunks = _content(lines, body) if old != new else None
    if chunks is None:
        return body
    content = b"".join(chunk.data for chunk in chunks)
    span = _model_span(content, old) if _model(content) == old else None
    return b"".join(_framed(_replaced(chunks, *span, orjson.dumps(new)))) if span else body


def _model(content: bytes) -> str | None:
    try:
        model = orjson.loads(content)["model"]
    except (orjson.JSONDecodeError, KeyError, TypeError, IndexError):
        return None
    return model if isinstance(model, str) else None


def _model_span(content: bytes, name: str) -> tuple[int, int] | None:
    """Where the value of the outermost member `model` stands in a JSON object that has it, if it is `name`."""
    key = content.find(_KEY)
    if content.find(_KEY, key + 1) >= 0:  # reading the structure takes ten times as long
        key = _outermost(content)
    colon = _COLON.match(content, key + len(_KEY)) if key >= 0 else None
    value = _STRING.match(content, colon.end()) if colon else None
    return value.span() if value and orjson.loads(value[0]) == name else None


def _outermost(content: bytes) -> int:
    """Where the outermost member `model` begins; -1 where there is none."""
    depth = 0
    for token in _STRUCTURE.finditer(content):
        if token[0] in (b"{", b"["):
            depth += 1
        elif token[0] in (b"}", b"]"):
            depth -= 1
        elif depth == 1 and token[0] == _KEY and _COLON.match(content, token.end()):
            return token.start()
    return -1


def _replaced(chunks: list[_Chunk], begin: int, end: int, new: bytes) -> Iterator[_Chunk]:
    """The chunks with `begin : end` of their joint data replaced; untouched ones keep every byte."""
    at = 0
    for chunk in chunks:
        low, high = max(begin - at, 0), min(end - at, len(chunk.data))
        at += len(chunk.data)
        if low >= high:
            yield chunk
        elif data := chunk.data[:low] + new + chunk.data[high:]:
            yield _Chunk(data, b"%x" % len(data), chunk.ends)
        if low < high:
            new = b""


def _framed(chunks: Iterator[_Chunk]) -> Iterator[bytes]:
    for chunk in chunks:
        if chunk.ends is None:
            yield chunk.data
        else:
            yield b"".join((chunk.size, chunk.ends, chunk.data, b"\r\n" if chunk.data else b""))
