"""Content codings of a body, taken off as its pieces come: gzip, deflate, br and zstd.

Each piece keeps its moment, so an event of a compressed stream is dated by the packet that made it readable. A body
that cannot be decoded, or that swells beyond all measure, is refused: half a text is not guessed at.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator

LIMIT_BYTES = 64 << 20  # of a decoded body: as much as a message may have at all
_SLICE_BYTES = 1024  # decoded in one go: a kilobyte of zlib holds at most a megabyte, so the limit is never far passed

Piece = tuple[int, bytes]
Decode = Callable[[bytes], bytes]


class Undecodable(Exception):  # noqa: N818 - it says what a body is
    """What is wrong with a coded body, in a few words."""


def decoded(pieces: Iterable[Piece], codings: str, limit_bytes: int = LIMIT_BYTES) -> Iterator[Piece]:
    """The pieces without their codings, which are named as in Content-Encoding. Raises Undecodable."""
    for coding in reversed([name.strip().lower() for name in codings.split(",")]):
        if coding not in ("", "identity"):
            pieces = _decoded(pieces, coding, limit_bytes)
    yield from pieces


def _decoded(pieces: Iterable[Piece], coding: str, limit_bytes: int) -> Iterator[Piece]:
    decode, total_bytes = _decoder(coding), 0
    for at_ns, piece in pieces:
        for start in range(0, len(piece), _SLICE_BYTES):
            try:
                plain = decode(piece[start : start + _SLICE_BYTES])
            except Exception as error:  # each library has errors of its own, and all mean the same
                raise Undecodable(f"not {coding}: {error}") from error
            total_bytes += len(plain)
            if total_bytes > limit_bytes:
                raise Undecodable(f"{coding} of more than {limit_bytes} bytes")
            if plain:
                yield at_ns, plain


def _decoder(coding: str) -> Decode:
    if coding in ("gzip", "x-gzip"):
        return _Zlib(zlib.MAX_WBITS | 16)
    if coding == "deflate":
        return _Zlib(zlib.MAX_WBITS)
    if coding in ("br", "zstd"):
        return _brotli() if coding == "br" else _zstd()
    raise Undecodable(f"the coding {coding[:20]} is not known")


class _Zlib:
    """gzip of several members, and deflate with its zlib header or, as some servers send it, without."""

    def __init__(self, wbits: int) -> None:
        self._wbits, self._begun = wbits, False
        self._inner = zlib.decompressobj(wbits)

    def __call__(self, data: bytes) -> bytes:
        plain = b"".join(self._members(data))
        self._begun = True
        return plain

    def _members(self, data: bytes) -> Iterator[bytes]:
        while data:
            try:
                yield self._inner.decompress(data)
            except zlib.error:
                if self._begun or self._wbits != zlib.MAX_WBITS:
                    raise
                self._wbits, self._inner = -zlib.MAX_WBITS, zlib.decompressobj(-zlib.MAX_WBITS)
                yield self._inner.decompress(data)
            data = self._inner.unused_data
            if data:
                self._begun, self._inner = True, zlib.decompressobj(self._wbits)


def _brotli() -> Decode:
    import brotli

    inner = brotli.Decompressor()

    def decode(data: bytes) -> bytes:
        plain = inner.process(data, output_buffer_limit=LIMIT_BYTES)
        if not inner.can_accept_more_data():
            raise Undecodable("too large")
        return bytes(plain)

    return decode


def _zstd() -> Decode:
    import zstandard

    inner = zstandard.ZstdDecompressor(max_window_size=1 << 27).decompressobj()
    return lambda data: bytes(inner.decompress(data))
