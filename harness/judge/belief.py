"""Whether the harness may be believed: its own health in the judged windows, before any gate of the user.

A load generator that was late, starved or incomplete measured itself. Each finding here is PASS or INVALID, and one
INVALID makes the run INVALID, whatever else was seen: a slow client makes a stack look slow, and a dead one makes it
look fast. What cannot be shown to be healthy, because its readings are missing, is not believed either.

Starvation is judged by its effect. On a shared machine a player often waits a moment for a core, and its times stay
true: they start from the plan and end at the kernel's receive stamps. So a wait for cores (run-queue delay, steal) of
up to a tenth of the time is fine; up to half of it is believed only while both lags stay within half of their limit;
more never is.

A send lag is judged by its effect, too. It adds to a latency, which counts from due: its own lateness, and at most as
much by that of the requests it met on its way. So it can make a good stack look slow, and a PASS holds in spite of it.
And it moves load about, by as much, which no figure shows. Up to a twentieth of the tightest limit a lag is noise. From
there to a fifth, all that it can have added is taken off every request: when each gate then says what it says with it,
the lag decided nothing; when one does not, the run is INVALID and the stack is not accused. Beyond a fifth other load
was sent than was planned, whatever the gates say. First tokens that were read together with later ones are dated too
late in the same way, and judged in the same way.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from harness.judge import faults, measures, statistics
from harness.judge.counts import lasting, percent, seconds
from harness.model import Finding, Judgement, Outcome, Tag, Window
from harness.timeline import Timeline

NEVER_SENT = 0.01
LAG_S, LAG_OF_LIMIT, LEAST_LAG_S = 0.050, 0.05, 0.002
LAG_WITHOUT_EFFECT = 0.20  # of the tightest limit, but no more than LAG_S
LEAST_RATE = 0.95
CPU = 0.90
WAITING, WAITING_WITHOUT_EFFECT = 0.10, 0.50  # of the time
NEAR = 0.5  # of a lag's limit
LITTLE, LITTLE_FROM = 0.20, 5.0
READINGS = 0.80  # of one a second and worker


@dataclass(frozen=True, slots=True)
class _Limit:
    """How long a lag may be, of 99 % of the requests: `strict_s`, or `wide_s` where it is without effect."""

    strict_s: float
    wide_s: float = 0.0
    without_effect: Callable[[], bool] = lambda: False

    def s_for(self, p99_s: float) -> float:
        return self.wide_s if self.strict_s < p99_s <= self.wide_s and self.without_effect() else self.strict_s


def believe(
    timeline: Timeline, windows: Sequence[Window], tightest_s: float | None, stands: Callable[[Timeline], bool]
) -> tuple[Finding, ...]:
    """What the harness says of itself, worst matters first.

    `windows` are the ones that gates are judged in; `tightest_s` is their smallest limit counted from due; `stands`
    says whether every gate finds the same on another timeline.
    """
    due = np.logical_or.reduce([timeline.within(window) for window in windows])
    strict_s = LAG_S if tightest_s is None else max(LEAST_LAG_S, LAG_OF_LIMIT * tightest_s)
    wide_s = 0.0 if tightest_s is None else min(LAG_S, LAG_WITHOUT_EFFECT * tightest_s)
    limit = _Limit(strict_s, wide_s, cache(lambda: stands(on_time(timeline, due))))
    send_lag, send_near = _lag("send_lag", send_lag_s(timeline, due), limit, "requests were sent late")
    receive_lag, receive_near = _receive_lag(timeline, due, _Limit(max(LAG_S, strict_s)))
    near = send_near or receive_near
    return (
        _finished(timeline),
        _records(timeline),
        _never_sent(timeline, due),
        send_lag,
        receive_lag,
        _first_tokens(timeline, due, limit),
        _rate(timeline, windows, strict_s),
        _cpu(timeline, windows),
        _waiting(timeline, windows, "run_delay", "the busiest player waited for a core for {} of the time", near),
        _waiting(timeline, windows, "steal", "{} of the machine was taken away by its host", near),
        _little(timeline, windows),
        *([_capture(timeline)] if timeline.replay else []),
        *([faults.finding(timeline)] if faults.planned(timeline) else []),
    )


def send_lag_s(timeline: Timeline, mask: np.ndarray) -> np.ndarray:
    lag_s = (timeline.observations["sent_s"] - timeline.due_s)[mask]
    return np.asarray(lag_s[~np.isnan(lag_s)])


def receive_lag_s(timeline: Timeline, mask: np.ndarray) -> np.ndarray:
    """The longest time each answer's bytes lay unread; of requests that have an answer."""
    return np.asarray(timeline.observations["receive_lag_s"][measures.answered(timeline, mask)], dtype=np.float64)


