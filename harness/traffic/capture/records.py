"""Capture files -> packets: pcap (micro- and nanoseconds, both byte orders), pcapng, gzip, standard input.

An hour of traffic is tens of gigabytes and this loop turns once for every packet of it, so files are read in blocks and
each record is cut out with one unpack. It refuses to guess: what is no capture is the user's error, and a record that
makes no sense ends its file, with the reason in the account and everything before it kept. It never looks inside a
packet.
"""

import gzip
import sys
import zlib
from collections.abc import Generator, Iterator, Sequence
from io import BufferedReader
from math import gcd
from pathlib import Path
from struct import Struct, error, unpack_from
from types import TracebackType
from typing import NamedTuple, Self, cast

from harness.model import UsageError
from harness.traffic.capture.account import Account

BLOCK_BYTES = 1 << 20
PEEK_BYTES = 1 << 16
LARGEST_BYTES = 1 << 22  # of a record or block: capture tools stop at a sixteenth of it, only stored key logs come near
STDIN = Path("-")
GZIP = b"\x1f\x8b"
PCAP = {  # magic -> byte order, nanoseconds in a tick
    b"\xd4\xc3\xb2\xa1": ("<", 1000),
    b"\xa1\xb2\xc3\xd4": (">", 1000),
    b"\x4d\x3c\xb2\xa1": ("<", 1),
    b"\xa1\xb2\x3c\x4d": (">", 1),
}
PCAPNG = b"\x0a\x0d\x0d\x0a"
PCAPNG_ORDER = {b"\x4d\x3c\x2b\x1a": "<", b"\x1a\x2b\x3c\x4d": ">"}
SECTION, INTERFACE, OLD_PACKET, SIMPLE_PACKET, STATISTICS, PACKET = 0x0A0D0D0A, 1, 2, 3, 5, 6


class Packet(NamedTuple):
    """One record of a capture: when it was taken, its LINKTYPE number, its bytes, and its length on the wire."""

    at_ns: int
    link: int
    data: bytes
    length: int


def packets(paths: Sequence[Path], account: Account) -> Iterator[Packet]:
    """Every packet of the captures, file after file in the order of their first packets; `-` is standard input.

    Memory stays at a few blocks whatever the size. Raises UsageError, as its file is reached, for what is no capture.
    """
    for path in _in_order(paths):
        account.files += 1
        yield from _read(path, account, BLOCK_BYTES)


def _in_order(paths: Sequence[Path]) -> Sequence[Path]:
    if len(paths) == 1:
        return paths
    if STDIN in paths:
        raise UsageError("standard input is read alone: it cannot be looked at ahead, to be put in order with files")
    return sorted(paths, key=_first_ns)


def _first_ns(path: Path) -> int:
    peeked = _read(path, Account(), PEEK_BYTES)
    try:
        return next((packet.at_ns for packet in peeked), 0)
    finally:
        peeked.close()


def _read(path: Path, account: Account, block_bytes: int) -> Generator[Packet, None, None]:
    with _Source(path, account, block_bytes) as source:
        head = source.head(24)
        if head[:4] in PCAP and len(head) >= 24:
            yield from _pcap(source, head)
        elif head[:4] == PCAPNG and head[8:12] in PCAPNG_ORDER:
            yield from _pcapng(source, head)
        else:
            raise UsageError(_no_capture(path, head, source.broken))


def _no_capture(path: Path, head: bytes, broken: str) -> str:
    name = "standard input" if path == STDIN else str(path)
    if broken:
        return f"{name} is compressed and cannot be unpacked: {broken}"
    if not head:
        return f"{name} is empty: capture again, `harness capture` prints the command"
    if head[:4] in PCAP or head[:4] == PCAPNG:
        return f"{name} ends inside the header of a capture, after {len(head)} bytes: capture again"
    return (
        f"{name} is no capture: it begins with {head[:16]!r}; wanted is what `tcpdump -w` writes (pcap or pcapng, "
        f"also gzipped), and other sources are named with --from"
    )


class _Source:
    """A file in blocks. Where it breaks off is told in the account, and what came before that is kept."""

    def __init__(self, path: Path, account: Account, block_bytes: int) -> None:
        self.account = account
        self.broken = ""
        self._path, self._block_bytes = path, block_bytes
        try:
            self._raw = cast(BufferedReader, sys.stdin.buffer) if path == STDIN else open(path, "rb")  # noqa: SIM115
            zipped = self._raw.peek(2)[:2] == GZIP
        except OSError as why:
            raise UsageError(f"the capture {path} cannot be read: {why.strerror}") from None
        self._file = gzip.GzipFile(fileobj=self._raw) if zipped else self._raw

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, why: BaseException | None, at: TracebackType | None) -> None:
        if self._path != STDIN:
            self._raw.close()

    def head(self, size: int) -> bytes:
        """At least so many first bytes, or all there are."""
        head = b""
        while len(head) < size and (more := self._more()):
            head += more
        return head

    def grow(self, rest: bytes) -> bytes:
        """The rest of a block with what follows it; empty when no whole record can follow."""
        if more := self._more():
            return rest + more
        if rest or self.broken:
            self.account.truncated_files += 1
            self.account.damage.append(f"{self._path}: {self.broken or 'ends inside a record'}")
        return b""

    def damaged(self, reason: str) -> None:
        self.account.damaged_files += 1
        self.account.damage.append(f"{self._path}: {reason}; nothing after it was read")

    def _more(self) -> bytes:
        try:
            return self._file.read1(self._block_bytes)  # one read: a pipe gives what it has, broken gzip what was whole
        except (EOFError, OSError, zlib.error) as why:
            self.broken = str(why)
            return b""


