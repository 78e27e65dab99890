"""What traces of token counts and logs have in common: text, one request a row, each with a place to blame.

A trace holds no bytes. Its recording is `timing_only`: when it is played, prompts are composed that are as long as its
requests were. A row that makes no sense is refused by its line: a guess would be traffic that nobody ever sent.
"""

import contextlib
import csv
import gzip
import math
import zlib
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import TextIO, cast

from harness.model import UsageError
from harness.traffic.recording import Answered, Recorded

PATH = "/v1/chat/completions"  # what the users of a trace are taken to ask; they read their answers as streams
_MOST_TOKENS = 1 << 24  # a larger count is no count


class Connections:
    """Numbers for connections or sessions by their names; what has no name stands alone."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, int]] = {}
        self._numbers = count()

    def place(self, name: str = "") -> tuple[int, int]:
        """The number of the one that a request belongs to, and how many of its requests came before."""
        if not name:
            return next(self._numbers), 0
        number, turn = self._known.get(name) or (next(self._numbers), 0)
        self._known[name] = number, turn + 1
        return number, turn


def lines(path: Path) -> Iterator[tuple[str, str]]:
    """Each line that is not blank, with its `file:line`; unpacked when the name ends in .gz. Raises UsageError."""
    with _opened(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield f"{path}:{number}", line.rstrip("\r\n")


def table(path: Path, columns: Sequence[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Each row of a CSV file by its columns' names, with its `file:line`. Raises UsageError."""
    with _opened(path) as file:
        rows = csv.reader(file)
        names = [name.strip() for name in next(rows, [])]
        if missing := [name for name in columns if name not in names]:
            raise UsageError(f"the first line names no column {', '.join(missing)}", f"{path}:1")
        for row in rows:
            where = f"{path}:{rows.line_num}"
            if row and len(row) < len(names):
                raise UsageError(f"{len(row)} columns, not {len(names)}", where)
            if row:
                yield where, dict(zip(names, row, strict=False))


def arrival(
    at_s: float, place: tuple[int, int], tokens: tuple[int, int], session: str = "", blocks: tuple[int, ...] = ()
) -> Recorded:
    """A request of which its moment and its tokens, in and out, are known."""
    return Recorded(
        at_s=at_s,
        connection=place[0],
        turn=place[1],
        method="POST",
        path=PATH,
        raw=b"",
        answer=Answered(tokens_in=tokens[0], tokens_out=tokens[1]),
        session=session,
        stream=True,
        prompt_tokens=tokens[0],
        max_tokens=tokens[1],
        blocks=blocks,
    )


def number(value: object, what: str, where: str) -> float:
    """A finite number, from text or JSON. Raises UsageError."""
    try:
        found = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not math.isfinite(found):
        raise UsageError(f"{what} is no number: {value!r:.50}", where)
    return found


def tokens(value: object, what: str, where: str) -> int:
    """A count of tokens. Raises UsageError."""
    found = number(value, what, where)
    if not 0 <= found <= _MOST_TOKENS or found != int(found):
        raise UsageError(f"{what} is no count of tokens: {value!r:.50}", where)
    return int(found)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8-sig", errors="replace", newline="") as file:
            yield cast(TextIO, file)
    except (OSError, EOFError, zlib.error, csv.Error) as error:
        raise UsageError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
