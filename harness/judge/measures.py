"""What a window's observations are in numbers: who counts, what each one took, and whether it was bad.

Pure functions of a timeline and a mask over its requests. A request that failed has no time that could flatter: its
value is infinite. One that is still open when the run ends is bad once it is older than the limit, and unknown before.
`nan` is a time that never came, so it is never below a limit. Nothing here is averaged and nothing is thrown away.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from harness.model import Outcome, Tag, Window, expects
from harness.timeline import Timeline

Of = Literal["e2e", "ttft", "itl", "tpot"]
FAILED = float("inf")
_DOUBTFUL: Mapping[Of, Mapping[str, Tag]] = {
    "e2e": {},
    "ttft": {"coalesced_streams": Tag.COALESCED},
    "itl": {"coalesced_streams": Tag.COALESCED, "chunked_streams": Tag.CHUNKED_TOKENS},
    "tpot": {"uncounted_streams": Tag.USAGE_MISSING},
}


@dataclass(frozen=True, slots=True)
class Population:
    """The units of one count: requests, or the gaps of their streams. Row by row: when due, how long, what became.

    `buffered` of the unknown ones are so because their stream came in one piece, not because it was open.
    """

    due_s: np.ndarray
    values_s: np.ndarray
    bad: np.ndarray
    unknown: np.ndarray
    buffered: int = 0

    @property
    def n(self) -> int:
        return len(self.bad)


def good_requests(timeline: Timeline, window: Window, classes: Sequence[str] = ()) -> np.ndarray:
    """Mask of the requests due in the window that should be served, of the named classes or of all.

    Not among them: a request that was answered by a refusal its plan calls right. It is judged where refusals are.
    """
    mask: np.ndarray = timeline.within(window) & timeline.good & ~_ended(timeline, Outcome.REJECTED_AS_EXPECTED)
    if classes:
        named = [code for code, name in enumerate(timeline.classes) if name in classes]
        mask &= np.isin(timeline.class_code, named)
    return mask


def answered(timeline: Timeline, mask: np.ndarray) -> np.ndarray:
    """Mask of those that got at least one byte back."""
    return np.asarray(mask & ~np.isnan(timeline.observations["first_byte_s"]))


def hung_up_as_planned(timeline: Timeline) -> np.ndarray:
    return np.asarray(timeline.gives_up & _ended(timeline, Outcome.CANCELLED_BY_US))


def latencies(timeline: Timeline, mask: np.ndarray, of: Of, below_s: float) -> Population:
    """The population of a latency gate: every masked request is good, bad or unknown against the limit.

    A client that hangs up as planned counts once it waited as long as the limit, or got what is timed. TTFT, ITL and
    TPOT exist only for streams; TPOT only for answers of two tokens or more. A unit of ITL is a gap; a stream that
    failed is one bad gap more, one still open an unknown one. ITL and TPOT of a stream that came in one piece are
    unknown: whatever held it back hides how its tokens came.
    """
    hung_up, age = hung_up_as_planned(timeline), age_s(timeline)
    if of != "e2e":
        mask = mask & timeline.streamed
    if of == "itl":
        return _gaps(timeline, mask, below_s)
    times_s = measured_s(timeline, of)
    mask = mask & ~(hung_up & np.isnan(times_s) & (age < below_s))
    if of == "tpot":
        mask = mask & ~hung_up & ~(_ended(timeline, Outcome.OK) & (timeline.observations["tokens_out"] < 2))
    values_s, unended = times_s[mask], never_ended(timeline)[mask]
    failed = ~_ended(timeline, Outcome.OK)[mask] & ~unended & ~hung_up[mask]
    late = np.where(np.isnan(values_s), age[mask] >= below_s, values_s >= below_s)
    bad = failed | np.where(unended | hung_up[mask], late, ~(values_s < below_s))
    hidden = buffered(timeline)[mask] & ~bad & ~unended if of == "tpot" else np.zeros_like(bad)
    return Population(
        due_s=timeline.due_s[mask],
        values_s=np.where(failed | unended | hidden | np.isnan(values_s), FAILED, values_s),
        bad=bad,
        unknown=(unended & ~bad) | hidden,
        buffered=int(hidden.sum()),
    )


def _gaps(timeline: Timeline, mask: np.ndarray, below_s: float) -> Population:
    unended = never_ended(timeline) & mask
    failed = mask & ~unended & ~_ended(timeline, Outcome.OK) & ~hung_up_as_planned(timeline)
    of_row = np.diff(timeline.gap_start)[mask]
    hidden = np.repeat(buffered(timeline)[mask], of_row)
    gaps_s = np.where(hidden, np.float32(FAILED), timeline.gaps_of(mask))
    extra = np.concatenate([np.ones(failed.sum(), dtype=bool), np.zeros(unended.sum(), dtype=bool)])
    # Millions of gaps: single precision still tells the span that each belongs to.
    due_s = np.repeat(timeline.due_s[mask].astype(np.float32), of_row)
    return Population(
        due_s=np.concatenate([due_s, timeline.due_s[failed], timeline.due_s[unended]], dtype=np.float32),
        values_s=np.concatenate([gaps_s, np.full(len(extra), FAILED, dtype=gaps_s.dtype)]),
        bad=np.concatenate([~(gaps_s < below_s) & ~hidden, extra]),
        unknown=np.concatenate([hidden, ~extra]),
        buffered=int(hidden.sum()),
    )


def successes(timeline: Timeline, mask: np.ndarray) -> Population:
    """The population of a success gate: bad is every end but a whole good answer. No time is looked at."""
    mask = mask & ~hung_up_as_planned(timeline)
    unended = never_ended(timeline)[mask]
    bad = ~_ended(timeline, Outcome.OK)[mask] & ~unended
    return Population(timeline.due_s[mask], np.zeros(0), bad, unended)


def within_limits(timeline: Timeline, mask: np.ndarray, limits_s: Mapping[Of, float]) -> Population:
    """The population of a goodput gate: bad is a failure, or over any limit that exists for the request."""
    mask = mask & ~hung_up_as_planned(timeline)
    unended = never_ended(timeline)
    over = ~_ended(timeline, Outcome.OK) & ~unended
    for of, limit_s in limits_s.items():
        times_s = measured_s(timeline, of)
        exists = np.ones_like(mask) if of == "e2e" else timeline.streamed
        if of == "tpot":
            exists = exists & ~unended & (timeline.observations["tokens_out"] >= 2)
        waited = np.isnan(times_s) & (age_s(timeline) >= limit_s)
        over |= exists & np.where(unended, waited | (times_s >= limit_s), ~(times_s < limit_s))
    bad = over[mask]
    hidden = buffered(timeline)[mask] & ~bad & ~unended[mask] if "tpot" in limits_s else np.zeros_like(bad)
    return Population(timeline.due_s[mask], np.zeros(0), bad, unended[mask] & ~bad | hidden, int(hidden.sum()))


def may_be_refused(timeline: Timeline) -> np.ndarray:
    """Mask of the requests for which some answer other than success is right."""
    special = [code for code, expect in enumerate(timeline.expects) if expect != ("2xx",)]
    return np.isin(timeline.expect_code, special)


def rejections(timeline: Timeline, mask: np.ndarray) -> dict[str, dict[str, Any]]:
    """For each kind of request that is not simply to be served: the answers that are right, and what came.

    A kind is the flaw of a bad request, or the class of one that may be served or refused. What its plan hung up on
    has no answer to judge. `wrong` counts by how it ended, with the status that came.
    """
    mask = mask & may_be_refused(timeline) & ~hung_up_as_planned(timeline)
    found: dict[str, dict[str, Any]] = {}
    columns = (timeline.class_code, timeline.flaw_code, timeline.expect_code)
    ends = (timeline.observations["outcome"], timeline.observations["status"])
    rows = np.stack([column[mask].astype(np.int64) for column in (*columns, *ends)], axis=1)
    for (class_, flaw, expect, end, status), n in zip(*np.unique(rows, axis=0, return_counts=True), strict=True):
        kind = timeline.flaws[flaw] or timeline.classes[class_]
        answers = timeline.expects[expect]
        entry = found.setdefault(kind, {"expect": list(answers), "n": 0, "right": 0, "open": 0, "wrong": {}})
        entry["n"] += int(n)
        outcome = Outcome(int(end))
        if outcome == Outcome.OPEN:
            entry["open"] += int(n)
        elif outcome in (Outcome.OK, Outcome.REJECTED_AS_EXPECTED) and expects(answers, int(status)):
            entry["right"] += int(n)
        else:
            how = f"{outcome.name.lower()} {status}" if status else outcome.name.lower()
            entry["wrong"][how] = entry["wrong"].get(how, 0) + int(n)
    return dict(sorted(found.items()))


def measured_s(timeline: Timeline, of: Of | Literal["service"]) -> np.ndarray:
    """One time for every request of the plan, `nan` where it has none.

    `e2e` is response latency, due to last byte; `service` the same from the moment of sending.
    """
    seen = timeline.observations
    if of == "ttft":
        times = seen["first_token_s"] - timeline.due_s
    elif of == "tpot":
        times = (seen["last_token_s"] - seen["first_token_s"]) / np.maximum(seen["tokens_out"].astype(float) - 1, 1)
    else:
        ended_s = np.where(never_ended(timeline) | hung_up_as_planned(timeline), np.nan, seen["ended_s"])
        times = ended_s - (timeline.due_s if of == "e2e" else seen["sent_s"])
    return np.asarray(times)


def failures_last(timeline: Timeline, mask: np.ndarray, of: Literal["e2e", "service", "ttft"]) -> np.ndarray:
    """The masked requests' times with every failure, and whatever has no time, at infinity: what quantiles are of."""
    times = measured_s(timeline, of)[mask]
    fine = _ended(timeline, Outcome.OK)[mask] & ~np.isnan(times)
    return np.where(fine, times, FAILED)


