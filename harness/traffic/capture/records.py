"""Capture files -> packets: pcap (micro- and nanoseconds, both byte orders), pcapng, gzip, standard input.

An hour of traffic is tens of gigabytes, so files are read in blocks, and of each block's packets it is told at once
where they are, how long and when. It refuses to guess: what is no capture is the user's error, and a record that makes
no sense ends its file, with the reason in the account and everything before it kept. It never looks inside a packet.
"""

import gzip
import sys
import zlib
from collections.abc import Generator, Iterator, Sequence
from io import BufferedReader
from itertools import groupby
from math import gcd
from mmap import mmap
from operator import itemgetter
from pathlib import Path
from struct import Struct, error, unpack_from
from types import TracebackType
from typing import NamedTuple, Self, cast

import numpy as np
from numpy.typing import NDArray

from harness.model import UsageError
from harness.traffic.capture.account import Account

BLOCK_BYTES = 1 << 20
PEEK_BYTES = 1 << 16
HEAD_BYTES = 24
LARGEST_BYTES = 1 << 22  # of a record or block: capture tools stop at a sixteenth of it, only stored key logs come near
LATEST_NS = 1 << 62  # two centuries from now: no clock says more
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


Column = NDArray[np.int64]
Room = bytes | mmap  # where the bytes of a block are: a slice of either is bytes


class Block(NamedTuple):
    """Packets of one link type as columns: when each was taken, where in `data` it begins, how many bytes of it are
    there, and how many were on the wire."""

    link: int
    data: Room
    at_ns: Column
    starts: Column
    sizes: Column
    lengths: Column

    def packet(self, place: int) -> Packet:
        """One of them, cut out."""
        start = int(self.starts[place])
        data = self.data[start : start + int(self.sizes[place])]
        return Packet(int(self.at_ns[place]), self.link, data, int(self.lengths[place]))


def rows(data: Room, starts: Column, size: int) -> NDArray[np.void]:
    """So many bytes from each start on, as one item each: a view of them as a type of that size has their fields."""
    every = np.ndarray((len(data) - size + 1,), f"V{size}", data, strides=(1,))
    return every[starts]


def packets(paths: Sequence[Path], account: Account) -> Iterator[Packet]:
    """Every packet of the captures, one by one: the plain way, for what is to be held against `blocks`."""
    for block in blocks(paths, account):
        yield from map(block.packet, range(len(block.at_ns)))


def blocks(paths: Sequence[Path], account: Account, block_bytes: int | None = None) -> Iterator[Block]:
    """The packets of the captures, file after file in the order of their first packets; `-` is standard input. A block
    holds until the next one is asked for.

    Memory stays at a few blocks whatever the size. Raises UsageError, as its file is reached, for what is no capture.
    """
    for path in _in_order(paths):
        account.files += 1
        yield from _read(path, account, block_bytes or BLOCK_BYTES)


def _in_order(paths: Sequence[Path]) -> Sequence[Path]:
    if len(paths) == 1:
        return paths
    if STDIN in paths:
        raise UsageError("standard input is read alone: it cannot be looked at ahead, to be put in order with files")
    return sorted(paths, key=_first_ns)


def _first_ns(path: Path) -> int:
    peeked = _read(path, Account(), PEEK_BYTES)
    try:
        return next((int(block.at_ns[0]) for block in peeked), 0)
    finally:
        peeked.close()


def _read(path: Path, account: Account, block_bytes: int) -> Generator[Block, None, None]:
    with _Source(path, account, block_bytes) as source:
        head = source.head(HEAD_BYTES)
        if head[:4] in PCAP and len(head) == HEAD_BYTES:
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
        self.broken, self.end = "", 0
        self._path, self._room = path, mmap(-1, max(block_bytes, HEAD_BYTES))
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

    @property
    def room(self) -> Room:
        """What was read and not yet used, up to `end`: the same memory for every block, for fresh one is dear."""
        return self._room

    def head(self, size: int) -> bytes:
        """So many first bytes, or all there are."""
        self._read_on()
        return self._room[: min(size, self.end)]

    def go_on(self, at: int) -> bool:
        """Keep what is from a place on, at the beginning of the room, and read what follows it; False when no whole
        record can follow."""
        kept = self.end - at
        if kept == len(self._room):
            grown = mmap(-1, 2 * kept)
            grown[:kept] = self._room[:kept]
            self._room = grown
        else:
            self._room.move(0, at, kept)
        self.end = kept
        if self._read_on():
            return True
        if kept or self.broken:
            self.account.truncated_files += 1
            self.account.damage.append(f"{self._path}: {self.broken or 'ends inside a record'}")
        return False

    def damaged(self, reason: str) -> None:
        self.account.damaged_files += 1
        self.account.damage.append(f"{self._path}: {reason}; nothing after it was read")

    def _read_on(self) -> bool:
        """Fill the room; less of it at the end, or where a read fails: what was read before that is kept."""
        begun, view = self.end, memoryview(self._room)
        try:
            while self.end < len(view) and not self.broken and (size := self._file.readinto1(view[self.end :])):
                self.end += size
        except (EOFError, OSError, zlib.error) as why:
            self.broken = str(why)
        return self.end > begun


