"""A verdict as tables of words: what every report draws, each in its own way.

    Verdict -> Banner, Tables of strings -> terminal, Markdown

Numbers become words here and nowhere else, with the unit that their name ends in. Nothing is computed, nothing is
left out, and nothing is called good that the verdict does not call so.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from harness.model import SEVERITY, Finding, Judgement, Verdict

Row = dict[str, str]
TO_DO = {
    Judgement.PASS: "Every promise of the scenario held.",
    Judgement.FAIL: "The stack broke a promise: do not release it.",
    Judgement.INCONCLUSIVE: "The evidence is too thin to tell: run longer.",
    Judgement.INVALID: "This is no measurement of the stack: mend the cause and run again.",
}
_UNITS = (
    ("_per_s", 1, "{:,.4g}/s"),
    ("_s", 1, "{:,.3f} s"),
    ("_bytes", 2**-30, "{:,.2f} GiB"),
    *((ending, 100, "{:.4g} %") for ending in ("share", "coverage", "utilisation", "of_planned", "confidence")),
)

MEMBERS = 3  # of a changed answer, in its row


@dataclass(frozen=True, slots=True)
class Banner:
    """The verdict in one word, why in one sentence, what to do about it, and what was not real."""

    verdict: Judgement
    why: str
    to_do: str
    simulated: str


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of words under a title. `judged` holds the row numbers' judgements, where rows have one."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    judged: tuple[Judgement, ...] = ()


def banner(verdict: Verdict) -> Banner:
    """What a reader must see first."""
    worst = [f for f in cases(verdict) if f.verdict == verdict.verdict and f.needs]
    return Banner(
        verdict=verdict.verdict,
        why=verdict.why,
        to_do=f"Needs {worst[0].needs}." if worst else TO_DO[verdict.verdict],
        simulated=simulated(verdict),
    )


def simulated(verdict: Verdict) -> str:
    """What was not real, by the run's own record and by that of its GPUs; "" when all was."""
    if verdict.provenance.get("simulated"):
        engine = verdict.provenance.get("engine", "a simulated engine")
        return f"SIMULATED: served by {engine}; no real GPU and no real model were measured."
    if any(finding.figures.get("simulated") for finding in verdict.findings):
        return "SIMULATED: the GPUs are simulated devices; no real GPU memory was measured."
    return ""


def cases(verdict: Verdict) -> list[Finding]:
    """Every finding, the harness's own first; and the verdict itself where no finding says the same."""
    found = [*verdict.believed, *verdict.findings]
    if verdict.verdict not in {f.verdict for f in found}:
        found.insert(0, Finding("verdict", verdict.verdict, verdict.why))
    return found


def sentence(finding: Finding) -> str:
    """Why, and what would settle it."""
    return f"{finding.why}; needs {finding.needs}" if finding.needs else finding.why


def by_severity(findings: Iterable[Finding]) -> list[Finding]:
    """Worst first, else in the scenario's order."""
    return sorted(findings, key=lambda f: SEVERITY.index(f.verdict))


def name(verdict: Verdict) -> str:
    """`stage1.business_mix`: the stage, where there is one, and the scenario, where there is one."""
    stage = verdict.provenance.get("stage")
    scenario = Path(str(verdict.provenance.get("scenario", verdict.provenance.get("run", "run")))).stem
    return ".".join([*([f"stage{stage}"] if stage else []), *([] if several(verdict) else [scenario])]) or scenario


def several(verdict: Verdict) -> bool:
    """Whether this is one verdict over several runs: its gates are then named `scenario.gate`, its tables nested so."""
    return len(verdict.provenance.get("runs", ())) > 1


def tables(verdict: Verdict, findings: Sequence[Finding]) -> Iterator[Table]:
    """The gates in the order given, the harness's own health, and what was measured beside them."""
    yield from _findings("Gates", findings)
    yield from _findings("Is the measurement to be believed?", verdict.believed)
    for scenario, parts in verdict.tables.items() if several(verdict) else [("", verdict.tables)]:
        for key, value in parts.items():
            table = _measured(key, value)
            if table.rows:
                yield replace(table, title=f"{scenario}: {table.title}") if scenario else table


