"""Gates on what a fault did: the service recovers, the replica comes back, the alert fires and clears, no retry storm.

Each is judged for every fault of the run (or the one it names), and the worst stands. Without evidence that the fault
was applied, and that it is over, there is nothing to judge: INVALID. What did not come is FAIL once it was waited for
as long as the gate allows, and INVALID when the run ended before.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from harness.document import suggestion
from harness.judge import faults, measures, recovery, statistics
from harness.judge.counts import percent, seconds
from harness.judge.faults import Injection
from harness.judge.recovery import Kind
from harness.judge.statistics import Sample
from harness.model import SEVERITY, Event, Finding, Judgement, Window
from harness.timeline import Timeline
from harness.units import Multiple, Period, spec

BEFORE, DURING, AFTER = "before", "during", "after"
WINDOWS = (BEFORE, DURING, AFTER)
FIRED, CLEARED, FIRING = "alert_fired", "alert_cleared", "alert.firing"
SILENT_S = 3.0  # the watcher asks once a second, for a second at most: it may miss one answer
SUCCEEDED = "vllm:request_success_total"
HELD = ("vllm:num_requests_running", "vllm:num_requests_waiting")
SPAN_S = 5.0  # over which arrivals are counted: readings come once a second, and what had waited comes at once
LEAST_SENT = 10  # requests in a span


@spec
class OfFaults(ABC):
    """Which fault a gate is about, by name (all when it names none), and from which moment it counts."""

    fault: str = ""
    since: Literal["injected", "healed"] = "injected"

    @property
    def window(self) -> str:
        return "steady"

    @property
    def classes(self) -> tuple[str, ...]:
        return ()

    @abstractmethod
    def limit(self) -> str:
        """What is promised, in words."""

    @abstractmethod
    def judged(self, timeline: Timeline, injection: Injection, end_s: float) -> Finding:
        """What one fault, proven and over, did; observed until `end_s`."""

    @abstractmethod
    def needs_s(self, held_s: float) -> float:
        """For how long traffic must go on from a fault's beginning, if it is in force for `held_s`, for this to be told
        whatever happens."""

    def seen(self, timeline: Timeline, window: Window) -> Finding:
        """The worst of all faults."""
        injections = [one for one in faults.of(timeline) if self.fault in ("", one.name)]
        complaints = [complaint for one in injections if (complaint := one.complaint)]
        if not injections:
            named = f" ({self.fault})" if self.fault else ""
            complaints = [f"no evidence that the fault was applied{named}: nothing was injected"]
        if complaints:
            return Finding("", Judgement.INVALID, complaints[0], limit=self.limit())
        found = [self.judged(timeline, one, until_s(injections, k, window)) for k, one in enumerate(injections)]
        worst = min(found, key=lambda finding: (SEVERITY.index(finding.verdict), -_measured(finding)))
        many = f"{worst.figures['fault']}: " if len(injections) > 1 else ""
        return replace(worst, limit=self.limit(), why=f"{many}{worst.why}")

    def since_s(self, injection: Injection) -> float:
        """From when it counts, in seconds of the run; for a fault that is proven and over."""
        return float((injection.injected_s if self.since == "injected" else injection.healed_s) or 0.0)


def _measured(finding: Finding) -> float:
    value = float(finding.figures.get("measured_s", math.nan))
    return value if math.isfinite(value) else 0.0


def until_s(injections: Sequence[Injection], k: int, window: Window) -> float:
    """To when a fault's effects are its own: to the next one that begins when it is over, else to the window's end."""
    healed_s = injections[k].healed_s
    later = [one.injecting_s for one in injections[k + 1 :] if one.injecting_s is not None]
    return min([moment_s for moment_s in later if healed_s is None or moment_s >= healed_s], default=window.end_s)


# The service -----------------------------------------------------------------------------------------------------


@spec
class Recovery(OfFaults):
    """Users are served again `within` this time, and for as long as the run goes on, at least for `hold`.

    A request is good that is served within `below`, counted from due; the service is well while it has no more bad ones
    than the steady state before the fault had.
    """

    within_s: Period
    hold_s: Period = 10.0
    below_s: Period = 1.2

    def limit(self) -> str:
        return f"within {seconds(self.within_s)}, for {seconds(self.hold_s)} (good: < {seconds(self.below_s)})"

    def needs_s(self, held_s: float) -> float:
        return (held_s if self.since == "healed" else 0.0) + self.within_s + self.hold_s

    def judged(self, timeline: Timeline, injection: Injection, end_s: float) -> Finding:
        seen = self.measured(timeline, injection, end_s)
        judgement, why = _told(seen, self)
        figures: dict[str, Any] = {
            "fault": injection.name,
            "measured_s": seen.at_s,
            "result": seen.kind.value,
            "lo_s": seen.lo_s,
            "hi_s": seen.hi_s,
            "first_s": seen.first_s,
            "onset_s": seen.onset_s,
            "total_bad_s": seen.bad_s,
            "dips": seen.dips,
            "n": seen.n,
            "bad": seen.failed,
            "worst_second_s": seen.worst_s,
            "worst_second_bad": seen.worst_bad,
            "worst_second_n": seen.worst_n,
            "observed_s": seen.observed_s,
            "usual_bad": seen.usual_bad,
            "usual_n": seen.usual_n,
        }
        return Finding("", judgement, why, figures=figures)

    def measured(self, timeline: Timeline, injection: Injection, end_s: float) -> recovery.Recovery:
        """What users saw of one fault. Requests that could be in flight when it began are in its series, not before."""
        began_s, steady = float(injection.injecting_s or 0.0) - self.below_s, timeline.windows["steady"]
        usual = Window(BEFORE, steady.start_s, first_injecting_s(timeline) - self.below_s)
        due_s, bad = self._series(timeline, usual)
        sample = Sample.clustered(due_s, bad, usual.start_s, usual.end_s) if len(due_s) else Sample(0, 0)
        due_s, bad = self._series(timeline, Window("fault", began_s, end_s))
        return recovery.measure(due_s - self.since_s(injection), bad, sample, self.within_s, self.hold_s)

    def _series(self, timeline: Timeline, window: Window) -> tuple[np.ndarray, np.ndarray]:
        """Good requests as they were due, and whether each was bad; without those still open below the limit."""
        mask = measures.good_requests(timeline, window)
        population = measures.latencies(timeline, mask, "e2e", self.below_s)
        known = ~population.unknown
        order = np.argsort(population.due_s[known], kind="stable")
        return population.due_s[known][order], population.bad[known][order]


def _told(seen: recovery.Recovery, gate: Recovery) -> tuple[Judgement, str]:
    """The judgement of a recovery and its sentence."""
    at, interval = seconds(seen.at_s), f"{seen.lo_s:.1f}..{seen.hi_s:.1f} s"
    lost = f"{seen.failed:,} of {seen.n:,} requests were slow or failed"
    if seen.kind == Kind.UNHURT:
        return Judgement.PASS, f"the service was not hurt: {lost}, no more than usual"
    if seen.kind == Kind.NEVER:
        return Judgement.FAIL, f"the service never recovered in the {seconds(seen.observed_s)} observed; {lost}"
    if seen.kind == Kind.RELAPSED:
        end = f"was well again only after {at}" if math.isfinite(seen.at_s) else "was not well when the run ended"
        return Judgement.FAIL, f"the service seemed well after {seconds(seen.first_s)}, relapsed, and {end}; {lost}"
    if seen.kind in (Kind.ALREADY_BAD, Kind.TOO_SHORT):
        return Judgement.INVALID, _unmeasured(seen, gate)
    why = f"recovered after {at} ({interval}); {lost} in {_dips(seen)}"
    if seen.hi_s <= gate.within_s:
        return Judgement.PASS, why
    return (Judgement.FAIL if seen.lo_s > gate.within_s else Judgement.INCONCLUSIVE), why


def _dips(seen: recovery.Recovery) -> str:
    return "one dip" if seen.dips == 1 else f"{seen.dips} dips"


def _unmeasured(seen: recovery.Recovery, gate: Recovery) -> str:
    """Why there is no recovery to speak of."""
    least = recovery.SLIDE_LEAST
    if seen.kind == Kind.ALREADY_BAD:
        share = percent(round(seen.usual_bad / seen.usual_n, 4))
        return f"the service was not well before the fault: {share} were slow or failed"
    if seen.usual_n < least:
        return f"only {seen.usual_n:,} requests were due before the fault: {least} are needed to know what is usual"
    if seen.n < least:
        return f"only {seen.n:,} requests were due after the fault: {least} are needed to see a recovery"
    needed = f"{seconds(gate.within_s)} and {seconds(gate.hold_s)} of good service"
    return f"observed for {seconds(seen.observed_s)} after the fault: too short to see {needed}"


def with_windows(timeline: Timeline, spec: Recovery) -> Timeline:
    """The timeline with the windows that faults cut: `before` them, `during`, and `after` the last, once the service is
    well again too. A service that never is has an `after` all the same: its gates then see what it is like.
    """
    proven = [one for one in faults.of(timeline) if one.injected_s is not None]
    steady = timeline.windows.get("steady")
    if not proven or steady is None:
        return timeline
    injected_s = min(float(one.injected_s or 0.0) for one in proven)
    healed_s = max(math.inf if one.healed_s is None else one.healed_s for one in proven)
    cut = [
        Window(BEFORE, steady.start_s, first_injecting_s(timeline) - spec.below_s),
        Window(DURING, injected_s, min(healed_s, steady.end_s)),
    ]
    if healed_s < steady.end_s:
        well_s = [
            spec.since_s(one) + seen.at_s
            for k, one in enumerate(proven)
            if (seen := spec.measured(timeline, one, until_s(proven, k, steady))).kind == Kind.RECOVERED
        ]
        cut.append(Window(AFTER, max(healed_s, *well_s) if well_s else healed_s, steady.end_s))
    windows = (*timeline.header.windows, *(window for window in cut if window.end_s > window.start_s))
    return replace(timeline, header=replace(timeline.header, windows=windows))


def uncut(timeline: Timeline, name: str) -> str:
    """Why a run with faults has no window of this name, in one sentence; "" when it has, or the name is another's."""
    if name not in WINDOWS or name in timeline.windows or not faults.planned(timeline):
        return ""
    if not any(one.injected_s is not None for one in faults.of(timeline)):
        return f"there is no time {name} a fault: none is proven to have been in force"
    return f"no judged traffic was due {name} the faults"


