"""Recordings -> the formats of other tools: Mooncake traces, AIPerf's raw payloads, HTTP archives (HAR 1.2).

None of them can say all that a recording says. What cannot be said is left out, and counted by its reason.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from hashlib import blake2b
from pathlib import Path
from typing import Any

import orjson

from harness.log import write_beside
from harness.model import UsageError
from harness.traffic import recording
from harness.traffic.capture import framing
from harness.traffic.capture.coding import Undecodable, decoded
from harness.traffic.dialects import speaks
from harness.traffic.recording import Answered, Recorded
from harness.traffic.traces.mooncake import BLOCK_TOKENS

_PROMPT = ("tools", "instructions", "messages", "prompt", "input")  # members that make a prompt, as templates join them
_FIRST = datetime(1970, 1, 1, tzinfo=UTC)  # a recording holds no date


class Format(StrEnum):
    """What a recording can be exported to."""

    MOONCAKE = "mooncake"
    AIPERF = "aiperf"
    HAR = "har"


@dataclass(frozen=True, slots=True)
class Exported:
    """How many requests were written, and how many were not, by the reason."""

    written: int
    left_out: Mapping[str, int]


def export(path: Path, to: Format, out: Path) -> Exported:
    """Write a recording in another format, whole or not at all.

    Raises UsageError when it is no recording, or has nothing that the format can hold.
    """
    if out.exists() and out.samefile(path):
        raise UsageError(f"{out} is what would be read: give the export another name")
    left_out, written = Counter[str](), 0

    def counted() -> Iterator[bytes]:
        nonlocal written
        for piece in _WRITERS[to](path, left_out):
            written += 1
            yield piece
        if not written:
            raise UsageError(f"nothing of {path} can be said as {to}: {_counted(left_out)}")

    try:
        write_beside(out, _archive(counted()) if to == Format.HAR else counted())
    except OSError as error:
        raise UsageError(f"{out} cannot be written: {error.strerror}") from None
    return Exported(written, left_out)


def _counted(left_out: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {why}" for why, count in left_out.items()) or "there is no request in it"


# Mooncake -----------------------------------------------------------------------------------------------------------


def mooncake(path: Path, left_out: Counter[str]) -> Iterator[bytes]:
    """Lines of a Mooncake trace. Blocks are cut where 512 tokens end on average in this recording, for all alike:
    what begins alike has the same ids, whatever the model's tokenizer."""
    per_block, ids = _bytes_per_block(path), _Ids()
    for one in recording.read(path)[1]:
        if not speaks(one.path):
            left_out["to a path that takes no prompt"] += 1
        elif not one.prompt_tokens:
            left_out["without a count of their tokens"] += 1
        else:
            blocks = -(-one.prompt_tokens // BLOCK_TOKENS)
            row = {
                "timestamp": round(1e3 * one.at_s),
                "input_length": one.prompt_tokens,
                "output_length": one.answer.tokens_out or one.max_tokens,
                "hash_ids": ids.of(_block_names(one, blocks, per_block)),
            }
            yield orjson.dumps(row) + b"\n"


def _bytes_per_block(path: Path) -> int:
    """How many bytes of a prompt make a block, over all of them."""
    texts = ((len(_prompt(one)), one.prompt_tokens) for one in recording.read(path)[1] if one.prompt_tokens)
    held = [(size, tokens) for size, tokens in texts if size]
    tokens = sum(tokens for _, tokens in held)
    return max(1, round(BLOCK_TOKENS * sum(size for size, _ in held) / tokens)) if tokens else 1


class _Ids:
    """Small numbers for names, in the order of their coming; None gets a number of its own each time."""

    def __init__(self) -> None:
        self._known: dict[bytes | int, int] = {}
        self._count = 0

    def of(self, names: Iterable[bytes | int | None]) -> list[int]:
        return [self._id(name) for name in names]

    def _id(self, name: bytes | int | None) -> int:
        if name is not None and name in self._known:
            return self._known[name]
        number, self._count = self._count, self._count + 1
        if name is not None:
            self._known[name] = number
        return number


def _block_names(one: Recorded, count: int, per_block: int) -> Sequence[bytes | int | None]:
    """A name for each block of a prompt, which stands for all of the prompt up to its end; None where nobody knows."""
    names: list[bytes | int | None] = list(one.blocks)
    text, digest = _prompt(one), blake2b(digest_size=16)
    for at in range(0, len(text), per_block):
        digest.update(text[at : at + per_block])
        names.append(digest.digest())
    return (names + [None] * count)[:count]


def _prompt(one: Recorded) -> bytes:
    asked = _json(one)
    return b"".join(_dumped(asked[name]) for name in _PROMPT if name in asked) if asked else b""


# AIPerf -------------------------------------------------------------------------------------------------------------


def aiperf(path: Path, left_out: Counter[str]) -> Iterator[bytes]:
    """Bodies of AIPerf's `raw_payload`, one a line: it has no moments, and takes conversations only."""
    for one in recording.read(path)[1]:
        asked = _json(one)
        if one.flaw:
            left_out["malformed"] += 1
        elif not asked or not isinstance(asked.get("messages"), list):
            left_out["without messages"] += 1
        elif line := _dumped(asked):
            yield line + b"\n"
        else:
            left_out["nested too deep"] += 1


# HAR ----------------------------------------------------------------------------------------------------------------


def har(path: Path, left_out: Counter[str]) -> Iterator[bytes]:
    """Entries of an archive: whole requests with a body of text, and what is known of their answers."""
    for one in recording.read(path)[1]:
        request = _parsed(one)
        if request is None or request.flaw:
            left_out["malformed" if one.raw else "without bytes"] += 1
            continue
        try:
            posted = _body(request).decode()
        except UnicodeDecodeError:
            left_out["with a body that is no text"] += 1
            continue
        yield orjson.dumps(_entry(one, request, posted))


def _archive(entries: Iterable[bytes]) -> Iterator[bytes]:
    creator = orjson.dumps({"name": "harness", "version": str(recording.VERSION)})
    comment = orjson.dumps("moments count from 1970: a recording holds no date")
    yield b'{"log":{"version":"1.2","creator":%b,"comment":%b,"entries":[\n' % (creator, comment)
    for place, entry in enumerate(entries):
        yield b",\n" + entry if place else entry
    yield b"\n]}}\n"


def _entry(one: Recorded, request: framing.Request, posted: str) -> dict[str, Any]:
    timings = _timings(one.answer)
    headers = [{"name": name.decode("latin-1"), "value": value.decode("latin-1")} for name, value in request.headers]
    named = {each["name"].lower(): each["value"] for each in headers}
    return {
        "startedDateTime": (_FIRST + timedelta(seconds=one.at_s)).isoformat(timespec="microseconds"),
        "time": sum(each for each in timings.values() if each > 0),
        "request": {
            "method": one.method,
            "url": f"http://{named.get('host', '')}{request.target}",
            "httpVersion": "HTTP/1.1",
            "cookies": [],
            "headers": headers,
            "queryString": [],
            "headersSize": len(one.raw) - len(posted.encode()),
            "bodySize": len(posted.encode()),
        }
        | ({"postData": {"mimeType": named.get("content-type", ""), "text": posted}} if posted else {}),
        "response": {
            "status": one.answer.status,
            "statusText": "",
            "httpVersion": "HTTP/1.1",
            "cookies": [],
            "headers": [],
            "content": {"size": -1, "mimeType": "text/event-stream" if one.stream else ""},
            "redirectURL": "",
            "headersSize": -1,
            "bodySize": -1,
        },
        "cache": {},
        "timings": timings,
        "connection": str(one.connection),
    }


def _timings(answer: Answered) -> dict[str, float]:
    """In ms; -1 says of receiving that nobody knows, as HAR has it."""
    wait_s = 0.0 if math.isnan(answer.first_byte_s) else answer.first_byte_s
    receive_s = answer.ended_s - wait_s
    return {"send": 0.0, "wait": 1e3 * wait_s, "receive": -1 if math.isnan(receive_s) else 1e3 * receive_s}


# What the bytes say -------------------------------------------------------------------------------------------------


def _parsed(one: Recorded) -> framing.Request | None:
    """The request as HTTP, when it is whole."""
    request = framing.Request(0)
    rest = request.take(0, one.raw) if one.raw else b""
    return request if request.whole and not rest else None


def _body(request: framing.Request) -> bytes:
    return b"".join(piece for _, piece in request.pieces)


def _json(one: Recorded) -> dict[str, Any] | None:
    """The body of a request when it is an object of JSON, compressed or not."""
    request = _parsed(one)
    if request is None:
        return None
    codings = b",".join(value for name, value in request.headers if name.lower() == b"content-encoding")
    body = _body(request)
    try:
        if codings:
            body = b"".join(piece for _, piece in decoded([(0, body)], codings.decode(errors="replace")))
        value = orjson.loads(body)
    except (Undecodable, orjson.JSONDecodeError):
        return None
    return value if isinstance(value, dict) else None


def _dumped(value: object) -> bytes:
    """A value as JSON; nothing where it is nested deeper than can be written."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        return b""


_WRITERS: Mapping[Format, Callable[[Path, Counter[str]], Iterator[bytes]]] = {
    Format.MOONCAKE: mooncake,
    Format.AIPERF: aiperf,
    Format.HAR: har,
}
