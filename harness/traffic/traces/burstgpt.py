"""BurstGPT traces: CSV of `Timestamp` (s), `Model`, `Request tokens`, `Response tokens`, `Total tokens`, `Log Type`.

Later ones also have `Session ID` and `Elapsed time` (s), which say who waited for what. A request that failed has no
response tokens: it came all the same, and is kept. The model is not: prompts are composed for the target's.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from harness.traffic.recording import Recorded
from harness.traffic.traces import rows

_COLUMNS = ("Timestamp", "Request tokens", "Response tokens")


def read(path: Path) -> Iterator[tuple[Recorded, str]]:
    """The requests of a trace, none of them lost. Raises UsageError with the line."""
    connections = rows.Connections()
    for where, row in rows.table(path, _COLUMNS):
        at_s, *lengths = (row[name] for name in _COLUMNS)
        asked, answered = (rows.tokens(each, name, where) for each, name in zip(lengths, _COLUMNS[1:], strict=True))
        session = row.get("Session ID", "").strip()
        one = rows.arrival(
            rows.number(at_s, "Timestamp", where), connections.place(session), (asked, answered), session
        )
        if elapsed := row.get("Elapsed time", "").strip():
            ended_s = rows.number(elapsed, "Elapsed time", where)
            one = replace(one, answer=replace(one.answer, ended_s=ended_s))
        yield one, ""