def first_injecting_s(timeline: Timeline) -> float:
    """When the first fault began, proven or not; infinite when none did."""
    return min((one.injecting_s for one in faults.of(timeline) if one.injecting_s is not None), default=math.inf)


# Replicas, alerts ------------------------------------------------------------------------------------------------


def _watched_s(timeline: Timeline) -> float:
    """Until when the stack was watched: a replica may come back, and an alert clear, when the traffic is over."""
    return max([measures.closed_s(timeline), *(event.at_s for event in timeline.events[-1:])])


def _waited(event_s: float, limit_s: float, observed_s: float, what: str) -> tuple[Judgement, str]:
    """A thing that must come within a time: it came, it came late, it never came, or nobody waited long enough."""
    if math.isfinite(event_s):
        return (Judgement.PASS if event_s <= limit_s else Judgement.FAIL), f"{what} after {seconds(event_s)}"
    if observed_s < limit_s:
        return Judgement.INVALID, f"not {what} in the {seconds(observed_s)} observed, which is too short to tell"
    return Judgement.FAIL, f"never {what} in the {seconds(observed_s)} observed"


@spec
class ReplicaRecovery(OfFaults):
    """Every replica that the fault hit answers a real completion again within this time.

    The fault's own evidence of its end says which did, and when; of a replica that died, as a new process.
    """

    within_s: Period

    def limit(self) -> str:
        return f"answers within {seconds(self.within_s)}"

    def needs_s(self, held_s: float) -> float:
        return 0.0  # a run waits for the replica, its traffic over or not

    def judged(self, timeline: Timeline, injection: Injection, end_s: float) -> Finding:
        since_s, observed_s = self.since_s(injection), _watched_s(timeline)
        ready = {name: max(0.0, at_s - since_s) for name, at_s, _ in returned(injection, timeline.run)}
        wanted = max(1, len(injection.plan.get("targets", ())))
        last_s = max(ready.values()) if len(ready) >= wanted else math.nan
        judgement, why = _waited(last_s, self.within_s, observed_s - since_s, "answered again")
        figures = {"fault": injection.name, "measured_s": last_s, "n": wanted, "back": len(ready), "replicas": ready}
        return Finding("", judgement, f"{len(ready)} of {wanted} replicas are back: {why}", figures=figures)


