"""The log as files: how a run is written as it goes, and how what was written is read, by those who follow and after.

A run directory holds `run.json` (provenance, and the origin of its clock), `log.NAME.jsonl` (events and readings, a
flushed line each) and `log.NAME.bin` (observations in blocks, each with its checksum). All are written append-only or
beside-and-renamed, so that whatever dies leaves files that are readable up to the last whole line or block. Nothing is
repaired: who asks is told what could not be read.
"""

import contextlib
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from harness.model import NEVER, Event, Observation, Reading

MAGIC = b"harness observations 2\n"
_BLOCK = struct.Struct("<4sIII")  # marker, records, bytes of payload, crc32 of payload
_MARKER = b"OBS1"
_RECORD = struct.Struct("<I6d2IHBBHffBII")
RECORD = np.dtype(
    [
        ("index", "<u4"),
        *((name, "<f8") for name in ("due_s", "sent_s", "first_byte_s", "first_token_s", "last_token_s", "ended_s")),
        ("tokens_in", "<u4"),
        ("tokens_out", "<u4"),
        ("status", "<u2"),
        ("outcome", "u1"),
        ("tags", "u1"),
        ("worker", "<u2"),
        ("receive_lag_s", "<f4"),
        ("connect_s", "<f4"),
        ("finish", "u1"),
        ("shape", "<u4"),
        ("gaps", "<u4"),
    ]
)
BLOCK_BYTES = 1 << 18


@cache
def _gaps_of(count: int) -> struct.Struct:
    """The format of so many gaps: making it anew takes as long as packing them."""
    return struct.Struct(f"<{count}f")


class ObservationLog:
    """Spools observations to `path` in blocks; `flush` makes the block at hand readable by others.

    Costs about 3 us an observation of 31 gaps. Raises OSError when the disk takes no more: what was flushed stays
    readable.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._records, self._gaps, self._count = bytearray(), bytearray(), 0
        if os.fstat(self._fd).st_size == 0:
            _write_all(self._fd, MAGIC)

    def append(self, seen: Observation) -> None:
        gaps_s = seen.gaps_s
        self._records += _RECORD.pack(*seen[:-1], len(gaps_s))
        self._gaps += _gaps_of(len(gaps_s)).pack(*gaps_s)
        self._count += 1
        if len(self._records) + len(self._gaps) >= BLOCK_BYTES:
            self.flush()

    def flush(self) -> None:
        if self._count:
            block = self.take()
            _write_all(self._fd, block)

    def take(self) -> bytes:
        """The block at hand as bytes, for a worker on another machine; empty when nothing waits."""
        if not self._count:
            return b""
        payload = bytes(self._records + self._gaps)
        block = _BLOCK.pack(_MARKER, self._count, len(payload), zlib.crc32(payload)) + payload
        self._records, self._gaps, self._count = bytearray(), bytearray(), 0
        return block

    def write_block(self, block: bytes) -> None:
        """Add a block that another worker's `take` made."""
        _write_all(self._fd, block)

    def close(self) -> None:
        self.flush()
        os.close(self._fd)


class Log:
    """Events and readings of one process, a line each, on disk when the call returns."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def event(self, event: Event) -> None:
        self._line({"at_s": event.at_s, "event": event.kind, "name": event.name, "detail": event.detail})

    def reading(self, reading: Reading) -> None:
        self._line(
            {"at_s": reading.at_s, "reading": reading.name, "value": reading.value, "labels": dict(reading.labels)}
        )

    def _line(self, value: Mapping[str, Any]) -> None:
        _write_all(self._fd, orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n")

    def close(self) -> None:
        os.close(self._fd)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def write_beside(path: Path, data: bytes | Iterable[bytes]) -> None:
    """Write a file whole or not at all, from its bytes or piece by piece: beside, synced, then renamed."""
    beside = path.with_name(f".{path.name}.part")
    try:
        with open(beside, "wb", buffering=1 << 20) as file:
            file.writelines([data] if isinstance(data, bytes) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)  # there only when the writing failed


def read_run_json(run_dir: Path, damage: list[str] | None = None) -> dict[str, Any]:
    """Provenance of a run; {} when the run died before it was written. With `damage`, says that it is not readable."""
    try:
        return dict(orjson.loads((run_dir / "run.json").read_bytes()).items())
    except FileNotFoundError:
        return {}
    except (orjson.JSONDecodeError, AttributeError):
        if damage is not None:
            damage.append("run.json: not readable")
        return {}


class Blocks:
    """Reads the whole blocks added to a file since the last call: for live views and for wrecks alike."""

    def __init__(self, path: Path) -> None:
        self.path, self._at = path, 0

    def new(self, damage: list[str] | None = None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields (records, gaps) of each new whole block. With `damage`, says what could not be read."""
        with open(self.path, "rb") as file:
            file.seek(self._at)
            if self._at == 0:
                if (start := file.read(len(MAGIC))) != MAGIC:
                    if damage is not None:
                        damage.append(f"{self.path.name}: does not begin as a log of observations ({start[:16]!r})")
                    return
                self._at = len(MAGIC)
            while head := file.read(_BLOCK.size):
                block = self._block(head, file.read, damage)
                if block is None:
                    return
                self._at = file.tell()
                yield block

    def _block(self, head: bytes, read: Any, damage: list[str] | None) -> tuple[np.ndarray, np.ndarray] | None:
        trouble = "ends inside a block"
        if len(head) == _BLOCK.size:
            marker, count, size, crc = _BLOCK.unpack(head)
            if marker != _MARKER or size < count * RECORD.itemsize:
                trouble = "holds something that is no block"
            elif len(payload := read(size)) == size:
                if zlib.crc32(payload) == crc:
                    records = np.frombuffer(payload, dtype=RECORD, count=count)
                    return records, np.frombuffer(payload, dtype="<f4", offset=count * RECORD.itemsize)
                trouble = "holds a block whose checksum differs"
        if damage is not None:
            damage.append(f"{self.path.name}: {trouble} at byte {self._at}")
        return None


def read_log(path: Path, damage: list[str]) -> Iterator[Event | Reading]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield _entry(line)
            except _NO_ENTRY:
                damage.append(f"{path.name}:{number}: not an entry")


_NO_ENTRY = (ValueError, KeyError, TypeError, AttributeError)


def _entry(line: bytes) -> Event | Reading:
    """One line of a log. Raises ValueError, KeyError, TypeError or AttributeError when it is damaged."""
    value = orjson.loads(line)
    at_s = float(value["at_s"])
    if "event" in value:
        return Event(at_s, str(value["event"]), str(value["name"]), dict(value["detail"].items()))
    measured = NEVER if value["value"] is None else float(value["value"])
    return Reading(at_s, str(value["reading"]), measured, {key: str(label) for key, label in value["labels"].items()})


class Lines:
    """Reads the whole lines added to a log since the last call: for live views, which leave damage to the judge."""

    def __init__(self, path: Path) -> None:
        self.path, self._at = path, 0

    def new(self) -> Iterator[Event | Reading]:
        with open(self.path, "rb") as file:
            file.seek(self._at)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._at += len(line)
                with contextlib.suppress(*_NO_ENTRY):
                    yield _entry(line)