def _pcap(source: _Source, head: bytes) -> Iterator[Block]:
    order, tick_ns = PCAP[head[:4]]
    link = unpack_from(order + "I", head, 20)[0] & 0xFFFF  # above it: how many bytes of checksum each frame ends with
    size, at, goes_on = Struct(order + "8xI").unpack_from, len(head), True
    while goes_on:
        heads, data, last = [], source.room, source.end - 16
        while at <= last:
            heads.append(at)
            at += 16 + size(data, at)[0]
        if at > source.end:  # the last is not all here
            at = heads.pop()
        if heads:
            yield _counted(_classic(link, order, tick_ns, data, heads), source.account)
        if at <= last and (claimed := size(data, at)[0]) > LARGEST_BYTES:
            return source.damaged(f"a record claims {claimed} bytes")
        at, goes_on = 0, source.go_on(at)
    return None


def _classic(link: int, order: str, tick_ns: int, data: Room, heads: list[int]) -> Block:
    """The packets whose record headers are at the places given."""
    places = np.array(heads)
    seconds, ticks, sizes, lengths = rows(data, places, 16).view(order + "u4").reshape(-1, 4).T.astype(np.int64)
    return Block(link, data, seconds * 1_000_000_000 + ticks * tick_ns, places + 16, sizes, lengths)


def _counted(block: Block, account: Account) -> Block:
    account.packets += len(block.sizes)
    account.bytes += int(block.sizes.sum())
    return block


def _pcapng(source: _Source, head: bytes) -> Iterator[Block]:
    section, goes_on = _Section(head[8:12]), True
    while goes_on:
        found: list[tuple[int, ...]] = []
        at, reason = section.read(source, found)
        for link, alike in groupby(found, key=itemgetter(0)):
            at_ns, starts, sizes, lengths = np.array([each[1:] for each in alike]).T
            yield _counted(Block(link, source.room, at_ns, starts, sizes, lengths), source.account)
        if reason:
            return source.damaged(reason)
        goes_on = source.go_on(at)
    return None


class _Section:
    """What the packets of a pcapng section depend on: its byte order and its interfaces."""

    def __init__(self, magic: bytes) -> None:
        self._begin(magic)

    def _begin(self, magic: bytes) -> None:
        self._order = order = PCAPNG_ORDER[magic]
        self._block = Struct(order + "II").unpack_from
        self._packet = Struct(order + "5I").unpack_from
        self._interfaces: list[tuple[int, int, int, int]] = []  # link type; then ns = count * per // ticks + offset

    def read(self, source: _Source, found: list[tuple[int, ...]]) -> tuple[int, str]:
        """Add the packets of a block of the file to what was found, and take in whatever else is there. Returns where
        that ended, and what is wrong there."""
        at, data = 0, source.room
        try:
            while at <= source.end - 12:
                if data[at : at + 4] == PCAPNG:
                    self._begin(data[at + 8 : at + 12])
                kind, total = self._block(data, at)
                if total < 12 or total % 4 or total > LARGEST_BYTES:
                    return at, f"a block claims {total} bytes"
                if total > source.end - at:
                    break
                if kind == PACKET:
                    found.append(self.packet(data, at, total))
                else:
                    self.tell(kind, data[at + 8 : at + total - 4], source.account)
                at += total
        except (error, LookupError):
            return at, "a block that makes no sense"
        except ValueError as why:
            return at, str(why)
        return at, ""

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

    def packet(self, data: Room, at: int, total: int) -> tuple[int, int, int, int, int]:
        """Of a packet's block: link type, moment, where its bytes begin, how many there are and were. Raises
        struct.error or LookupError for what makes no sense, and ValueError with the reason for what cannot be."""
        interface, high, low, captured, length = self._packet(data, at + 8)
        link, per, ticks, offset_ns = self._interfaces[interface]
        at_ns = (high << 32 | low) * per // ticks + offset_ns
        if captured > total - 32:
            raise ValueError(f"a packet claims {captured} bytes of a block of {total}")
        if abs(at_ns) > LATEST_NS:
            raise ValueError(f"a packet claims to be taken {at_ns} ns after 1970")
        return link, at_ns, at + 28, captured, length

    def _interface(self, body: bytes) -> None:
        options = self._options(body[8:])
        resolution = (options.get(9) or b"\x06")[0]
        ticks = (2 if resolution & 0x80 else 10) ** (resolution & 0x7F)
        shared = gcd(1_000_000_000, ticks)
        offset_ns = self._number(options.get(14, b""), signed=True) * 1_000_000_000
        (link,) = unpack_from(self._order + "H", body)
        self._interfaces.append((link, 1_000_000_000 // shared, ticks // shared, offset_ns))

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
