"""The log's files: blocks and lines on disk, followed while they grow."""

import os
from pathlib import Path

import numpy as np
import pytest

from harness import log as logs
from harness.log import RECORD, Blocks, Log, ObservationLog, write_beside
from harness.model import Event, Observation


def test_the_record_and_the_array_agree() -> None:
    """What the writer packs and what the reader maps have the same size and the same fields in the same order."""
    assert logs._RECORD.size == RECORD.itemsize
    assert RECORD.names == (*Observation._fields[:-1], "gaps")
    values = (1, *(float(k) for k in range(6)), 7, 8, 9, 10, 11, 12, 13.0, 14.0, 15, 16, 17)
    packed = np.frombuffer(logs._RECORD.pack(*values), dtype=RECORD)
    assert packed[0].item() == values


def test_blocks_are_read_as_they_come(tmp_path: Path) -> None:
    """A live reader gets each block once, and waits at one that is not whole yet."""
    path = tmp_path / "log.player-0.bin"
    log, live = ObservationLog(path), Blocks(path)
    assert list(live.new()) == []
    log.append(Observation(0, 0.0))
    log.flush()
    assert [len(records) for records, _ in live.new()] == [1]
    log.append(Observation(1, 1.0))
    block = log.take()
    log.write_block(block[:20])
    assert list(live.new()) == []
    log.write_block(block[20:])
    assert [records["index"].tolist() for records, _ in live.new()] == [[1]]
    assert list(live.new()) == []


def test_a_full_disk_is_an_error() -> None:
    """A disk that takes no more is an OSError at the write, not silence."""
    fd = os.open("/dev/full", os.O_WRONLY)
    try:
        with pytest.raises(OSError, match="No space left"):
            logs._write_all(fd, b"x")
    finally:
        os.close(fd)
    with pytest.raises(OSError, match="No space left"):
        Log(Path("/dev/full")).event(Event(0.0, "ready"))


def test_write_beside_is_whole_or_not_at_all(tmp_path: Path) -> None:
    """A file that is written again is the old one or the new one, and leaves nothing beside it."""
    path = tmp_path / "verdict.json"
    write_beside(path, b"old")
    write_beside(path, b"new")
    assert path.read_bytes() == b"new"
    assert [p.name for p in tmp_path.iterdir()] == ["verdict.json"]
