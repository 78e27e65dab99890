"""Gates that are counts: a latency quantile, success, goodput. So many of n were bad; so many may be.

One rule for all of them. More bad units than the share allows: FAIL. Few enough that the exact binomial bound, too, is
within it: PASS. Between the two the run was too short to tell: INCONCLUSIVE, with what is missing. Units that were
still open, or whose stream came in one piece, count against a PASS and never for a FAIL. Nothing counted is INVALID.
"""

import math
from dataclasses import replace
from typing import Annotated, Any

import numpy as np
from pydantic import AfterValidator

from harness.judge import measures, statistics
from harness.judge.measures import Of, Population
from harness.judge.statistics import Sample
from harness.model import Finding, Judgement, Window
from harness.timeline import Timeline
from harness.units import Duration, Share, spec


def _some(classes: str | tuple[str, ...]) -> str | tuple[str, ...]:
    if not classes:
        raise ValueError("it names no class; leave it out for all of them")
    return classes


@spec
class Scope:
    """Which requests a gate looks at: those due in `window`, of one class, of several, or of all that are good."""

    class_: Annotated[str | tuple[str, ...], AfterValidator(_some)] = ()
    window: str = "steady"

    @property
    def classes(self) -> tuple[str, ...]:
        return (self.class_,) if isinstance(self.class_, str) else self.class_


@spec
class LatencyLimit(Scope):
    """A quantile, named by the gate's key, stays below a limit. `e2e` is response latency: due to last byte."""

    below_s: Duration
    of: Of = "e2e"
    confidence: Share = 0.95


@spec
class Latency(LatencyLimit):
    """The same with any quantile."""

    quantile: Share

    def seen(self, timeline: Timeline, window: Window) -> Finding:
        return self.held(timeline, window, measures.good_requests(timeline, window, self.classes))

    def held(self, timeline: Timeline, window: Window, mask: np.ndarray) -> Finding:
        """What the masked requests of the window hold against this limit."""
        population = measures.latencies(timeline, mask, self.of, self.below_s)
        units = "gaps" if self.of == "itl" else "due requests"
        finding = count(population, window, self.quantile, self.confidence, units=units, fault="slow or failed")
        if not population.n:
            return finding
        measured = statistics.nearest_rank(population.values_s, self.quantile)
        if (bound_rank := finding.figures["bound_rank"]) is not None:
            bound = float(np.partition(population.values_s, bound_rank - 1)[bound_rank - 1])
        else:
            bound = math.nan
        figures: dict[str, Any] = {"of": self.of, "quantile": self.quantile, "measured_s": measured, "bound_s": bound}
        if self.of == "e2e":
            service_s = measures.failures_last(timeline, mask, "service")
            figures["service_s"] = statistics.nearest_rank(service_s, self.quantile)
        figures |= measures.doubts(timeline, mask, self.of)
        figures |= {**finding.figures, "by_class": self._by_class(timeline, mask)}
        limit = f"{name(self.quantile)} {self.of} < {seconds(self.below_s)}"
        return replace(finding, limit=limit, figures=figures)

    def _by_class(self, timeline: Timeline, mask: np.ndarray) -> dict[str, dict[str, Any]]:
        """The same count for each class alone: where the slow ones are."""
        found = {}
        for code in np.unique(timeline.class_code[mask]):
            alone = mask & (timeline.class_code == code)
            population = measures.latencies(timeline, alone, self.of, self.below_s)
            measured = statistics.nearest_rank(population.values_s, self.quantile)
            found[timeline.classes[code]] = {
                "n": population.n,
                "bad": int(population.bad.sum()),
                "measured_s": measured,
            }
        return found


@spec
class Success(Scope):
    """At least this share of the good requests got a whole, good answer."""

    at_least: Share
    confidence: Share = 0.95

    def seen(self, timeline: Timeline, window: Window) -> Finding:
        population = measures.successes(timeline, measures.good_requests(timeline, window, self.classes))
        finding = count(population, window, self.at_least, self.confidence, units="good requests", fault="not served")
        return _of_share(finding, population, f">= {percent(self.at_least)}")


@spec
class Goodput(Scope):
    """At least this share of the good requests met every limit that is given; a failure met none."""

    at_least: Share
    e2e_s: Duration | None = None
    ttft_s: Duration | None = None
    tpot_s: Duration | None = None
    confidence: Share = 0.95

    def __post_init__(self) -> None:
        if not self.limits:
            raise ValueError("goodput needs a limit: e2e, ttft or tpot")

    @property
    def limits(self) -> dict[Of, float]:
        given: dict[Of, float | None] = {"e2e": self.e2e_s, "ttft": self.ttft_s, "tpot": self.tpot_s}
        return {of: limit_s for of, limit_s in given.items() if limit_s is not None}

    def seen(self, timeline: Timeline, window: Window) -> Finding:
        mask = measures.good_requests(timeline, window, self.classes)
        population = measures.within_limits(timeline, mask, self.limits)
        finding = count(
            population, window, self.at_least, self.confidence, units="good requests", fault="over a limit or failed"
        )
        limits = ", ".join(f"{of} < {seconds(limit_s)}" for of, limit_s in self.limits.items())
        return _of_share(finding, population, f">= {percent(self.at_least)} with {limits}")