def _receive_lag(timeline: Timeline, due: np.ndarray, limit: _Limit) -> tuple[Finding, bool]:
    if measures.answered(timeline, due).any():
        return _lag("receive_lag", receive_lag_s(timeline, due), limit, "answers were read late")
    return _finding("receive_lag", True, "no request was answered: nothing was left unread", "", {"n": 0}), False


def _first_tokens(timeline: Timeline, due: np.ndarray, limit: _Limit) -> Finding:
    answered = measures.answered(timeline, due)
    if not answered.any():
        return _finding("first_tokens", True, "no request was answered: no first token is in doubt", "", {"n": 0})
    doubt_s = _misdated_s(timeline)[answered]
    return _lag("first_tokens", doubt_s, limit, "first tokens were read together with later ones")[0]


def _misdated_s(timeline: Timeline) -> np.ndarray:
    """By how much each first token may be dated too late. What lies unread is dated by the kernel all the same; only a
    first token that shared its read with later ones has lost its own date, by as long as it lay at most."""
    seen = timeline.observations
    shared = (seen["tags"] & Tag.COALESCED) > 0
    return np.where(shared, np.nan_to_num(seen["receive_lag_s"].astype(np.float64)), 0.0)


def on_time(timeline: Timeline, due: np.ndarray) -> Timeline:
    """The run with all taken off its times that lateness of the harness can have added to them.

    Off every request goes what 99 % of those in `due` were late by, for it may have met late ones; or its own lag.
    """
    seen = timeline.observations.copy()
    lag_s = seen["sent_s"] - timeline.due_s
    off_s = np.fmax(lag_s, statistics.nearest_rank(send_lag_s(timeline, due), 0.99))
    whole = seen["first_token_s"] == seen["last_token_s"]  # a stream that came in one piece stays one
    misdated_s = _misdated_s(timeline)
    for name in ("first_byte_s", "first_token_s", "last_token_s", "ended_s"):
        seen[name] -= off_s
    seen["first_token_s"] -= misdated_s
    seen["last_token_s"] -= np.where(whole, misdated_s, 0.0)
    return replace(timeline, observations=seen)


def _finding(gate: str, held: bool, why: str, limit: str, figures: Mapping[str, Any]) -> Finding:
    return Finding(gate, Judgement.PASS if held else Judgement.INVALID, why, limit=limit, figures=figures)


def _records(timeline: Timeline) -> Finding:
    """Every due request has one whole and sensible observation, and every file could be read."""
    missing = int((~timeline.seen).sum())
    seen = timeline.observations
    ok = seen["outcome"] == Outcome.OK
    in_order = (seen["sent_s"] >= timeline.due_s - LAG_S) & (seen["ended_s"] >= seen["sent_s"])
    senseless = int((ok & ~in_order).sum())
    figures = {"n": len(timeline.due_s), "missing": missing, "senseless": senseless, "damage": list(timeline.damage)}
    why = f"all {len(timeline.due_s):,} planned requests are accounted for"
    if timeline.damage:
        more = f" (and {len(timeline.damage) - 1} more)" if len(timeline.damage) > 1 else ""
        why = f"the record is damaged: {timeline.damage[0]}{more}"
    elif missing:
        why = f"{missing:,} of {len(timeline.due_s):,} planned requests have no observation"
    elif senseless:
        why = f"{senseless:,} answers have no end, or times out of order"
    return _finding("records", not (timeline.damage or missing or senseless), why, "complete", figures)