def _findings(title: str, findings: Sequence[Finding]) -> Iterator[Table]:
    """One row a finding; a column that would be empty is not there."""
    rows = [
        {
            "gate": finding.gate,
            "window": finding.window,
            "measured": _first(finding, "measured"),
            "limit": finding.limit,
            "bound": _first(finding, "bound"),
            **{key: figure(key, finding.figures.get(key, "")) for key in ("n", "bad", "allowed", "unknown")},
            "verdict": finding.verdict.value,
        }
        for finding in findings
    ]
    if rows:
        columns = tuple(c for c in rows[0] if any(row[c] for row in rows))
        cells = tuple(tuple(row[c] for c in columns) for row in rows)
        yield Table(title, columns, cells, tuple(f.verdict for f in findings))


def _first(finding: Finding, beginning: str) -> str:
    """The figure whose name begins so, in the unit of its own name or else of the gate's limit."""
    for key, value in finding.figures.items():
        if key.startswith(beginning):
            return figure("share" if key == beginning and "%" in finding.limit else key, value)
    return ""


def _measured(key: str, value: Any) -> Table:
    """One of the verdict's own tables; one that is not known here is drawn by its shape."""
    title, rows_of = _DRAWN.get(key, (key.replace("_", " ").capitalize(), _pairs))
    rows = rows_of(value)
    columns = tuple(dict.fromkeys(column for row in rows for column in row))
    return Table(title, columns, tuple(tuple(row.get(column, "") for column in columns) for row in rows))


