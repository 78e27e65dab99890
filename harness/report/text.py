"""A verdict for a terminal, in 100 columns: every figure, every gate, and last the word, why, and what to do.

A terminal and a CI log are read from their end, so what matters most stands there.

Colour and lines on a terminal; plain ASCII anywhere else and under NO_COLOR, so that a log file reads the same.
"""

import io
import re
from collections.abc import Iterator
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table as Drawn
from rich.text import Text

from harness.model import Judgement, Verdict
from harness.report import tables
from harness.report.tables import Table

WIDTH = 100
COLOUR = {
    Judgement.PASS: "green",
    Judgement.FAIL: "red",
    Judgement.INCONCLUSIVE: "yellow",
    Judgement.INVALID: "magenta",
}
_WORDS = (
    *("", "gate", "class", "kind", "window", "limit", "verdict", "value", "expect", "wrong", "time", "why"),
    *("change", "path", "flaw", "captured", "now", "requests"),
    *("fault", "shown", "result", "replica"),
)
_ASKED = ("run", "runs", "scenario", "engine", "target", "seed", "workers", "force")
_PROVENANCE = (*_ASKED, "plan_sha256", "commit", "dirty")


def show(verdict: Verdict, console: Console) -> None:
    """Print a verdict on this console, as richly as it can take."""
    if console.is_terminal and not console.no_color:
        console.print(_drawn(verdict), width=min(WIDTH, console.width), highlight=False)
    else:
        console.out(render(verdict), end="", highlight=False)


def render(verdict: Verdict) -> str:
    """A verdict as plain ASCII lines of at most 100 columns."""
    paper = Console(file=io.StringIO(), width=WIDTH, color_system=None, force_terminal=False)
    paper.print(_drawn(verdict), highlight=False)
    drawn = paper.file.getvalue()  # type: ignore[attr-defined]  # the StringIO from above
    lines = (line.rstrip() for line in drawn.translate({ord("─"): "-"}).splitlines())
    return "".join(f"{line}\n" for line in lines).encode("ascii", "replace").decode()


def _drawn(verdict: Verdict) -> Group:
    return Group(*_tables(verdict), *_reasons(verdict), *_notes(verdict), *_provenance(verdict), *_banner(verdict))


def _banner(verdict: Verdict) -> Iterator[RenderableType]:
    banner = tables.banner(verdict)
    word = Text(f"{banner.verdict.value}  ", style=f"bold {COLOUR[banner.verdict]}")
    yield Text()
    yield word + Text(banner.why, style="default not bold")
    yield Text(banner.to_do)
    if banner.simulated:
        yield Text(banner.simulated, style="bold yellow")


def _tables(verdict: Verdict) -> Iterator[RenderableType]:
    for table in reversed(list(tables.tables(verdict, verdict.findings))):
        yield Text(f"\n{table.title}", style="bold")
        yield _table(table)


def _reasons(verdict: Verdict) -> Iterator[RenderableType]:
    for finding in reversed(tables.by_severity(tables.cases(verdict))):
        if finding.verdict != Judgement.PASS:
            yield Text(f"\n{finding.verdict.value} {finding.gate}", style=COLOUR[finding.verdict])
            yield Padding(Text(tables.sentence(finding)), (0, 0, 0, 4))


def _table(table: Table) -> Drawn:
    drawn = Drawn(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1), show_edge=False)
    for column in table.columns:
        justify: Literal["left", "right"] = "left" if column in _WORDS else "right"
        drawn.add_column(Text(column), justify=justify, overflow="fold", no_wrap=column == "verdict")
    for number, row in enumerate(table.rows):
        style = COLOUR[table.judged[number]] if table.judged else ""
        last = len(row) - 1
        drawn.add_row(*(Text(cell, style=style if place == last else "") for place, cell in enumerate(row)))
    return drawn


def _notes(verdict: Verdict) -> Iterator[RenderableType]:
    if verdict.notes:
        yield Text("\n" + "\n".join(f"Note: {note}" for note in verdict.notes))


def _provenance(verdict: Verdict) -> Iterator[RenderableType]:
    known = ((key, verdict.provenance.get(key)) for key in _PROVENANCE)
    words = [f"{key} {_short(tables.figure(key, value))}" for key, value in known if value not in (None, "", False)]
    if words:
        yield Text("\n" + "; ".join(words), style="dim")


def _short(word: str) -> str:
    """A hash is known by its first twelve digits."""
    return word[:12] if re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", word) else word
