"""The gates that a scenario can name, and one of them applied to a timeline.

A gate is a spec, as the user wrote it, with its name and line. `Gate.finding` answers with what it saw. A gate that
names a class or a window that the run has not is INVALID and says the nearest name: a filter that matches nothing
must not pass.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Protocol

import numpy as np
from pydantic import AfterValidator, BeforeValidator, WithJsonSchema

from harness.document import suggestion
from harness.judge import measures, resilience
from harness.judge.against_capture import LatencyAgainstCapture, SameAnswers
from harness.judge.counts import Goodput, Latency, LatencyLimit, Scope, Success
from harness.judge.gpu import GpuMemory
from harness.judge.resilience import Alert, Recovery, ReplicaRecovery, RetryStorm
from harness.model import Finding, Judgement, Outcome, Tag, Window
from harness.timeline import Timeline
from harness.units import Rate, spec


class Spec(Protocol):
    """What every gate's spec has."""

    @property
    def window(self) -> str: ...

    @property
    def classes(self) -> tuple[str, ...]: ...

    def seen(self, timeline: Timeline, window: Window) -> Finding:
        """What the window holds against this limit; the gate's name, line and window are added by the caller."""


@dataclass(frozen=True, slots=True)
class Gate:
    """A promise of the scenario: `id` is its key there, `line` where it stands."""

    id: str
    line: int
    spec: Any  # a Spec: one of GATES, validated

    def finding(self, timeline: Timeline) -> Finding:
        """Judge it. Never raises for what a run holds."""
        complaint = resilience.uncut(timeline, self.spec.window)
        complaint = complaint or unknown_names(self.spec, good_classes(timeline), timeline.windows)
        if complaint:
            return Finding(self.id, Judgement.INVALID, complaint, window=self.spec.window, line=self.line)
        finding: Finding = self.spec.seen(timeline, timeline.windows[self.spec.window])
        return replace(finding, gate=self.id, line=self.line, window=self.spec.window)


def good_classes(timeline: Timeline) -> list[str]:
    """The classes that hold requests which should be served."""
    return [timeline.classes[code] for code in np.unique(timeline.class_code[timeline.good])]


def unknown_names(spec: Spec, classes: Iterable[str], windows: Iterable[str]) -> str:
    """One sentence about the first class or window that is not there, with the nearest one; empty when all are."""
    for kind, wanted, known in (("window", (spec.window,), list(windows)), ("class", spec.classes, list(classes))):
        for name in wanted:
            if name not in known:
                return f"there is no {kind} `{name}`; {suggestion(name, known)}"
    return ""


@spec
class Rejections:
    """Every bad request is refused with the answer that is right for it, and no good one is refused (GATE-6)."""

    window: str = "steady"

    @property
    def classes(self) -> tuple[str, ...]:
        return ()

    def seen(self, timeline: Timeline, window: Window) -> Finding:
        mask = timeline.within(window)
        kinds = measures.rejections(timeline, mask)
        refused = np.isin(timeline.observations["outcome"], [Outcome.REJECTED, Outcome.RATE_LIMITED])
        good_refused = int((mask & ~measures.may_be_refused(timeline) & refused).sum())
        n, still_open = (sum(kind[key] for kind in kinds.values()) for key in ("n", "open"))
        wrong = {name: sum(kind["wrong"].values()) for name, kind in kinds.items() if kind["wrong"]}
        figures = {
            "n": n,
            "bad": sum(wrong.values()) + good_refused,
            "allowed": 0,
            "unknown": still_open,
            "good_refused": good_refused,
            "kinds": kinds,
        }
        if not n:
            return Finding("", Judgement.INVALID, "no bad request was due in this window", "", "exact", figures=figures)
        if figures["bad"]:
            parts = [f"{count:,} of {kinds[name]['n']:,} {name} got a wrong answer" for name, count in wrong.items()]
            parts += [f"{good_refused:,} good requests were refused"] if good_refused else []
            return Finding("", Judgement.FAIL, "; ".join(parts), "", "exact", figures=figures)
        if still_open:
            why = f"{still_open:,} of {n:,} bad requests had no answer when the run ended"
            needs = "a run that waits for its last answers"
            return Finding("", Judgement.INCONCLUSIVE, why, "", "exact", figures=figures, needs=needs)
        why = f"all {n:,} bad requests got the answer that is right for them, and no good one was refused"
        return Finding("", Judgement.PASS, why, "", "exact", figures=figures)