def returned(injection: Injection, run: Mapping[str, Any]) -> list[tuple[str, float, Mapping[str, Any]]]:
    """The replicas that a fault took and that came back: name, the first moment at which each really answered, and what
    is known of its process. What showed that the fault is over tells it, dated by the machine's monotonic clock.
    """
    origin_s, ready = run.get("origin_monotonic_s"), injection.undone.get("ready")
    found: dict[str, tuple[str, float, Mapping[str, Any]]] = {}
    for one in ready if isinstance(ready, list) and origin_s is not None else []:
        if isinstance(one, Mapping) and {"replica", "pid", "at_s"} <= one.keys():
            name, known = str(one["replica"]), {key: one[key] for key in ("pid", "started") if key in one}
            found.setdefault(name, (name, one["at_s"] - origin_s, known))
    return list(found.values())


@spec
class Alert(OfFaults):
    """The alert of this name fires within a time of the fault, and clears within a time of its end."""

    name: str
    fires_within_s: Period
    clears_within_s: Period

    def limit(self) -> str:
        return f"{self.name} fires within {seconds(self.fires_within_s)}, clears within {seconds(self.clears_within_s)}"

    def needs_s(self, held_s: float) -> float:
        return max((held_s if self.since == "healed" else 0.0) + self.fires_within_s, held_s + self.clears_within_s)

    def judged(self, timeline: Timeline, injection: Injection, end_s: float) -> Finding:
        if end_s >= timeline.windows[self.window].end_s:
            end_s = math.inf  # no other fault follows: it may clear when the traffic is over
        told = [event for event in self._events(timeline) if event.at_s < end_s]
        began_s, heard_s = float(injection.injecting_s or 0.0), self._heard_s(timeline)
        heard_s = heard_s[heard_s < end_s]
        if why := self._unseen(timeline, told, began_s) or self._unheard(heard_s, began_s):
            return Finding("", Judgement.INVALID, why, figures={"fault": injection.name})
        since_s, healed_s, observed_s = self.since_s(injection), float(injection.healed_s or 0.0), float(heard_s[-1])
        # A fault that comes on step by step may be noticed before all of it is there: at once, then.
        seen_s = (max(e.at_s, since_s) for e in told if e.kind == FIRED and e.at_s >= began_s)
        fired_s = min(seen_s, default=math.nan)
        cleared_s = max((e.at_s for e in told[-1:] if e.kind == CLEARED and e.at_s >= began_s), default=math.nan)
        parts = [_waited(fired_s - since_s, self.fires_within_s, observed_s - since_s, "fired")]
        if math.isfinite(fired_s):
            clears_s = cleared_s if math.isnan(cleared_s) else max(cleared_s, healed_s)
            parts.append(_waited(clears_s - healed_s, self.clears_within_s, observed_s - healed_s, "cleared"))
        judgement = min((part[0] for part in parts), key=SEVERITY.index)
        figures = {"fault": injection.name, "measured_s": fired_s - since_s, "cleared_s": cleared_s - healed_s}
        why = f"{self.name} " + ", and ".join(part[1] for part in parts)
        if judgement == Judgement.INVALID and min(end_s, _watched_s(timeline)) - observed_s > SILENT_S:
            why += f": nobody told of it any more from {observed_s:.0f} s of the run on"
        return Finding("", judgement, why, figures=figures)

    def _events(self, timeline: Timeline) -> list[Event]:
        return [event for event in timeline.events if event.name == self.name and event.kind in (FIRED, CLEARED)]

    def _heard_s(self, timeline: Timeline) -> np.ndarray:
        """The moments at which its Prometheus told whether it fires."""
        return timeline.series(FIRING).get((("alert", self.name),), (np.zeros(0), np.zeros(0)))[0]

    def _unheard(self, heard_s: np.ndarray, injecting_s: float) -> str:
        """Since when nobody told of this alert for too long: it may have fired, or cleared, meanwhile."""
        after_s = heard_s[heard_s >= injecting_s]
        if not len(after_s):
            return f"nobody told of {self.name} after the fault began: its Prometheus was silent, or its rule failed"
        moments_s = np.concatenate([[injecting_s], after_s])
        longest = int(np.diff(moments_s).argmax())
        silent_s = float(moments_s[longest + 1] - moments_s[longest])
        if silent_s <= SILENT_S:
            return ""
        since = f"for {seconds(round(silent_s, 1))} from {moments_s[longest]:.0f} s of the run on"
        return f"nobody told of {self.name} {since}: its Prometheus was silent, or its rule failed"

    def _unseen(self, timeline: Timeline, told: Sequence[Event], injecting_s: float) -> str:
        """Why nothing could be learnt of this alert: nobody watched it, or it was up already."""
        watched = [event for event in timeline.events if (event.kind, event.name) == ("watching", "alerts")]
        if not watched:
            return "alerts were not watched: the target has no Prometheus with rules"
        rules = watched[0].detail.get("rules", [])
        if self.name not in rules:
            return f"there is no alert rule `{self.name}`; {suggestion(self.name, rules)}"
        before = [event.kind for event in told if event.at_s < injecting_s]
        return f"{self.name} fired before the fault" if before[-1:] == [FIRED] else ""


