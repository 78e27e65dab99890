"""A verdict as Markdown, for report.md and for the step summary of a GitHub job.

GitHub drops a summary of more than 1 MB whole, and people do not read far: it is cut at 60 kB, by whole lines, worst
findings first, and says how many lines were left out. Words of the stack or the user are escaped, never markup.
"""

import html
import re
from collections.abc import Iterator

from harness.model import Judgement, Verdict
from harness.report import tables
from harness.report.tables import Table

LIMIT_BYTES = 60_000
CELL_LIMIT = 500  # characters; the whole is in verdict.json
_MARKUP = re.compile(r"([\\`*_\[\]|~])")


def render(verdict: Verdict) -> str:
    """The report, at most 60 kB of it."""
    return _cut(list(_lines(verdict)))


def _lines(verdict: Verdict) -> Iterator[str]:
    banner = tables.banner(verdict)
    yield from (f"## {banner.verdict.value}: {escape(tables.name(verdict))}", "", f"**{escape(banner.why)}**", "")
    yield from (escape(banner.to_do), "")
    if banner.simulated:
        yield from (f"> **{escape(banner.simulated)}**", "")
    for finding in tables.by_severity(tables.cases(verdict)):
        if finding.verdict != Judgement.PASS:
            yield f"- **{finding.verdict.value}** {escape(finding.gate)}: {escape(tables.sentence(finding))}"
    for table in tables.tables(verdict, tables.by_severity(verdict.findings)):
        yield from ("", f"### {escape(table.title)}", "", *_table(table))
    if verdict.notes:
        yield from ("", "### Notes", "", *(f"- {escape(note)}" for note in verdict.notes))
    yield from ("", "### Where it came from", "", *_table(_provenance(verdict)))


def _table(table: Table) -> Iterator[str]:
    yield _row(table.columns)
    yield _row(["---"] * len(table.columns), escaped=True)
    for row in table.rows:
        yield _row(row)


def _row(cells: tuple[str, ...] | list[str], escaped: bool = False) -> str:
    return "| " + " | ".join(cells if escaped else map(escape, cells)) + " |"


def _provenance(verdict: Verdict) -> Table:
    known = ((key, tables.figure(key, value)) for key, value in verdict.provenance.items())
    return Table("", ("what", "value"), tuple((key.replace("_", " "), value) for key, value in known if value))


def escape(text: str) -> str:
    """Words that are shown as they are: one line, no markup, no HTML, not endless."""
    line = " ".join(text.split())
    clipped = line if len(line) <= CELL_LIMIT else f"{line[: CELL_LIMIT - 3]}..."
    return _MARKUP.sub(r"\\\1", html.escape(clipped, quote=False))


def _cut(lines: list[str]) -> str:
    whole = "".join(f"{line}\n" for line in lines)
    if len(whole.encode()) <= LIMIT_BYTES:
        return whole
    kept, room = 0, LIMIT_BYTES - 200
    while room >= (size := len(lines[kept].encode()) + 1):
        kept, room = kept + 1, room - size
    left_out = f"\n**{len(lines) - kept:,} more lines were left out here; verdict.json holds everything.**\n"
    return "".join(f"{line}\n" for line in lines[:kept]) + left_out