def age_s(timeline: Timeline) -> np.ndarray:
    """How long after its due moment each request ended, or was at the end of the run when it had not."""
    ended_s = timeline.observations["ended_s"]
    last_s = np.where(_ended(timeline, Outcome.OPEN) | np.isnan(ended_s), closed_s(timeline), ended_s)
    return np.asarray(last_s - timeline.due_s)


def closed_s(timeline: Timeline) -> float:
    """When the players stopped looking: their own word, else the last thing that any log holds."""
    stopped = [event.at_s for event in timeline.events if event.kind == "stopped" and event.name != "watch"]
    if stopped:
        return max(stopped)
    last = [reading.at_s for reading in timeline.readings[-1:]]
    for name in ("sent_s", "first_byte_s", "last_token_s", "ended_s"):
        moments = timeline.observations[name]
        last += [float(np.nanmax(moments))] if not np.isnan(moments).all() else []
    return max(last, default=0.0)


def in_flight(timeline: Timeline, window: Window) -> float:
    """Requests between sending and end, averaged over the window's time."""
    sent_s, ended_s = timeline.observations["sent_s"], timeline.due_s + age_s(timeline)
    inside = np.minimum(ended_s, window.end_s) - np.maximum(sent_s, window.start_s)
    return float(np.nansum(np.maximum(inside, 0))) / (window.end_s - window.start_s)