# Retries ---------------------------------------------------------------------------------------------------------


@spec
class RetryStorm(OfFaults):
    """After a replica came back, the engines get at most so many times the requests that users send.

    What retries add between the two is what keeps a recovering stack down.
    """

    at_most: Multiple

    def limit(self) -> str:
        return f"<= {self.at_most:g}x what users send"

    def needs_s(self, held_s: float) -> float:
        return held_s + SPAN_S

    def judged(self, timeline: Timeline, injection: Injection, end_s: float) -> Finding:
        back = [at_s for _, at_s, _ in returned(injection, timeline.run)]
        spans = np.arange(min(back, default=float(injection.healed_s or 0.0)), end_s + 1e-9, SPAN_S)
        sent_s, (moments_s, arrived) = timeline.observations["sent_s"][timeline.good], arrivals(timeline)
        sent = np.histogram(sent_s[~np.isnan(sent_s)], spans)[0] if len(spans) > 1 else np.zeros(0)
        told = np.flatnonzero(sent >= LEAST_SENT)
        if why := self._untold(timeline, spans, told):
            return Finding("", Judgement.INVALID, why, figures={"fault": injection.name})
        reached = np.histogram(moments_s, spans, weights=arrived)[0]
        ratios = reached[told] / sent[told]
        worst = int(ratios.argmax())
        figures = {
            "fault": injection.name,
            "measured": float(ratios[worst]),
            "at_s": float(spans[told[worst]]),
            "engines_per_s": float(reached[told[worst]]) / SPAN_S,
            "users_per_s": float(sent[told[worst]]) / SPAN_S,
        }
        why = (
            f"at most {ratios[worst]:.3g}x: {figures['engines_per_s']:.3g} requests/s reached the engines, "
            f"{figures['users_per_s']:.3g} were sent"
        )
        return Finding("", Judgement.PASS if ratios[worst] <= self.at_most else Judgement.FAIL, why, figures=figures)

    def _untold(self, timeline: Timeline, spans: np.ndarray, told: np.ndarray) -> str:
        """Why nothing can be said of the time after a replica was back; "" when all was seen."""
        if len(spans) < 2:
            return f"the run went on for less than {seconds(SPAN_S)} after the replica was back"
        engines = timeline.series(SUCCEEDED)
        if not engines:
            return f"the engines did not say how many requests reached them: no {SUCCEEDED}"
        for labels, (moments_s, _) in engines.items():
            inside = moments_s[(moments_s >= spans[0]) & (moments_s < spans[-1])]
            silent_s = float(np.diff(np.concatenate([[spans[0]], inside, [spans[-1]]])).max())
            if silent_s > SPAN_S:
                name = dict(labels).get("engine", "an engine")
                return f"{name} did not say for {seconds(round(silent_s, 1))} how many requests reached it"
        if not len(told):
            return f"fewer than {LEAST_SENT} requests were sent in any {seconds(SPAN_S)} after the replica was back"
        return ""