@spec
class Throughput(Scope):
    """Good answers, or their tokens, completed per second of the window. A count over a time, with no bound."""

    at_least_per_s: Rate | None = None
    tokens_per_s: Rate | None = None

    def __post_init__(self) -> None:
        if (self.at_least_per_s is None) == (self.tokens_per_s is None):
            raise ValueError("throughput needs one limit: at_least (requests) or tokens")

    def seen(self, timeline: Timeline, window: Window) -> Finding:
        lasts_s = window.end_s - window.start_s
        mask = measures.good_requests(timeline, Window("plan", -np.inf, np.inf), self.classes)
        offered = int((mask & timeline.within(window)).sum()) / lasts_s
        ended_s = timeline.observations["ended_s"]
        inside = (ended_s >= window.start_s) & (ended_s < window.end_s)
        done = mask & inside & (timeline.observations["outcome"] == Outcome.OK)
        untold = measures.tagged(timeline, done, Tag.USAGE_MISSING) if self.tokens_per_s else 0
        if self.tokens_per_s is None:
            asked, measured, unit = self.at_least_per_s or 0.0, int(done.sum()) / lasts_s, "requests"
        else:
            asked, unit = self.tokens_per_s, "tokens"
            counted = done & ((timeline.observations["tags"] & Tag.USAGE_MISSING) == 0)
            measured = int(timeline.observations["tokens_out"][counted].sum()) / lasts_s
        limit = f">= {asked:.6g} {unit}/s"
        figures = {"measured_per_s": measured, "offered_per_s": offered, "n": int(done.sum()), "unit": unit}
        if untold:
            figures["uncounted_answers"] = untold
        if unit == "requests" and offered < asked:
            why = f"the plan itself offers only {offered:.4g} good requests/s, less than the gate asks for"
            return Finding("", Judgement.INVALID, why, limit=limit, figures=figures)
        if untold and measured < asked:
            why = f"{untold:,} of {int(done.sum()):,} answers told no usage: how many tokens they held is unknown"
            return Finding("", Judgement.INVALID, why, limit=limit, figures=figures)
        judgement = Judgement.PASS if measured >= asked else Judgement.FAIL
        why = f"{measured:.4g} {unit}/s were completed of {offered:.4g} requests/s offered"
        return Finding("", judgement, why, limit=limit, figures=figures)


def _exact(word: Any) -> Any:
    if word != "exact":
        raise ValueError(f"{word!r} is not a way to judge rejections; there is one: exact")
    return Rejections()


def _at(quantile: float) -> Any:
    """A latency gate whose quantile is in its name."""
    return Annotated[LatencyLimit, AfterValidator(lambda limit: Latency(quantile=quantile, **vars(limit)))]


GATES: Mapping[str, Any] = {
    "p50_latency": _at(0.5),
    "p90_latency": _at(0.9),
    "p95_latency": _at(0.95),
    "p99_latency": _at(0.99),
    "p99.9_latency": _at(0.999),
    "latency": Latency,
    "success": Success,
    "goodput": Goodput,
    "rejections": Annotated[Rejections, BeforeValidator(_exact), WithJsonSchema({"const": "exact"})],
    "throughput": Throughput,
    "gpu_memory": GpuMemory,
    "same_answers": SameAnswers,
    "latency_against_capture": LatencyAgainstCapture,
    "recovery": Recovery,
    "replica_recovery": ReplicaRecovery,
    "alert": Alert,
    "retry_storm": RetryStorm,
}