def buffered(timeline: Timeline) -> np.ndarray:
    """Mask of the streams of two events or more that all came in one read: a proxy held them back, or the client."""
    seen = timeline.observations
    return np.asarray((seen["gaps"] > 0) & (seen["first_token_s"] == seen["last_token_s"]))


def tagged(timeline: Timeline, mask: np.ndarray, tag: Tag) -> int:
    """How many of the masked requests carry a tag."""
    return int(((timeline.observations["tags"][mask] & tag) > 0).sum())


def doubts(timeline: Timeline, mask: np.ndarray, of: Of) -> dict[str, int]:
    """How many of the masked streams have times that say less than they seem to; what does not occur is not there."""
    mask = mask & timeline.streamed
    found = {name: tagged(timeline, mask, tag) for name, tag in _DOUBTFUL[of].items()}
    if of in ("itl", "tpot"):
        found["buffered_streams"] = int((buffered(timeline) & mask).sum())
    return {name: n for name, n in found.items() if n}


def _ended(timeline: Timeline, how: Outcome) -> np.ndarray:
    return np.asarray(timeline.observations["outcome"] == how)


def never_ended(timeline: Timeline) -> np.ndarray:
    """Open at the end of the run, or cancelled by us without a plan to: the answer might still have been good."""
    cancelled = _ended(timeline, Outcome.CANCELLED_BY_US) & ~timeline.gives_up
    return np.asarray(_ended(timeline, Outcome.OPEN) | cancelled)
