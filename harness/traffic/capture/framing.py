"""Where one HTTP/1.1 message ends: its head and its body, read as the bytes come. Pure.

A parser made for a server or a client repairs what is broken, or refuses it. This one keeps every byte as it was sent
and names what is wrong. Where the framing itself is broken it does not guess: the message is `open_ended`, and whoever
knows the connection says where it ends. Nothing here knows connections.
"""

import re
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

from harness.traffic.capture.records import Column, Room, rows

HEAD_BYTES = 256 << 10
MESSAGE_BYTES = 64 << 20  # a message that is larger is told of, and not kept
_LINE_BYTES = 16 << 10  # of a chunk's size with its extensions, or of one trailer
_CRLF = b"\r\n"

_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_HEAD_END = re.compile(rb"\n\r?\n")
_REQUEST_LINE = re.compile(rb"(%b) ([^\x00-\x20\x7f]+) HTTP/(\d\.\d)" % _TOKEN)
_STATUS_LINE = re.compile(rb"HTTP/1\.\d (\d{3})(?: .*)?", re.DOTALL)
_FIELD_NAME = re.compile(_TOKEN)
_BAD_IN_VALUE = re.compile(rb"[\x00\r\n]")
_LENGTH = re.compile(rb"[0-9]{1,18}")
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n]*)?\r\n")
_METHODS = rb"GET|HEAD|POST|PUT|PATCH|DELETE|OPTIONS|CONNECT|TRACE"
_LEAST_CHUNK = 6
_SHORT_BYTES = 100  # of header names that are remembered
_FRAMING = frozenset((b"transfer-encoding", b"content-length", b"host"))
_HEX = np.full(256, -1 << 20)  # what is no digit makes no size
_HEX[[*b"0123456789abcdefABCDEF"]] = [*range(16), *range(10, 16)]
_SIZES = {b"%x" % size: size for size in range(4096)}  # of nearly all chunks: looked up in a third of the time
_STARTS_REQUEST = re.compile(rb"(?:%b) [^\x00-\x20\x7f]+ HTTP/1\.[01]\r?\n" % _METHODS)
_STARTS_ANSWER = re.compile(rb"HTTP/1\.[01] \d{3}(?: [^\r\n]*)?\r?\n")

_ANSWER = b"HTTP/1."

Field = tuple[bytes, bytes]
Named = dict[bytes, list[bytes]]  # values by the name of their header in lower case


def chunk_leads(data: Room, starts: Column, sizes: Column) -> Column:
    """Of pieces of `data` that are one whole chunk each, as nearly all of a stream are: how long the line with its size
    is. 0 of all others."""
    leads = np.zeros(len(starts), np.int64)
    places = np.flatnonzero(sizes >= _LEAST_CHUNK)
    if not len(places):
        return leads
    first, end = starts[places], starts[places] + sizes[places]
    opening = rows(data, first, 5).view(np.uint8).reshape(-1, 5)
    values = _HEX[opening]
    told, size = np.zeros(len(places), np.int64), np.zeros(len(places), np.int64)
    for digits in (1, 2, 3):
        size = np.where(told > 0, size, size * 16 + values[:, digits - 1])
        line_ends = (opening[:, digits] == 13) & (opening[:, digits + 1] == 10)
        told[line_ends & (told == 0)] = digits + 2
    octets = np.frombuffer(data, np.uint8)
    whole = (
        (told > 0) & (size > 0) & (sizes[places] == told + size + 2) & (octets[end - 2] == 13) & (octets[end - 1] == 10)
    )
    leads[places[whole]] = told[whole]
    return leads


def starts_request(data: bytes | bytearray) -> bool:
    """Whether bytes begin with a whole request line: what one looks for where the thread was lost.

    Of a method that everybody knows, since the end of one might be taken for another.
    """
    return _STARTS_REQUEST.match(data) is not None


def starts_answer(data: bytes) -> bool:
    """Whether bytes begin with a whole status line."""
    return _STARTS_ANSWER.match(data) is not None


def may_start_answer(data: bytes) -> bool:
    """Whether bytes begin as a status line does, as far as they go."""
    return _ANSWER.startswith(data[: len(_ANSWER)])


