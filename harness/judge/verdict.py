"""From a timeline and its gates to one verdict, and the verdict as bytes.

The harness is believed first; then the worst finding decides: INVALID, FAIL, INCONCLUSIVE, PASS. Nothing judged is
INVALID. The verdict is a function of its arguments alone: the same logs give the same bytes, which is what `verify`
rests on. Figures are rounded in one place, `_plain`; provenance is not touched.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import orjson

from harness.judge import belief, faults, resilience
from harness.judge.against_capture import LatencyAgainstCapture, SameAnswers
from harness.judge.counts import Goodput, Latency, Success, percent, seconds
from harness.judge.gates import Gate
from harness.judge.gpu import GpuMemory
from harness.judge.resilience import Recovery
from harness.judge.tables import tables
from harness.model import EXIT_CODE, EXIT_INTERRUPTED, EXIT_UNSAFE, SEVERITY, Finding, Judgement, Verdict, Window
from harness.timeline import Timeline

SCHEMA = 1
DIGITS = 6
BURSTY = 0.3  # correlation of neighbouring clusters from which their bound is too narrow
_DOUBTS = {
    "chunked_streams": "streams put several tokens into one event: gaps are between events",
    "coalesced_streams": "streams had their first tokens in one read: TTFT is an upper bound there, the next gap 0",
    "uncounted_streams": "streams told no usage: their tokens are counted by events",
    "buffered_streams": "streams came in one piece: how their tokens came is unknown, and counts against a PASS",
    "uncounted_answers": "answers told no usage: their tokens are left out",
}


def judge(
    timeline: Timeline,
    gates: Sequence[Gate],
    gpu: str,
    on_inconclusive: str,
    provenance: Mapping[str, Any],
) -> Verdict:
    """Judge a run, finished or broken.

    `gpu` is what the target says it has: under "none" memory gates are listed as not applicable, and judge nothing.
    `on_inconclusive` is the scenario's policy: "fail" turns INCONCLUSIVE into FAIL, "warn" lets it exit 0 under its own
    name; else it stays, with its own exit code. Under "extend" the conductor has looked once before (`undecided`).
    """
    idle = [gate for gate in gates if gpu == "none" and isinstance(gate.spec, GpuMemory)]
    judged = [gate for gate in gates if gate not in idle]
    if on_inconclusive == "extend":
        judged = for_two_looks(judged)
    recovery = next((gate.spec for gate in judged if isinstance(gate.spec, Recovery)), Recovery(within_s=30.0))
    timeline = resilience.with_windows(timeline, recovery)
    windows = _windows(timeline, judged)
    findings = tuple(gate.finding(timeline) for gate in judged)

    def stands(other: Timeline) -> bool:
        found = (gate.finding(other).verdict for gate in judged)
        return all(verdict == finding.verdict for verdict, finding in zip(found, findings, strict=True))

    believed = belief.believe(timeline, windows, _tightest_s(timeline, judged), stands)
    skipped = [{"gate": gate.id, "line": gate.line, "why": "the target has no GPU (gpu: none)"} for gate in idle]
    notes = [f"{row['gate']} is not applicable: {row['why']}" for row in skipped]
    if any("confidence" in finding.figures for finding in findings):
        notes.append("the bounds cover the chance within this run; what differs between runs, only more runs can show")
    told = {**tables(timeline, windows), **resilience.tables(timeline, recovery)}
    if resent := told["facts"]["resent"]:
        notes.append(f"{resent:,} requests went out twice: the server had closed their idle connection")
    verdict = Verdict(
        *_worst(believed, findings),
        believed=believed,
        findings=findings,
        tables={**told, "not_applicable": skipped},
        notes=tuple(dict.fromkeys((*notes, *(note for finding in findings for note in _notes(finding))))),
        provenance=provenance,
    )
    if unsafe := _unsafe(timeline):
        return replace(verdict, verdict=Judgement.INVALID, exit_code=EXIT_UNSAFE, why=unsafe)
    if belief.interrupted(timeline):
        return replace(verdict, verdict=Judgement.INVALID, exit_code=EXIT_INTERRUPTED, why="interrupted")
    return _by_policy(verdict, on_inconclusive)


def _unsafe(timeline: Timeline) -> str:
    """Why somebody must look at the stack before all else: a fault is still in it, or a run was stopped for safety."""
    if left := faults.left(timeline):
        return (
            f"{', '.join(one.name for one in left)} could not be undone, or nothing shows that it was: `harness heal`"
        )
    why = faults.safety_stop(timeline)
    return f"stopped for safety: {why}" if why else ""


def undecided(timeline: Timeline, gates: Sequence[Gate], gpu: str) -> bool:
    """Whether a run that may be extended should be: its worst gate is INCONCLUSIVE. For the one look under way."""
    looked = judge(timeline, gates, gpu, "extend", {})
    return min((f.verdict for f in looked.findings), key=SEVERITY.index, default=None) == Judgement.INCONCLUSIVE


def for_two_looks(gates: Sequence[Gate]) -> list[Gate]:
    """A run that may be extended is looked at twice: each look gets half of the doubt that one look would have."""
    return [
        replace(gate, spec=replace(gate.spec, confidence=(1 + gate.spec.confidence) / 2))
        if isinstance(gate.spec, Latency | Success | Goodput | SameAnswers | LatencyAgainstCapture)
        else gate
        for gate in gates
    ]


def _windows(timeline: Timeline, gates: Sequence[Gate]) -> list[Window]:
    """The windows that gates are judged in; every window of the plan when no gate names one that exists."""
    named = {gate.spec.window for gate in gates}
    every = [window for window in timeline.windows.values() if window.end_s > window.start_s]
    every = every or [Window("plan", 0.0, 1.0)]
    judged = [window for window in every if window.name in named] or every
    return [window for window in judged if not any(_holds(other, window) for other in judged)]


def _holds(outer: Window, inner: Window) -> bool:
    """Whether one window lies in another, as those around a fault do in the steady state: it is not counted twice."""
    return outer != inner and outer.start_s <= inner.start_s and inner.end_s <= outer.end_s


def _tightest_s(timeline: Timeline, gates: Sequence[Gate]) -> float | None:
    limits_s = [g.spec.below_s for g in gates if isinstance(g.spec, Latency) and g.spec.of in ("e2e", "ttft")]
    for gate in gates:
        if isinstance(gate.spec, Recovery):
            limits_s.append(gate.spec.below_s)
        if isinstance(gate.spec, Goodput):
            limits_s += [limit_s for of, limit_s in gate.spec.limits.items() if of != "tpot"]
        window = timeline.windows.get(gate.spec.window)
        if isinstance(gate.spec, LatencyAgainstCapture) and gate.spec.of != "itl" and window:
            limits_s.append(gate.spec.at_most * gate.spec.captured_s(timeline, window))
    return min((limit_s for limit_s in limits_s if limit_s > 0), default=None)


def _worst(believed: Sequence[Finding], findings: Sequence[Finding]) -> tuple[Judgement, int, str]:
    if not findings:
        return Judgement.INVALID, EXIT_CODE[Judgement.INVALID], "nothing judged: no gate applies to this run"
    worst = min((*believed, *findings), key=lambda finding: SEVERITY.index(finding.verdict))
    if worst.verdict == Judgement.PASS:
        why = f"{findings[0].gate}: {findings[0].why}" if len(findings) == 1 else f"all {len(findings)} gates hold"
    else:
        why = f"{worst.gate}: {worst.why}"
    return worst.verdict, EXIT_CODE[worst.verdict], why


def _by_policy(verdict: Verdict, on_inconclusive: str) -> Verdict:
    if verdict.verdict != Judgement.INCONCLUSIVE or on_inconclusive not in ("fail", "warn"):
        return verdict
    if on_inconclusive == "warn":
        note = "the scenario lets an inconclusive run pass its exit code: on_inconclusive is warn"
        return replace(verdict, exit_code=0, notes=(*verdict.notes, note))
    why = f"{verdict.why} (inconclusive, which the scenario counts as failed)"
    return replace(verdict, verdict=Judgement.FAIL, exit_code=EXIT_CODE[Judgement.FAIL], why=why)


def _notes(finding: Finding) -> Iterator[str]:
    """What a reader must know before trusting the figures of a finding."""
    figures = finding.figures
    if figures.get("simulated"):
        yield f"{finding.gate}: SIMULATED GPU"
    if "interval_s" in figures and finding.verdict in (Judgement.PASS, Judgement.FAIL):
        yield f"{finding.gate}: peaks shorter than {seconds(figures['interval_s'])} are not visible"
    if spare := figures.get("spare"):
        yield f"{finding.gate}: no load on {', '.join(spare)}: spare, or not of this stack"
    for name, words in _DOUBTS.items():
        if n := figures.get(name):
            yield f"{finding.gate}: {n:,} {words}"
    if "bad_share_of_halves" in figures:
        first, second = figures["bad_share_of_halves"]
        yield (
            f"{finding.gate}: not steady: {percent(round(first, 4))} were bad in the first half of the window, "
            f"{percent(round(second, 4))} in the second"
        )
    clusters = figures.get("clusters", 0)
    if clusters and figures["correlation"] > max(BURSTY, 2 / math.sqrt(clusters)):
        span = seconds(figures["span_s"])
        yield f"{finding.gate}: bad ones came in bursts longer than {span}: the bound is narrower than it should be"


# The verdict as bytes ----------------------------------------------------------------------------------------------


def to_json(verdict: Verdict) -> bytes:
    """`verdict.json`: the same verdict gives the same bytes."""
    value = {
        "schema": SCHEMA,
        "verdict": verdict.verdict,
        "exit_code": verdict.exit_code,
        "why": verdict.why,
        "believed": [_finding_json(finding) for finding in verdict.believed],
        "gates": [_finding_json(finding) for finding in verdict.findings],
        "notes": list(verdict.notes),
        "tables": _plain(verdict.tables),
        "provenance": dict(verdict.provenance),
    }
    return orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def from_json(data: bytes) -> Verdict:
    """The verdict that `to_json` wrote, its figures as rounded there. Raises ValueError on anything else."""
    value = orjson.loads(data)
    if not isinstance(value, dict) or value.get("schema") != SCHEMA:
        raise ValueError("not a verdict of this version")
    return Verdict(
        verdict=Judgement(value["verdict"]),
        exit_code=value["exit_code"],
        why=value["why"],
        believed=tuple(map(_finding_of, value["believed"])),
        findings=tuple(map(_finding_of, value["gates"])),
        tables=value["tables"],
        notes=tuple(value["notes"]),
        provenance=value["provenance"],
    )


_OWN = tuple(field.name for field in fields(Finding) if field.name not in ("gate", "figures"))


def _finding_json(finding: Finding) -> dict[str, Any]:
    """Its figures stand beside its own fields: a reader asks for `gates[0].measured_s`."""
    own = {name: value for name in _OWN if (value := getattr(finding, name))}
    return {"id": finding.gate, **own, **_plain(finding.figures)}


def _finding_of(value: dict[str, Any]) -> Finding:
    own = {name: value[name] for name in _OWN if name in value}
    figures = {name: given for name, given in value.items() if name not in ("id", *_OWN)}
    return Finding(**{**own, "gate": value["id"], "verdict": Judgement(own["verdict"]), "figures": figures})


def _plain(value: Any) -> Any:
    """JSON values: floats to six significant digits, what is not finite as null, numpy's numbers as Python's."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [_plain(inner) for inner in value]
    return value