def arrivals(timeline: Timeline) -> tuple[np.ndarray, np.ndarray]:
    """How many requests reached the engines, and when: what each finished and what it holds more, sample by sample.

    A counter that is lower than before is that of a new process, which began at nothing.
    """
    held = [timeline.series(name) for name in HELD]
    moments_s, arrived = [], []
    for labels, (times_s, done) in timeline.series(SUCCEEDED).items():
        inside = np.zeros_like(done)
        for series in held:
            if labels in series:
                inside += np.interp(times_s, *series[labels])
        new = np.diff(done) < 0
        finished = np.where(new, done[1:], np.diff(done))
        moments_s.append(times_s[1:])
        arrived.append(np.maximum(0.0, finished + np.where(new, inside[1:], np.diff(inside))))
    if not moments_s:
        return np.array([]), np.array([])
    order = np.argsort(np.concatenate(moments_s), kind="stable")
    return np.concatenate(moments_s)[order], np.concatenate(arrived)[order]


# Tables ----------------------------------------------------------------------------------------------------------


def tables(timeline: Timeline, spec: Recovery) -> dict[str, Any]:
    """What a reader wants of a run with faults; nothing for a run without.

    faults      a row each: targets, when, evidence, undone
    around      before, during and after them: n, failed and quantiles of e2e
    recovery    a row each: result, seconds with their interval, onset, bad time, dips, failed, the worst second
    replicas    a row for each replica that came back
    """
    injections = faults.of(timeline)
    if not injections:
        return {}
    steady = timeline.windows.get("steady")
    proven = [one for one in injections if one.injected_s is not None] if steady else []
    rows = [_row(spec, timeline, one, until_s(proven, k, steady)) for k, one in enumerate(proven) if steady]
    replicas = [
        {"replica": name, "fault": one.name, "back_s": at_s - float(one.injected_s or 0.0), **detail}
        for one in proven
        for name, at_s, detail in returned(one, timeline.run)
    ]
    around = [_around(timeline, timeline.windows[name]) for name in WINDOWS if name in timeline.windows]
    return {"faults": faults.table(timeline), "around": around, "recovery": rows, "replicas": replicas}