class Message:
    """One message while its bytes come in.

    `whole` says that its own framing ended it, `lost` why its bytes are not all here, `flaw` what is wrong with them as
    they were sent. `pieces` are the moments and bytes of the body without its chunk framing.
    """

    __slots__ = (
        "_held", "_kept", "_left", "_parts", "_read", "_size", "first_ns", "flaw", "headers", "last_ns", "lost",
        "pieces", "whole",
    )  # fmt: skip
    _begins = b""  # what every message of its kind begins with
    _ends_with_head = False  # where the head says nothing of a body: there is none, or it lasts until the close

    def __init__(self, at_ns: int, lead: bytes = b"") -> None:
        self.first_ns = self.last_ns = at_ns
        self.headers: tuple[Field, ...] = ()
        self.pieces: list[tuple[int, bytes]] = []
        self.lost = self.flaw = ""
        self.whole = False
        self._parts = [lead] if lead else []
        self._size = self._left = 0
        self._kept = True
        self._held = bytearray()  # of a head or a line that has not ended
        self._read: Callable[[Message, int, bytes], bytes] = Message._read_head  # unbound: a bound one would be a cycle

    def take(self, at_ns: int, data: bytes) -> bytes:
        """Read on. Returns what comes after the message's end: b"" as long as it has not ended."""
        rest = self._read(self, at_ns, data)
        self.last_ns = at_ns
        if self._kept:
            own = data[: len(data) - len(rest)] if rest else data
            self._parts.append(own)
            self._size += len(own)
            if self._size <= MESSAGE_BYTES:
                return rest
            self._let_go()
        self.pieces.clear()
        return rest

    def take_chunks(self, at_ns: Sequence[int], data: Sequence[bytes], leads: list[int], place: int) -> int:
        """Take pieces, from a place on, that are one whole chunk each, as nearly all packets of a stream are.

        `leads` are their `chunk_leads`, and a 0 after the last. Returns the place of the piece that `take` must read.
        """
        if self._read is not _READ_CHUNKS or self._held or not self._kept:
            return place
        end = leads.index(0, place)
        taken = data[place:end]
        size = sum(map(len, taken))
        if not taken or self._size + size > MESSAGE_BYTES:
            return place
        contents = [piece[lead:-2] for piece, lead in zip(taken, leads[place:end], strict=True)]
        self.pieces += zip(at_ns[place:end], contents, strict=True)
        self._parts += taken
        self._size += size
        self.last_ns = at_ns[end - 1]
        return end

    def take_length(self, at_ns: Sequence[int], data: Sequence[bytes], place: int) -> int:
        """As `take_chunks`, the pieces that do not reach the end of a body whose length is known."""
        if self._read is not _READ_LENGTH or not self._kept:
            return place
        left, end = self._left, place
        while end < len(data) and len(data[end]) < left:
            left -= len(data[end])
            end += 1
        size = self._left - left
        if not size or self._size + size > MESSAGE_BYTES:
            return place
        self.pieces += zip(at_ns[place:end], data[place:end], strict=True)
        self._parts += data[place:end]
        self._size, self._left = self._size + size, left
        self.last_ns = at_ns[end - 1]
        return end

    @property
    def raw(self) -> bytes:
        return b"".join(self._parts)

    @property
    def opening(self) -> bytes:
        """The first bytes of a head that has not ended, and nothing after that."""
        return bytes(self._held[:16]) if self.in_head else b""

    @property
    def in_head(self) -> bool:
        return self._read is Message._read_head

    @property
    def open_ended(self) -> bool:
        """Whether nothing in its bytes will say where it ends."""
        return self._read is Message._read_on

    def go_on(self, flaw: str) -> None:
        """What follows belongs to this message too, though its framing does not say so."""
        self.flaw, self.whole, self._read = self.flaw or flaw, False, Message._read_on
        self._held.clear()

    def _let_go(self) -> None:
        self.lost, self._kept = "too large", False
        self._parts.clear()

    def _name(self, line: bytes) -> str:
        """Take the first line for what the speaking side has there. Returns what is wrong with it."""
        raise NotImplementedError  # a message is a request or an answer, and each has its own first line

    def _read_head(self, at_ns: int, data: bytes) -> bytes:
        known = len(self._held)
        held = bytes(self._held) + data if known else data
        if not self._begins.startswith(held[: len(self._begins)]):
            self.go_on("bad_status_line")
            return self._read_on(at_ns, data)
        found = _HEAD_END.search(held, max(known - 2, 0))
        if found is None:
            self._held += data
            if len(held) > HEAD_BYTES:
                flaw = self._name(held.partition(_CRLF)[0])
                self._let_go()
                self.go_on(flaw)
            return b""
        self._held.clear()
        self._open(held[: found.end()])
        rest = data[found.end() - known :]
        return self._read(self, at_ns, rest) if rest and not self.whole else rest

    def _open(self, head: bytes) -> None:
        """The head is read: say what it means, what is wrong with it, and how the body is to be read."""
        bare = head.count(b"\n") != head.count(_CRLF)
        ends = [line.removesuffix(b"\r") for line in head.split(b"\n")] if bare else head.split(_CRLF)
        first, *lines = ends[:-2]
        plain = not bare and b"\x00" not in head and head.count(b"\r") == len(ends) - 1
        self.headers, named, flaw_of_fields = _fields(lines, plain)
        flaw_of_line, flaw_of_frame = self._name(first), self._frame(named)
        self.flaw = flaw_of_line or flaw_of_frame or flaw_of_fields or ("bare_lf" if bare else "")

    def _frame(self, named: Named) -> str:
        """Choose how the body is read by what the head says of its length. Returns what is wrong with that."""
        codings = _members(named, b"transfer-encoding")
        lengths = _members(named, b"content-length")
        if codings:
            chunked = codings[-1].lower() == b"chunked"
            self._read = Message._read_chunks if chunked else Message._read_on
            if not chunked or len(codings) != len({coding.lower() for coding in codings}):
                return "bad_transfer_encoding"
            return "length_with_chunked" if lengths else ""
        if not lengths:
            self._read, self.whole = Message._read_on, self._ends_with_head
            return ""
        if not all(map(_LENGTH.fullmatch, lengths)) or len(set(lengths)) > 1:
            self._read = Message._read_on
            return "conflicting_content_length" if len(set(lengths)) > 1 else "bad_content_length"
        self._left, self._read = int(lengths[0]), Message._read_length
        self.whole = self._left == 0
        return "duplicate_content_length" if len(lengths) > 1 else ""

    def _read_length(self, at_ns: int, data: bytes) -> bytes:
        if len(data) < self._left:
            self._left -= len(data)
            self.pieces.append((at_ns, data))
            return b""
        piece, rest = data[: self._left], data[self._left :]
        self.pieces.append((at_ns, piece))
        self._left, self.whole = 0, True
        return rest

    def _read_on(self, at_ns: int, data: bytes) -> bytes:
        self.pieces.append((at_ns, data))
        return b""

    def _read_chunks(self, at_ns: int, data: bytes) -> bytes:
        """Chunks from their size on, as a rule each whole in one packet."""
        if self._held:
            data = bytes(self._held) + data
            self._held.clear()
        position, end = 0, len(data)
        while position < end:
            line_end = data.find(_CRLF, position)
            size = _SIZES.get(data[position:line_end], -1) if line_end >= 0 else -1
            if size < 0:
                line = _CHUNK_SIZE.match(data, position)
                if line is None:
                    return self._read_size(at_ns, data[position:])
                size = int(line[1], 16)
            position = line_end + 2
            stop = position + size
            if not size:
                self._read = Message._read_trailers
                return self._read_trailers(at_ns, data[position:])
            if data[stop : stop + 2] != _CRLF:
                self._left, self._read = size, Message._read_chunk
                return self._read_chunk(at_ns, data[position:])
            self.pieces.append((at_ns, data[position:stop]))
            position = stop + 2
        return b""

    def _read_size(self, at_ns: int, line: bytes) -> bytes:
        """A chunk's size that is not whole, or none."""
        if len(line) > _LINE_BYTES or b"\n" in line:
            return self._broken(at_ns, line)
        self._held += line
        return b""

    def _read_chunk(self, at_ns: int, data: bytes) -> bytes:
        """The rest of a chunk that began in an earlier packet, then its line end."""
        piece, data = data[: self._left], data[self._left :]
        if piece:
            self.pieces.append((at_ns, piece))
            self._left -= len(piece)
        data = bytes(self._held) + data
        self._held.clear()
        if self._left or (len(data) < 2 and _CRLF.startswith(data)):
            self._held += data
            return b""
        if not data.startswith(_CRLF):
            return self._broken(at_ns, data)
        self._read = Message._read_chunks
        return self._read_chunks(at_ns, data[2:])

    def _broken(self, at_ns: int, rest: bytes) -> bytes:
        self.flaw, self._read = self.flaw or "bad_chunk", Message._read_on
        return self._read_on(at_ns, rest)

    def _read_trailers(self, at_ns: int, data: bytes) -> bytes:
        """Lines up to an empty one; they stay in the raw bytes alone."""
        data = bytes(self._held) + data
        self._held.clear()
        position = 0
        while (line_end := data.find(b"\n", position)) >= 0:
            line, position = data[position:line_end], line_end + 1
            if line in (b"", b"\r"):
                self.whole = True
                return data[position:]
        if len(data) - position > _LINE_BYTES:
            return self._broken(at_ns, data[position:])
        self._held += data[position:]
        return b""