def _capture(timeline: Timeline) -> Finding:
    """A capture with holes is not that traffic: its import lost no more than the scenario allows."""
    told = timeline.replay
    share, allowed = (told[key] if told.get(key) is not None else math.nan for key in ("lost_share", "lost_at_most"))
    account = told.get("account", {})
    lost = sum(account.get("lost", {}).values())
    seen = lost + account.get("kept", 0)  # what the filters left out was not lost
    of = f"{lost:,} of {seen:,} requests" if seen else f"{percent(round(share, 4))} of the requests"
    why = f"the import lost {of}" if not math.isnan(share) else "the plan does not say what the import lost"
    figures = {"measured": share, **({"n": seen, "bad": lost} if seen else {})}
    return _finding("capture", share <= allowed, why, f"<= {percent(allowed)} lost", figures)


def _finished(timeline: Timeline) -> Finding:
    """The plan was played to its end by processes that all ended well."""
    events = timeline.events
    failed = {event.name: event.detail for event in events if event.kind == "exited" and event.detail.get("code") != 0}
    hung = [event for event in events if event.kind in ("never_ready", "overdue")]
    stops = [event for event in events if event.kind == "stopped" and event.name != "watch"]
    why = "the plan was played to its end"
    if interrupted(timeline):
        why = "the run was interrupted"
    elif hung:
        fault = "was not ready" if hung[0].kind == "never_ready" else "was not done"
        why = f"{hung[0].name} {fault} after {lasting(hung[0].detail['limit_s'])}"
    elif failed:
        why = "; ".join(
            f"{name} ended with code {detail.get('code')}" + (f": {detail['said']}" if "said" in detail else "")
            for name, detail in sorted(failed.items())
        )
    elif not stops:
        why = "the player never said that it was done"
    elif any(event.detail.get("why") != "finished" for event in stops) and not _decided(timeline):
        why = "the player was stopped before its plan was done"
    else:
        return _finding("finished", True, why, "by itself", {})
    return _finding(
        "finished", False, why, "by itself", {"exited": {name: detail.get("code") for name, detail in failed.items()}}
    )


def _decided(timeline: Timeline) -> bool:
    """Whether the conductor stopped the player because its look found enough evidence before the extension."""
    return any(event.kind == "decided" for event in timeline.events)


def interrupted(timeline: Timeline) -> bool:
    return any(event.kind == "interrupted" for event in timeline.events)


def _never_sent(timeline: Timeline, due: np.ndarray) -> Finding:
    unsent = np.isnan(timeline.observations["sent_s"]) & (timeline.observations["outcome"] == Outcome.OPEN)
    n, dropped = int(due.sum()), int((due & unsent & timeline.seen).sum())
    share = dropped / n if n else math.nan
    why = f"{dropped:,} of {n:,} due requests were never sent" if n else "no request was due in any judged window"
    shed = sum(int(np.nan_to_num(values[-1])) for _, values in timeline.series("player.shed").values())
    if shed:
        why += f": {shed:,} of the run fell due over its cap of requests in flight"
    figures = {"n": n, "bad": dropped, "shed": shed}
    return _finding("never_sent", share <= NEVER_SENT, why, f"<= {percent(NEVER_SENT)}", figures)


def _lag(gate: str, lag_s: np.ndarray, limit: _Limit, words: str) -> tuple[Finding, bool]:
    """What a lag shows, and whether it is near its limit."""
    if not len(lag_s):
        told = f"p99 <= {seconds(limit.strict_s)}"
        return _finding(gate, False, f"no request shows whether {words}", told, {"n": 0}), False
    p50, p99 = (statistics.nearest_rank(lag_s, quantile) for quantile in (0.5, 0.99))
    limit_s = limit.s_for(p99)
    why = f"99 % within {seconds(max(p99, 0))}" if p99 <= limit_s else f"{words}: p99 is {seconds(p99)}"
    if limit_s > limit.strict_s:
        why += f", over {seconds(limit.strict_s)}, without effect on what the gates say"
    elif limit_s < p99 <= limit.wide_s:
        why += ", and without it a gate would say something else"
    figures = {"measured_s": p99, "p50_s": p50, "max_s": float(lag_s.max()), "n": len(lag_s)}
    return _finding(gate, p99 <= limit_s, why, f"p99 <= {seconds(limit_s)}", figures), p99 > NEAR * limit_s