def _around(timeline: Timeline, window: Window) -> dict[str, Any]:
    mask = measures.good_requests(timeline, window) & ~measures.hung_up_as_planned(timeline)
    e2e_s = measures.failures_last(timeline, mask, "e2e")
    return {
        "window": window.name,
        "from_s": window.start_s,
        "to_s": window.end_s,
        "n": len(e2e_s),
        "failed": int(np.isinf(e2e_s).sum()),
        **{f"p{q}_s": statistics.nearest_rank(e2e_s, q / 100) for q in (50, 95, 99)},
    }


def _row(spec: Recovery, timeline: Timeline, injection: Injection, end_s: float) -> dict[str, Any]:
    seen = spec.measured(timeline, injection, end_s)
    worst = f"{seen.worst_bad} of {seen.worst_n} at {seen.worst_s:+.0f} s" if seen.worst_n else "none"
    return {
        "fault": injection.name,
        "result": seen.kind.value,
        "recovered_s": seen.at_s,
        "from_s": seen.lo_s,
        "to_s": seen.hi_s,
        "onset_s": seen.onset_s,
        "total_bad_s": seen.bad_s,
        "dips": seen.dips,
        "failed": seen.failed,
        "n": seen.n,
        "worst_second": worst,
        "observed_s": seen.observed_s,
    }