_READ_CHUNKS, _READ_LENGTH = Message._read_chunks, Message._read_length


class Request(Message):
    """`method` and `target` as the request line has them; empty as long as there is none."""

    __slots__ = ("method", "target")
    _ends_with_head = True

    def __init__(self, at_ns: int, lead: bytes = b"") -> None:
        super().__init__(at_ns, lead)
        self.method = self.target = ""

    @property
    def looks_like_http(self) -> bool:
        """Whether its first line is a request line, once that is here."""
        if self.in_head:
            return b"\n" in self._held and starts_request(self._held)
        return self.method != "" and self.flaw != "bad_request_line"

    def _name(self, line: bytes) -> str:
        found = _REQUEST_LINE.fullmatch(line)
        words: list[bytes] = list(found.groups()) if found else line.split()
        method, target, version, *_ = *words, b"", b"", b""
        self.method, self.target = method.decode("latin-1"), target.decode("latin-1")
        return "bad_request_line" if not found else "" if version in (b"1.0", b"1.1") else "bad_version"

    def _frame(self, named: Named) -> str:
        hosts = len(named.get(b"host", ()))
        return super()._frame(named) or ("" if hosts == 1 else "duplicate_host" if hosts else "no_host")


class Answer(Message):
    """`status` is 0 until the head is read, and for what is no answer. `asked` is the method of its request."""

    __slots__ = ("asked", "status")
    _begins = _ANSWER

    def __init__(self, at_ns: int, asked: str) -> None:
        super().__init__(at_ns)
        self.asked, self.status = asked, 0

    @property
    def is_interim(self) -> bool:
        return 100 <= self.status < 200 and self.status != 101

    @property
    def upgrades_to(self) -> str:
        """The protocol that the connection goes on with after this answer; "" when that is HTTP/1.1."""
        if self.status == 101:
            upgrades = [value for name, value in self.headers if name.lower() == b"upgrade"]
            return (
                b",".join(member.strip() for member in b",".join(upgrades).split(b",")).decode("latin-1") or "unknown"
            )
        return "tunnel" if self.asked == "CONNECT" and 200 <= self.status < 300 else ""

    def _name(self, line: bytes) -> str:
        found = _STATUS_LINE.fullmatch(line)
        self.status = int(found[1]) if found else 0
        return "" if found else "bad_status_line"

    def _frame(self, named: Named) -> str:
        self.whole = (
            0 < self.status < 200 or self.status in (204, 304) or self.asked == "HEAD" or self.upgrades_to != ""
        )
        return "" if self.whole else super()._frame(named)


