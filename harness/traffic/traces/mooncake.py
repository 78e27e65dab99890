"""Mooncake traces: JSON lines of `timestamp` (ms), `input_length`, `output_length` (tokens) and `hash_ids`.

Each id stands for a block of 512 tokens and all before it: requests that begin with the same ids begin with the same
text. The last block may be a part of one. Nothing else of a line is read.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from harness.model import UsageError
from harness.traffic.recording import Recorded
from harness.traffic.traces import rows

BLOCK_TOKENS = 512


def read(path: Path) -> Iterator[tuple[Recorded, str]]:
    """The requests of a trace, none of them lost. Raises UsageError with the line."""
    for place, (where, line) in enumerate(rows.lines(path)):
        row = _row(line, where)
        lengths = (
            rows.tokens(row.get("input_length"), "input_length", where),
            rows.tokens(row.get("output_length"), "output_length", where),
        )
        blocks = _blocks(row.get("hash_ids", []), where)
        if len(blocks) > lengths[0] // BLOCK_TOKENS + 2:
            raise UsageError(f"{len(blocks)} hash_ids for {lengths[0]} tokens: its blocks are not of 512 tokens", where)
        at_s = rows.number(row.get("timestamp"), "timestamp", where) / 1e3
        yield rows.arrival(at_s, (place, 0), lengths, blocks=blocks), ""


def _row(line: str, where: str) -> dict[str, Any]:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise UsageError(f"no JSON: {error}", where) from None
    if not isinstance(row, dict):
        raise UsageError("no object of JSON", where)
    return row


def _blocks(ids: object, where: str) -> tuple[int, ...]:
    if not isinstance(ids, list) or not all(isinstance(each, int) and 0 <= each < 1 << 53 for each in ids):
        raise UsageError("hash_ids is no list of numbers", where)
    return tuple(map(int, ids))