def _pcap(source: _Source, block: bytes) -> Iterator[Packet]:
    order, tick_ns = PCAP[block[:4]]
    link = unpack_from(order + "I", block, 20)[0] & 0xFFFF  # above it: how many bytes of checksum each frame ends with
    record, new, account = Struct(order + "IIII").unpack_from, tuple.__new__, source.account
    at = 24
    while block:
        first, count, last = at, 0, len(block) - 16
        while at <= last:
            seconds, ticks, captured, length = record(block, at)
            if captured > last - at:
                break
            start = at + 16
            at = start + captured
            count += 1
            yield new(Packet, (seconds * 1_000_000_000 + ticks * tick_ns, link, block[start:at], length))
        account.packets += count
        account.bytes += at - first - 16 * count
        if at <= last and captured > LARGEST_BYTES:
            return source.damaged(f"a record claims {captured} bytes")
        block, at = source.grow(block[at:]), 0
    return None


def _pcapng(source: _Source, block: bytes) -> Iterator[Packet]:
    section = _Section(block[8:12])
    new, account, at = tuple.__new__, source.account, 0
    while block:
        last = len(block) - 12
        try:
            while at <= last:
                if block[at : at + 4] == PCAPNG:
                    section = _Section(block[at + 8 : at + 12])
                kind, total = section.block(block, at)
                if total < 12 or total % 4 or total > LARGEST_BYTES:
                    return source.damaged(f"a block claims {total} bytes")
                if total > last + 12 - at:
                    break
                if kind == PACKET:
                    interface, high, low, captured, length = section.packet(block, at + 8)
                    link, per, ticks, offset_ns = section.interfaces[interface]
                    if captured > total - 32:
                        return source.damaged(f"a packet claims {captured} bytes of a block of {total}")
                    account.packets += 1
                    account.bytes += captured
                    at_ns = (high << 32 | low) * per // ticks + offset_ns
                    yield new(Packet, (at_ns, link, block[at + 28 : at + 28 + captured], length))
                else:
                    section.tell(kind, block[at + 8 : at + total - 4], account)
                at += total
        except (error, LookupError):
            return source.damaged("a block that makes no sense")
        block, at = source.grow(block[at:]), 0
    return None


class _Section:
    """What the packets of a pcapng section depend on: its byte order and its interfaces."""

    def __init__(self, magic: bytes) -> None:
        self._order = order = PCAPNG_ORDER[magic]
        self.block = Struct(order + "II").unpack_from
        self.packet = Struct(order + "5I").unpack_from
        self.interfaces: list[tuple[int, int, int, int]] = []  # link type; then ns = count * per // ticks + offset

    def tell(self, kind: int, body: bytes, account: Account) -> None:
        """Take in a block that is no packet, or a packet that cannot be used for it has no time."""
        if kind == INTERFACE:
            self._interface(body)
        elif kind == STATISTICS:
            options = self._options(body[12:])
            for code in (5, 7):  # by the interface, by the system
                account.dropped += self._number(options.get(code, b""))
        elif kind in (OLD_PACKET, SIMPLE_PACKET):
            account.packets += 1
            account.unreadable += 1

    def _interface(self, body: bytes) -> None:
        options = self._options(body[8:])
        resolution = (options.get(9) or b"\x06")[0]
        ticks = (2 if resolution & 0x80 else 10) ** (resolution & 0x7F)
        shared = gcd(1_000_000_000, ticks)
        offset_ns = self._number(options.get(14, b""), signed=True) * 1_000_000_000
        (link,) = unpack_from(self._order + "H", body)
        self.interfaces.append((link, 1_000_000_000 // shared, ticks // shared, offset_ns))

    def _options(self, body: bytes) -> dict[int, bytes]:
        options, at = {}, 0
        while at + 4 <= len(body):
            code, size = unpack_from(self._order + "HH", body, at)
            if code == 0:
                break
            options[code] = body[at + 4 : at + 4 + size]
            at += 4 + (size + 3) // 4 * 4
        return options

    def _number(self, value: bytes, signed: bool = False) -> int:
        return int.from_bytes(value[:8], "little" if self._order == "<" else "big", signed=signed)
