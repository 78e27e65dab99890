"""Gates that hold a replay against its capture: the same answers, and no slower.

Both are counts over the requests that the capture answered, so both say which ones. A number of changed answers is
exact, as for rejections; a share of them, and a latency, need their binomial bound. A run that replays no answers, or
a capture without the measure that is asked for, is INVALID: nothing was compared.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any

import numpy as np
from pydantic import BeforeValidator, WithJsonSchema

from harness.judge import comparison, counts, measures, statistics
from harness.judge.comparison import Change, Compared
from harness.judge.counts import Latency, Scope, seconds
from harness.judge.measures import Population
from harness.model import SEVERITY, Finding, Judgement, Window
from harness.timeline import Timeline
from harness.units import Multiple, Quantile, Share, share, spec

KINDS_TOLD = 3


def _allowance(written: Any) -> int | float:
    """`3` -> that many; `5%` -> that share of those it could happen to."""
    if isinstance(written, int) and not isinstance(written, bool) and written >= 0:
        return written
    try:
        return share(written)
    except ValueError:
        raise ValueError(f"{written!r} is neither a count such as 0 nor a share such as 5%") from None


Allowance = Annotated[
    int | float,
    BeforeValidator(_allowance),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": r"^\d+(\.\d+)? ?%$"}]}),
]


@spec
class SameAnswers:
    """Answers are what they were: who was refused is refused, who was served is served. What is left out is not judged.

    Each key takes a count or a share. `rejected_otherwise` is another refusal than before; `other_finish` and
    `other_shape` look at answers of one kind: why they ended, and their members.
    """

    rejected_then_accepted: Allowance = 0
    accepted_then_rejected: Allowance = 0
    accepted_then_failed: Allowance = 0
    rejected_otherwise: Allowance | None = None
    other_finish: Allowance | None = None
    other_shape: Allowance | None = None
    window: str = "steady"
    confidence: Share = 0.95

    @property
    def classes(self) -> tuple[str, ...]:
        return ()

    @property
    def allowances(self) -> Mapping[str, int | float]:
        given = {key: value for key, value in vars(self).items() if key not in ("window", "confidence")}
        return {key: value for key, value in given.items() if value is not None}

    def seen(self, timeline: Timeline, window: Window) -> Finding:
        if why := comparison.replayed(timeline):
            return Finding("", Judgement.INVALID, why)
        found = comparison.changes(timeline, timeline.within(window))
        held = {name: self._held(timeline, window, found[name], allowed) for name, allowed in self.allowances.items()}
        worst = min((finding.verdict for finding in held.values()), key=SEVERITY.index)
        said = [finding for finding in held.values() if finding.verdict == worst and finding.why]
        compared = int((found["rejected_then_accepted"].among | found["accepted_then_rejected"].among).sum())
        if not compared:
            worst, said = (
                Judgement.INVALID,
                [Finding("", worst, "the capture holds no answer to a request of this window")],
            )
        return Finding(
            "",
            worst,
            "; ".join(finding.why for finding in said) if worst != Judgement.PASS else self._all_same(compared, held),
            limit="as captured",
            figures={
                "n": compared,
                "bad": sum(finding.figures["bad"] for finding in held.values()),
                "unknown": sum(finding.figures["unknown"] for finding in held.values()),
                "changes": {name: finding.figures for name, finding in held.items()},
            },
            needs=next((finding.needs for finding in said if finding.needs), ""),
        )

    def _all_same(self, compared: int, held: Mapping[str, Finding]) -> str:
        bad = sum(finding.figures["bad"] for finding in held.values())
        told = f"{compared:,} requests were answered as captured" + (
            f", but for {bad:,} that may differ" if bad else ""
        )
        missing = "" if held["rejected_then_accepted"].figures["n"] else "; the capture holds no refused request"
        return told + missing

    def _held(self, timeline: Timeline, window: Window, change: Change, allowed: int | float) -> Finding:
        n, bad, unknown = (int(mask.sum()) for mask in (change.among, change.changed, change.unknown))
        figures: dict[str, Any] = {"n": n, "bad": bad, "allowed": allowed, "unknown": unknown}
        if not n:
            # What is judged by default may well not occur; what was asked for must.
            asked = change.units if change.units.startswith("answers") else ""
            verdict = Judgement.INVALID if asked else Judgement.PASS
            return Finding("", verdict, f"there were no {asked} to compare" if asked else "", figures=figures)
        figures["kinds"] = comparison.kinds(timeline, change)
        if isinstance(allowed, float):
            finding = self._share_held(timeline, window, change, allowed)
            figures = {**finding.figures, **figures}
        else:
            finding = _count_held(change, n, bad, unknown, allowed)
        told = f"{finding.why}: {'; '.join(_told(figures['kinds']))}" if bad else finding.why
        return replace(finding, why=told, figures=figures)

    def _share_held(self, timeline: Timeline, window: Window, change: Change, allowed: float) -> Finding:
        among = change.among
        population = Population(timeline.due_s[among], np.zeros(0), change.changed[among], change.unknown[among])
        quantile = float(1 - statistics.exact(allowed))
        return counts.count(population, window, quantile, self.confidence, units=change.units, fault=change.fault)


def _count_held(change: Change, n: int, bad: int, unknown: int, allowed: int) -> Finding:
    told = f"{bad:,} of {n:,} {change.units} were {change.fault}; {allowed:,} are allowed"
    if bad > allowed:
        return Finding("", Judgement.FAIL, told)
    if bad + unknown > allowed:
        why = f"{told}, and {unknown:,} had no answer when the run ended"
        return Finding("", Judgement.INCONCLUSIVE, why, needs="a run that waits for its last answers")
    return Finding("", Judgement.PASS, told)


def _told(kinds: list[dict[str, Any]]) -> Iterator[str]:
    """`12 of 12 /v1/chat/completions (over_long): 422, now 2xx (requests 3, 17, 40)`."""
    for kind in kinds[:KINDS_TOLD]:
        flaw = f" ({kind['flaw']})" if kind["flaw"] else ""
        examples = ", ".join(map(str, kind["examples"]))
        what = f"{kind['captured']}, now {kind['replayed']}"
        if "appeared" in kind:
            signs = (("+", kind["appeared"]), ("-", kind["vanished"]))
            what = ", ".join(f"{sign}{member}" for sign, members in signs for member in members[:KINDS_TOLD])
        yield f"{kind['n']:,} of {kind['of']:,} {kind['path']}{flaw} {what} (requests {examples})"
    if (more := len(kinds) - KINDS_TOLD) > 0:
        yield f"and {more} kinds more"


@spec
class LatencyAgainstCapture(Scope):
    """A quantile stays below a multiple of what the capture shows for the same requests: those it served."""

    quantile: Quantile
    at_most: Multiple
    of: Compared = "e2e"
    confidence: Share = 0.95

    def seen(self, timeline: Timeline, window: Window) -> Finding:
        name, captured_s = counts.name(self.quantile), self.captured_s(timeline, window)
        if why := comparison.replayed(timeline) or _unmeasured(self.of, captured_s):
            limit = f"{name} {self.of} < {self.at_most:g}x the capture's"
            return Finding("", Judgement.INVALID, why, limit=limit, figures={"n": 0, "bad": 0})
        gate = Latency(
            quantile=self.quantile,
            below_s=self.at_most * captured_s,
            of=self.of,
            class_=self.class_,
            window=self.window,
            confidence=self.confidence,
        )
        finding = gate.held(timeline, window, self._compared(timeline, window))
        ratio = finding.figures.get("measured_s", math.nan) / captured_s
        told = f"{ratio:.3g}x that" if math.isfinite(ratio) else "a failure"
        figures = {**finding.figures, "captured_s": captured_s, "at_most": self.at_most, "ratio": ratio}
        why = f"{name} {self.of} was {seconds(captured_s)} and is {told}: {finding.why}"
        return replace(finding, why=why, figures=figures)

    def captured_s(self, timeline: Timeline, window: Window) -> float:
        """The capture's own quantile over the requests that are compared; `nan` when it has none."""
        if timeline.captured is None:
            return math.nan
        compared = self._compared(timeline, window)
        values_s = comparison.times(timeline, timeline.captured, compared, self.of).values_s
        return statistics.nearest_rank(values_s, self.quantile)

    def _compared(self, timeline: Timeline, window: Window) -> np.ndarray:
        served = comparison.measurable(comparison.captured_of(timeline), self.of)
        return np.asarray(served & measures.good_requests(timeline, window, self.classes))


def _unmeasured(of: Compared, captured_s: float) -> str:
    """Why a captured quantile is none to hold anything against; "" when it is one."""
    if captured_s > 0:
        return ""
    if captured_s == 0:
        return f"the capture shows no {of} of these requests: their streams came in one piece"
    return f"the capture shows no {of} of these requests, so there is nothing to hold it against"