def _rate(timeline: Timeline, windows: Sequence[Window], slack_s: float) -> Finding:
    """Of the requests due in a window, those sent before it closed: a generator that falls behind sends them later."""
    planned = sent = 0
    for window in windows:
        due = timeline.within(window)
        planned += int(due.sum())
        sent += int((timeline.observations["sent_s"][due] < window.end_s + slack_s).sum())
    lasts_s = sum(window.end_s - window.start_s for window in windows)
    share = sent / planned if planned else math.nan
    why = f"{sent / lasts_s:.4g} of {planned / lasts_s:.4g} planned requests/s were sent in time"
    figures = {"measured": share, "sent": sent, "planned": planned}
    return _finding("achieved_rate", share >= LEAST_RATE, why, f">= {percent(LEAST_RATE)} of planned", figures)


def _cpu(timeline: Timeline, windows: Sequence[Window]) -> Finding:
    limit = f"p95 <= {percent(CPU)} of a core"
    measured, trouble = _worst_worker(
        timeline, "player.cpu_share", windows, lambda values: statistics.nearest_rank(values, 0.95)
    )
    why = trouble or f"the busiest player used {percent(round(measured, 3))} of a core"
    return _finding("player_cpu", measured <= CPU, why, limit, {"measured": measured})


def _waiting(timeline: Timeline, windows: Sequence[Window], gate: str, words: str, near: bool) -> Finding:
    """A wait for cores: fine while short; while longer, only if it left no trace in the lags."""
    bearable = WAITING if near else WAITING_WITHOUT_EFFECT
    measured, trouble = _worst_worker(timeline, f"player.{gate}_share", windows, lambda values: float(values.mean()))
    why = trouble or words.format(percent(round(measured, 3)))
    if not trouble and WAITING < measured <= bearable:
        why += ", without effect on what was measured"
    return _finding(gate, measured <= bearable, why, f"<= {percent(bearable)}", {"measured": measured})


def _worst_worker(
    timeline: Timeline, reading: str, windows: Sequence[Window], reduce: Callable[[np.ndarray], float]
) -> tuple[float, str]:
    """The highest figure of any worker; `nan` and a sentence when a worker's readings do not cover the windows."""
    series = timeline.series(reading)
    workers = np.unique(timeline.observations["worker"][timeline.seen])
    if not series or len(series) < len(workers):
        return math.nan, f"{len(series)} of {max(len(workers), 1)} players gave readings of {reading}"
    expected = sum(math.floor(window.end_s - window.start_s) for window in windows)
    figures = []
    for moments_s, values in series.values():
        inside = np.logical_or.reduce([(moments_s >= w.start_s) & (moments_s < w.end_s) for w in windows])
        if inside.sum() < READINGS * expected or not inside.any():
            return math.nan, f"{int(inside.sum())} of {expected} expected readings of {reading} are there"
        figures.append(reduce(values[inside]))
    return max(figures), ""


def _little(timeline: Timeline, windows: Sequence[Window]) -> Finding:
    """Requests in flight, counted in two ways: from every record's times, and by the players as they went.

    Little's law joins the two. Samples once a second scatter, and may keep the beat of the arrivals: the tolerance
    grows by three of their standard errors and one request.
    """
    residuals, figures = [], {}
    for window in windows:
        counted = measures.in_flight(timeline, window)
        gauges = []
        for moments_s, values in timeline.series("player.in_flight").values():
            inside = (moments_s >= window.start_s) & (moments_s < window.end_s)
            gauges.append(values[inside])
        if not gauges or not all(len(gauge) for gauge in gauges):
            why = f"no player said how many requests were in flight in {window.name}"
            return _finding("in_flight", False, why, f"within {percent(LITTLE)}", {})
        said = sum(float(gauge.mean()) for gauge in gauges)
        error = 1 + 3 * math.sqrt(sum(float(gauge.var()) / len(gauge) for gauge in gauges))
        excess = (
            max(0.0, abs(counted - said) - error) / max(counted, said) if max(counted, said) >= LITTLE_FROM else 0.0
        )
        residuals.append(excess)
        figures[window.name] = {"from_records": counted, "by_players": said}
    worst = max(residuals)
    why = "; ".join(
        f"{name}: {found['from_records']:.3g} in flight by the records, {found['by_players']:.3g} by the players"
        for name, found in figures.items()
    )
    return _finding(
        "in_flight", worst <= LITTLE, why, f"within {percent(LITTLE)}", {"measured": worst, "windows": figures}
    )