def _fields(lines: list[bytes], plain: bool) -> tuple[tuple[Field, ...], Named, str]:
    """The header fields, names as they were sent; the values that say where a message ends, and whose it is, by their
    names in lower case; what is wrong with the first field that is not as it should be. `plain`: no value can be bad.
    """
    fields: list[Field] = []
    named: Named = {}
    flaws = []
    for line in lines:
        name, colon, value = line.partition(b":")
        if line[:1] in (b" ", b"\t"):
            flaws.append("obs_fold")
            if fields:
                name, before = fields[-1]
                fields[-1] = (name, b" ".join((before, line.strip())))
                if name.lower() in named:
                    named[name.lower()][-1] = fields[-1][1]
        elif not colon:
            flaws.append("header_without_colon")
        else:
            name, lower, flaw = _known_name(name) if len(name) < _SHORT_BYTES else _name(name)
            fields.append((name, value.strip()))
            if lower in _FRAMING:
                named.setdefault(lower, []).append(fields[-1][1])
            if flaw or (not plain and _BAD_IN_VALUE.search(value)):
                flaws.append(flaw or "bad_header_value")
    return tuple(fields), named, flaws[0] if flaws else ""


def _name(name: bytes) -> tuple[bytes, bytes, str]:
    """The name of a header, in lower case too, and what is wrong with it as it was sent."""
    return name.strip(), name.strip().lower(), "" if _FIELD_NAME.fullmatch(name) else "bad_header_name"


_known_name = lru_cache(maxsize=4096)(_name)


def _members(named: Named, name: bytes) -> list[bytes]:
    """All members of all lists under one name (in lower case)."""
    values = named.get(name)
    return [member.strip() for value in values for member in value.split(b",")] if values else []