def _by_class(value: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    rows = []
    for name, figures in value.items():
        first, *others = _clocks(figures)
        rows += [{"class": name, **first}, *({"class": "", **row} for row in others)]
    return rows


def _clocks(figures: Mapping[str, Any]) -> list[Row]:
    """A row for each way to take the time: counts first, and only on the first row."""
    counts = {key: figure(key, item) for key, item in figures.items() if not isinstance(item, Mapping)}
    rows = [
        {"time": _CLOCKS.get(key, key), **{_unitless(q): figure(q, seconds) for q, seconds in quantiles.items()}}
        for key, quantiles in figures.items()
        if isinstance(quantiles, Mapping)
    ]
    return [{**dict.fromkeys(counts, ""), **row} if n else {**counts, **row} for n, row in enumerate(rows)]


def _matrix(value: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[Row]:
    """A row for each captured answer, a column for each replayed one, in the order of the rows."""
    replayed = dict.fromkeys((*value, *(now for row in value.values() for now in row)))
    columns = [now for now in replayed if any(now in row for row in value.values())]
    return [
        {"captured": was, **{now: figure("n", row[now]["n"]) if now in row else "" for now in columns}}
        for was, row in value.items()
    ]


def _changes(value: Sequence[Mapping[str, Any]]) -> list[Row]:
    return [
        {
            "change": str(kind["change"]).replace("_", " "),
            "path": kind["path"],
            **({"flaw": kind["flaw"]} if any(other["flaw"] for other in value) else {}),
            **_then_and_now(kind),
            "n": figure("n", kind["n"]),
            "of": figure("of", kind["of"]),
            "requests": figure("examples", kind["examples"]),
        }
        for kind in value
    ]


def _then_and_now(kind: Mapping[str, Any]) -> Row:
    """What was answered and is; of members that are known, those that came and went."""
    if "appeared" not in kind:
        return {"captured": kind["captured"], "now": kind["replayed"]}
    signed = [f"{sign}{member}" for sign, key in (("+", "appeared"), ("-", "vanished")) for member in kind[key]]
    more = f" and {len(signed) - MEMBERS} more" if len(signed) > MEMBERS else ""
    return {"captured": "", "now": ", ".join(signed[:MEMBERS]) + more}


def _against(value: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[Row]:
    """Three rows for each class and time: as captured, as replayed, and the ratio with its interval."""
    rows = []
    for name, by_time in value.items():
        for of, figures in by_time.items():
            quantiles = {key: item for key, item in figures.items() if isinstance(item, Mapping)}
            first = {"class": name, "time": of, "n": figure("n", figures["n"])}
            for side in ("captured", "replayed"):
                seconds = {key: figure(f"{side}_s", item[f"{side}_s"]) for key, item in quantiles.items()}
                rows.append({**first, "": side, **seconds})
                first = dict.fromkeys(first, "")
            ratios = {key: _interval(item["ratio"], item["low"], item["high"]) for key, item in quantiles.items()}
            rows.append({**first, "": "ratio", **ratios})
    return rows


def _interval(ratio: float | None, low: float | None, high: float | None) -> str:
    """`1.02 (0.98-1.07)`; a question mark is an end that so few requests do not show."""
    shown = [f"{end:.3g}" if end is not None and math.isfinite(end) else "" for end in (low, high)]
    told = f"{ratio:.3g}" if ratio is not None and math.isfinite(ratio) else "-"
    return f"{told} ({shown[0] or '?'}-{shown[1] or '?'})"


def _faults(value: Sequence[Mapping[str, Any]]) -> list[Row]:
    """What was broken, when and for how long; and what shows it, a row each."""
    rows = []
    for fault in value:
        first = {"fault": fault["fault"], "at": figure("at_s", fault["injected_s"])}
        first["lasted"] = figure("lasted_s", fault["lasted_s"])
        for what in ("targets", "evidence", "undone"):
            rows.append({**first, "": what, "shown": figure(what, fault[what])})
            first = dict.fromkeys(first, "")
    return rows


def _recoveries(value: Sequence[Mapping[str, Any]]) -> list[Row]:
    return [
        {
            "fault": one["fault"],
            "result": one["result"],
            "after, s": _moment(one["recovered_s"], one["from_s"], one["to_s"]),
            "onset": figure("onset_s", one["onset_s"]),
            "bad for": figure("total_bad_s", one["total_bad_s"]),
            "dips": figure("dips", one["dips"]),
            "failed": f"{one['failed']:,} of {one['n']:,}",
            "worst second": one["worst_second"],
        }
        for one in value
    ]


def _moment(at_s: float | None, lo_s: float | None, hi_s: float | None) -> str:
    """`15.0 (14.9-15.2)`; "-" for one that never came."""
    told = [f"{value:.1f}" if value is not None and math.isfinite(value) else "?" for value in (at_s, lo_s, hi_s)]
    return "-" if told[0] == "?" else f"{told[0]} ({told[1]}-{told[2]})"


def _rows(heading: str, value: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    return [{heading: name, **_row(row)} for name, row in value.items()]


def _list(value: Sequence[Mapping[str, Any]]) -> list[Row]:
    return [_row(row) for row in value]


def _row(row: Mapping[str, Any]) -> Row:
    return {_unitless(key): figure(key, item) for key, item in row.items()}


def _pairs(value: Mapping[str, Any]) -> list[Row]:
    return [{"": _unitless(key), "value": figure(key, item)} for key, item in value.items()]


_CLOCKS = {"e2e": "e2e, from due", "service": "e2e, from sent", "ttft": "ttft, from due", "send_lag": "send lag"}
_DRAWN: Mapping[str, tuple[str, Callable[[Any], list[Row]]]] = {
    "by_class": ("Latency by class (- is a time that never came)", _by_class),
    "latency": ("Latency of all good requests", _clocks),
    "outcomes": ("How requests ended", partial(_rows, "class")),
    "rejections": ("Answers to bad requests", partial(_rows, "kind")),
    "tokens": ("Tokens, as planned and as the server counted them", _pairs),
    "facts": ("Traffic", _pairs),
    "not_applicable": ("Not applicable", _list),
    "replay": ("What was replayed, and how truly", _pairs),
    "answers": ("Answers as captured (rows) and as replayed (columns)", _matrix),
    "changes": ("Answers that changed", _changes),
    "against_capture": ("The same requests, then and now", _against),
    "over_time": ("Then and now, over time", _list),
    "faults": ("What was broken", _faults),
    "around": ("Before, during and after the faults", _list),
    "recovery": ("Recovery of the service, from the fault on", _recoveries),
    "replicas": ("Replicas that came back", _list),
}


def _unitless(key: str) -> str:
    for unit in ("_per_s", "_s", "_bytes"):
        key = key.removesuffix(unit)
    return key.replace("_", " ")


def figure(key: str, value: Any) -> str:
    """One value in words, in the unit that its name ends in; "-" for one that could not be had."""
    if isinstance(value, Mapping):
        return ", ".join(f"{part}: {figure(str(part), item)}" for part, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(figure(key, item) for item in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return _number(key, value) if math.isfinite(value) else "-"
    if isinstance(value, int):
        return f"{value:,}"
    return "-" if value is None else str(value)


def _number(key: str, value: float) -> str:
    if key.endswith("_s") and not key.endswith("_per_s") and 0 < value < 0.1:
        return f"{1000 * value:.3g} ms"
    for ending, scale, form in _UNITS:
        if key.endswith(ending):
            return form.format(value * scale)
    return f"{value:,.4g}"