def _of_share(finding: Finding, population: Population, limit: str) -> Finding:
    good = 1 - finding.figures["bad"] / population.n if population.n else math.nan
    bound = 1 - finding.figures["bad_share_bound"] if population.n else math.nan
    return replace(finding, limit=limit, figures={"measured": good, "bound": bound, **finding.figures})


def count(
    population: Population, window: Window, quantile: float, confidence: float, *, units: str, fault: str
) -> Finding:
    """Hold a population against "at least this share is not bad". `units` and `fault` are the words to say it in."""
    tolerated = float(1 - statistics.exact(quantile))
    sample = Sample.clustered(population.due_s, population.bad, window.start_s, window.end_s)
    span_s = statistics.span_s(window.start_s, window.end_s)
    n, bad, unknown = sample.n, sample.bad, int(population.unknown.sum())
    if not n:
        return Finding(
            "", Judgement.INVALID, f"there were no {units} to judge in this window", figures={"n": 0, "bad": 0}
        )
    permitted = statistics.allowed(n, quantile)
    figures: dict[str, Any] = {
        "n": n,
        "bad": bad,
        "allowed": permitted,
        "unknown": unknown,
        "bad_share": bad / n,
        "bad_share_bound": sample.upper_bound(confidence),
        "bound_rank": sample.bound_rank(tolerated, confidence),
        "confidence": confidence,
        "method": f"nearest rank, exact binomial, {_independence(sample, span_s)}",
        "deff": sample.deff,
        "n_eff": sample.independent,
        "clusters": sample.clusters,
        "span_s": span_s,
        "correlation": sample.correlation,
    }
    middle_s = (window.start_s + window.end_s) / 2
    if halves := statistics.halves_differ(population.due_s, population.bad, middle_s):
        figures["bad_share_of_halves"] = halves
    told = f"{bad:,} of {n:,} {units} were {fault}"
    if bad > permitted:
        figures["significant"] = statistics.significantly_bad(
            sample.worth(bad), sample.independent, tolerated, confidence
        )
        return Finding("", Judgement.FAIL, f"{told}; {permitted:,} are allowed", figures=figures)
    if bad + unknown > permitted:
        kept, needs = _kept_back(population)
        why = f"{told}, {permitted:,} are allowed, and {unknown:,} {kept} decide"
        return Finding("", Judgement.INCONCLUSIVE, why, figures=figures, needs=needs)
    if sample.proves(bad + unknown, tolerated, confidence):
        return Finding("", Judgement.PASS, f"{told}; {permitted:,} are allowed", figures=figures)
    why = f"{told}; {permitted:,} are allowed, but so few {units} do not show it at {percent(confidence)} confidence"
    needs = _needs(sample, tolerated, confidence, (window.end_s - window.start_s) / n)
    return Finding("", Judgement.INCONCLUSIVE, why, figures=figures, needs=needs)


def _kept_back(population: Population) -> tuple[str, str]:
    """What the unknown units of a population are, and what would make them known."""
    if population.buffered:
        return "whose streams came in one piece", "a path to the stack that passes tokens on as they come"
    return "still open when the run ended", "a run that waits for its last answers"


def _independence(sample: Sample, span_s: float) -> str:
    if sample.independent == sample.n:
        return "each taken as independent"
    return f"{sample.n:,} worth {sample.independent:,} by how {sample.clusters} spans of {seconds(span_s)} differ"


def _needs(sample: Sample, tolerated: float, confidence: float, each_s: float) -> str:
    """What would settle it, in units and in time at this rate."""
    at_share, if_good = sample.more_needed(tolerated, confidence)
    best = "" if if_good is None or not sample.bad else f"{if_good:,} more if no further one is bad"
    if at_share is None:
        return best or "more units than any run has: the limit tolerates next to nothing"
    amount = f"about {at_share:,} more at this share of bad ones, {lasting(at_share * each_s)} at this rate"
    return f"{amount}; {best}" if best else amount


# How figures are said ----------------------------------------------------------------------------------------------


def seconds(value_s: float) -> str:
    return f"{value_s:.4g} s" if value_s >= 1 else f"{value_s * 1000:.4g} ms"


def lasting(value_s: float) -> str:
    if value_s < 120:
        return f"{value_s:.0f} s"
    return f"{value_s / 60:.0f} min" if value_s < 7200 else f"{value_s / 3600:.0f} h"


def percent(share: float) -> str:
    return f"{share * 100:.6g} %"


def name(quantile: float) -> str:
    return f"p{quantile * 100:.6g}"
