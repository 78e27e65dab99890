"""Captured traffic as a file: a header with the account of what was seen, then one exchange a line.

It is what `harness import` writes and what `traffic: {replay: FILE}` plays: the requests as they were sent, to the byte
and scrubbed, each with its moment, its connection and what the stack answered then. Whatever the source was (packets,
a HAR file, a trace of token counts), from here on it is the same. Nothing here reads a packet.
"""

import contextlib
import gzip
import lzma
import math
import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import IO, Any, cast

import orjson

from harness.log import write_beside
from harness.model import NEVER, Finish, UsageError

VERSION = 1
_UNPACKED: dict[str, Any] = {".gz": lambda file: gzip.GzipFile(fileobj=file), ".xz": lzma.LZMAFile}


@dataclass(frozen=True, slots=True)
class Answered:
    """What became of a request when it was captured; moments in seconds from the request's first byte.

    `status` is 0 when no answer was seen; `whole` is False for an answer that was cut short. `lost` says why the
    capture has not all of it, or cannot tell: such an answer says nothing of the stack. `shape` is `answers.shape_sum`.
    """

    status: int = 0
    first_byte_s: float = NEVER
    first_token_s: float = NEVER
    last_token_s: float = NEVER
    ended_s: float = NEVER
    gaps_s: tuple[float, ...] = ()
    tokens_in: int = 0
    tokens_out: int = 0
    finish: Finish = Finish.UNSAID
    shape: int = 0
    whole: bool = False
    error: bool = False
    lost: str = ""


@dataclass(frozen=True, slots=True)
class Recorded:
    """One captured request.

    `at_s` is its first byte, in seconds from the recording's first request; `lead_s` how long before that its
    connection was opened for it (None: it was open already, or nobody knows). `connection` and `turn` say where it
    stood; `session` names the conversation it belongs to, if anything told. `raw` are its bytes, head and body,
    scrubbed; `flaw` says what is wrong with them as HTTP or JSON. `give_up_s` and `half_close_s` are the client
    closing, counted from `at_s`. `blocks` are numbers for the parts of 512 tokens of a prompt without bytes: prompts
    that begin alike have the same.
    """

    at_s: float
    connection: int
    turn: int
    method: str
    path: str
    raw: bytes
    answer: Answered
    client: str = ""
    session: str = ""
    flaw: str = ""
    stream: bool = False
    prompt_tokens: int = 0
    max_tokens: int = 0
    lead_s: float | None = None
    pipelined: bool = False
    give_up_s: float | None = None
    half_close_s: float | None = None
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RecordingHeader:
    """The first line. `account` is what the importer saw and what became of it; `lost_share` is the share of the
    requests seen that could not be taken whole; `shapes` are the members that each `shape` stands for."""

    sources: tuple[str, ...]
    requests: int
    connections: int
    lasts_s: float
    lost_share: float = 0.0
    account: Mapping[str, Any] = field(default_factory=dict)
    scrubbed: Mapping[str, int] = field(default_factory=dict)
    shapes: Mapping[str, list[str]] = field(default_factory=dict)
    timing_only: bool = False  # the source had no bytes and no answers: they are made up of its token counts


def write(path: Path, header: RecordingHeader, recorded: Iterable[Recorded]) -> None:
    """Write a recording whole or not at all. The exchanges come in the order of their moments."""
    write_lines(path, header, map(line, recorded))


def write_lines(path: Path, header: RecordingHeader, lines: Iterable[bytes]) -> None:
    """As `write`, of exchanges that are lines already."""
    write_beside(path, chain([_header_line(header)], lines))


def read_header(path: Path) -> RecordingHeader:
    """The account alone. Raises UsageError when the file is no recording, or one of another version."""
    with _opened(path) as file:
        return _header(path, file.readline())


def read(path: Path) -> tuple[RecordingHeader, Iterator[Recorded]]:
    """The account, and the exchanges as they are read. Raises UsageError, with the line, on what is no exchange."""
    header = read_header(path)

    def exchanges() -> Iterator[Recorded]:
        count = 0
        with _opened(path) as file:
            file.readline()
            for count, line in enumerate(file, start=1):
                try:
                    yield read_line(line)
                except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError):
                    raise UsageError("not an exchange of a recording", f"{path}:{count + 1}") from None
        if count != header.requests:
            raise UsageError(f"{path} holds {count} of its {header.requests} exchanges: import the capture again")

    return header, exchanges()


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """The file, unpacked when its name ends in .gz or .xz."""
    try:
        with open(path, "rb") as file:
            unpack = _UNPACKED.get(path.suffix)
            yield cast(IO[bytes], unpack(file)) if unpack else file
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"the recording {path} cannot be read: {why}") from None


def _header(path: Path, line: bytes) -> RecordingHeader:
    try:
        value = orjson.loads(line)
        version = value.pop("recording")
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        raise UsageError(f"{path} is no recording: `harness import CAPTURE -o {path}` makes one") from None
    if version != VERSION:
        raise UsageError(f"{path} is a recording of version {version}, this is for {VERSION}: import the capture again")
    try:
        return RecordingHeader(**{**value, "sources": tuple(value["sources"])})
    except (KeyError, TypeError):
        raise UsageError(f"{path}: the header of the recording is damaged: import the capture again") from None


def _header_line(header: RecordingHeader) -> bytes:
    return orjson.dumps({"recording": VERSION, **_filled(header)}) + b"\n"


def _filled(value: Any) -> dict[str, Any]:
    """The fields of a value that differ from their defaults; moments that never came are left out."""
    names, nothings, held_by = _fields(value.__class__)
    return {
        name: held
        for name, nothing, held in zip(names, nothings, held_by(value), strict=True)
        if held is not nothing[0] and held not in nothing and not (isinstance(held, float) and math.isnan(held))
    }


@cache
def _fields(kind: type) -> tuple[tuple[str, ...], tuple[Any, ...], Callable[[Any], tuple[Any, ...]]]:
    """Their names, the values of each that say nothing, its default first, and what reads all of them at once."""
    names = tuple(each.name for each in fields(kind))
    return names, tuple((each.default, {}) for each in fields(kind)), attrgetter(*names)


def line(one: Recorded) -> bytes:
    """One exchange as its line of the file."""
    value = _filled(one)
    answer = _filled(one.answer)
    if gaps_s := answer.pop("gaps_s", None):
        answer["gaps_us"] = [round(1e6 * gap_s) for gap_s in gaps_s]
    try:
        value["raw"] = one.raw.decode()
    except UnicodeDecodeError:
        value["raw_base64"] = b64encode(value.pop("raw")).decode()
    return orjson.dumps(value | {"answer": answer}) + b"\n"


def moved(line: bytes, at_s: float) -> bytes:
    """The line of an exchange, which opens with its moment, for another moment."""
    return b'{"at_s":%b%b' % (orjson.dumps(at_s), line[line.index(b",") :])


def read_line(line: bytes) -> Recorded:
    """The exchange of a line. Raises ValueError, KeyError, TypeError or AttributeError on what is none."""
    value = orjson.loads(line)
    answer = value.pop("answer")
    if gaps_us := answer.pop("gaps_us", None):
        answer["gaps_s"] = tuple(gap_us / 1e6 for gap_us in gaps_us)
    if "finish" in answer:
        answer["finish"] = Finish(answer["finish"])
    coded = value.pop("raw_base64", None)
    raw = b64decode(coded, validate=True) if coded is not None else value.pop("raw").encode()
    blocks = tuple(value.pop("blocks", ()))
    return Recorded(**value, raw=raw, answer=Answered(**answer), blocks=blocks)
