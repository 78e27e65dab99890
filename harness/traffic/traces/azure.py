"""Azure's traces of LLM inference: CSV of `TIMESTAMP`, `ContextTokens` and `GeneratedTokens`.

The moments are dates with up to seven digits of a second, with a zone in some years and without in others; without one
they count as UTC, for only their distances matter.
"""

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from harness.model import UsageError
from harness.traffic.recording import Recorded
from harness.traffic.traces import rows

_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_DATE = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:?\d\d)?")


def read(path: Path) -> Iterator[tuple[Recorded, str]]:
    """The requests of a trace, none of them lost. Raises UsageError with the line."""
    for place, (where, row) in enumerate(rows.table(path, _COLUMNS)):
        lengths = tuple(rows.tokens(row[name], name, where) for name in _COLUMNS[1:])
        yield rows.arrival(moment_s(row["TIMESTAMP"].strip(), where), (place, 0), (lengths[0], lengths[1])), ""


def moment_s(text: str, where: str) -> float:
    """A date with a time as seconds since 1970. Raises UsageError."""
    found = _DATE.fullmatch(text)
    try:
        moment = datetime.fromisoformat(found[1] + (found[3] or "")) if found else None
    except ValueError:
        moment = None
    if found is None or moment is None:
        raise UsageError(f"{text!r:.50} is no date with a time, such as 2024-05-10 00:00:00.009930", where)
    whole_s = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    return whole_s + float(found[2] or 0.0)
