"""Captured answers beside replayed ones: which changed in kind, and how long the same requests took then and now.

Row k of the capture and row k of the run are the same request: nothing is matched by guesses. Answers are compared by
what a client relies on: served or refused and with which status, why it ended, which members it has. Never by their
text, for a model's words differ from run to run. Pure, and decides nothing: gates do.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from harness.judge import gpu, measures, statistics
from harness.judge.statistics import Sample
from harness.model import Finish, Outcome, Window
from harness.timeline import Timeline

Compared = Literal["e2e", "ttft", "itl"]
COMPARED: tuple[Compared, ...] = ("e2e", "ttft", "itl")
QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "p99.9": 0.999}
CONFIDENCE = 0.95  # of a ratio's interval: each of its two quantiles gets one of half the doubt
EXAMPLES = 5
KINDS = 20  # of one change
SLICES = 12

# What an answer was, as one number: an exact 4xx, a family (200, 300, 500), or one of these.
NONE, ABORTED, BROKEN, UNKNOWN = 0, -1, -2, -3
_WORDS = {NONE: "none", ABORTED: "aborted", BROKEN: "broken", UNKNOWN: "unknown"}
_OF_THE_MOMENT = (408, 429)  # refusals that say more of the load than of the request


def replayed(timeline: Timeline) -> str:
    """Why nothing can be compared with a capture; "" when it can."""
    if timeline.captured is not None:
        return ""
    if not timeline.replay:
        return "the run replays no capture"
    if timeline.replay.get("timing_only"):
        return "the recording holds times and token counts only: it has no answers to compare with"
    return "the captured answers are not there"


def captured_of(timeline: Timeline) -> Timeline:
    """The captured side of a run that `replayed` finds no fault with."""
    if timeline.captured is None:
        raise ValueError(replayed(timeline))
    return timeline.captured


# What each answer was ----------------------------------------------------------------------------------------------


def answers(timeline: Timeline) -> np.ndarray:
    """What each request was answered with. `aborted` is a client that hung up as planned, `none` no answer at all,
    `broken` a 2xx whose body was cut short or carried an error; `unknown` is what the end of the run, or a hole in
    the capture, keeps from us."""
    seen = timeline.observations
    status = seen["status"].astype(np.int32)
    found = np.where(status // 100 == 4, status, status // 100 * 100)
    found[(found == 200) & ~np.isin(seen["outcome"], [Outcome.OK, Outcome.ACCEPTED_BUT_BAD])] = BROKEN
    found[measures.never_ended(timeline)] = UNKNOWN
    found[measures.hung_up_as_planned(timeline)] = ABORTED
    return np.asarray(found)


def answer_name(answer: int) -> str:
    return _WORDS.get(answer) or (str(answer) if answer // 100 == 4 else f"{answer // 100}xx")


def matrix(timeline: Timeline, mask: np.ndarray) -> dict[str, dict[str, dict[str, Any]]]:
    """Captured answer -> replayed answer -> {n, examples}, over the masked requests that both sides have seen."""
    captured = captured_of(timeline)
    found: dict[str, dict[str, dict[str, Any]]] = {}
    both = mask & timeline.seen & captured.seen
    for (was, now), rows in _groups(both, answers(captured), answers(timeline)):
        row = found.setdefault(answer_name(was), {})
        row[answer_name(now)] = {"n": len(rows), "examples": rows[:EXAMPLES].tolist()}
    return found


def _groups(mask: np.ndarray, *columns: np.ndarray) -> list[tuple[tuple[int, ...], np.ndarray]]:
    """The masked rows by what the columns hold there, the largest group first."""
    rows = np.flatnonzero(mask)
    if not len(rows):
        return []
    held = np.stack([column[rows].astype(np.int64) for column in columns], axis=1)
    keys, which = np.unique(held, axis=0, return_inverse=True)
    which = which.reshape(-1)
    parts = np.split(rows[np.argsort(which, kind="stable")], np.cumsum(np.bincount(which))[:-1])
    return sorted(zip(map(tuple, keys.tolist()), parts, strict=True), key=lambda group: -len(group[1]))


# What changed ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Change:
    """One way in which answers can differ. Masks over the plan: the requests that it could happen to (`among`), those
    that it did happen to, and those of which the run ended too early to tell.

    So many `units` were `fault`. `was` and `now` are what is compared, a number a row; `said` gives its words.
    """

    units: str
    fault: str
    among: np.ndarray
    changed: np.ndarray
    unknown: np.ndarray
    was: np.ndarray
    now: np.ndarray
    said: Callable[[int], str]


def changes(timeline: Timeline, mask: np.ndarray) -> dict[str, Change]:
    """Every way to differ, by its name, over the masked requests that both sides have seen."""
    both = mask & timeline.seen & captured_of(timeline).seen
    return {**_of_status(timeline, both), **_of_content(timeline, both)}


def _of_status(timeline: Timeline, mask: np.ndarray) -> dict[str, Change]:
    captured = captured_of(timeline)
    was, now = answers(captured), answers(timeline)
    family_was, family_now = captured.observations["status"] // 100, timeline.observations["status"] // 100
    accepted = mask & (family_was == 2)
    refused = mask & (family_was == 4) & ~np.isin(captured.observations["status"], _OF_THE_MOMENT)
    failed = np.isin(now, [300, 500, NONE, BROKEN]) & (now != was)
    otherwise = (family_now != 2) & (now != was) & ~np.isin(now, [UNKNOWN, ABORTED])

    def change(among: np.ndarray, units: str, fault: str, differs: np.ndarray) -> Change:
        unknown = among & (now == UNKNOWN) & ~differs
        return Change(f"requests {units} in the capture", fault, among, among & differs, unknown, was, now, answer_name)

    return {
        "rejected_then_accepted": change(refused, "refused", "accepted", family_now == 2),
        "accepted_then_rejected": change(accepted, "accepted", "refused", family_now == 4),
        "accepted_then_failed": change(accepted, "accepted", "left without a good answer", failed),
        "rejected_otherwise": change(refused, "refused", "answered in another way", otherwise),
    }


def _of_content(timeline: Timeline, mask: np.ndarray) -> dict[str, Change]:
    """Why answers end and which members they have, of those that are of one kind then and now."""
    captured = captured_of(timeline)
    was = answers(captured)
    alike = mask & (was > 0) & (was == answers(timeline))

    def change(column: str, units: str, fault: str, said: Callable[[int], str]) -> Change:
        then, now = captured.observations[column], timeline.observations[column]
        among = alike & (then != 0) & (now != 0)  # 0 is what was not said, or not looked at
        return Change(units, fault, among, among & (then != now), np.zeros_like(among), then, now, said)

    return {
        "other_finish": change(
            "finish",
            "answers that say why they ended",
            "ended for another reason",
            lambda code: Finish(code).name.lower(),
        ),
        "other_shape": change("shape", "answers of known shape", "made of other members", "{:08x}".format),
    }


def kinds(timeline: Timeline, change: Change) -> list[dict[str, Any]]:
    """What changed, by the kind of request: its path and flaw, what it got and gets; the most frequent first.

    `n` of `of` such requests changed so; `examples` are their places in the plan.
    """
    members = _members(timeline)
    of = {key: len(rows) for key, rows in _groups(change.among, timeline.path_code, timeline.flaw_code, change.was)}
    found = []
    by_kind = _groups(change.changed, timeline.path_code, timeline.flaw_code, change.was, change.now)
    for (path, flaw, was, now), rows in by_kind[:KINDS]:
        kind: dict[str, Any] = {"path": timeline.paths[path], "flaw": timeline.flaws[flaw]}
        kind |= {"captured": change.said(was), "replayed": change.said(now)}
        kind |= {"n": len(rows), "of": of[path, flaw, was], "examples": rows[:EXAMPLES].tolist()}
        if {was, now} <= members.keys():
            kind |= {"appeared": sorted(members[now] - members[was]), "vanished": sorted(members[was] - members[now])}
        found.append(kind)
    return found


def _members(timeline: Timeline) -> Mapping[int, set[str]]:
    """What each shape stands for, by the recording and by those who played it."""
    told = [(str(shape), members) for shape, members in timeline.replay.get("shapes", {}).items()]
    told += [(event.name, event.detail.get("members", ())) for event in timeline.events if event.kind == "shape"]
    return {int(shape): set(members) for shape, members in told if shape.isdecimal()}


# How long it took --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Times:
    """What was measured, and when the request was due that each value belongs to."""

    values_s: np.ndarray
    due_s: np.ndarray


def times(timeline: Timeline, side: Timeline, mask: np.ndarray, of: Compared) -> Times:
    """The masked requests' times on one side, for spans of this run's time; gaps of streams where asked for."""
    if of == "itl":
        return Times(side.gaps_of(mask), np.repeat(timeline.due_s[mask], np.diff(side.gap_start)[mask]))
    return Times(measures.measured_s(side, of)[mask], timeline.due_s[mask])


def measurable(side: Timeline, of: Compared) -> np.ndarray:
    """Mask of the requests that were served on this side and have such a time."""
    served = side.observations["outcome"] == Outcome.OK
    if of == "itl":
        return np.asarray(served & side.streamed & (side.observations["gaps"] > 0) & ~measures.buffered(side))
    timed = ~np.isnan(measures.measured_s(side, of))
    return np.asarray(served & timed & (side.streamed if of == "ttft" else True))


def latency(timeline: Timeline, mask: np.ndarray, window: Window) -> dict[str, dict[str, dict[str, Any]]]:
    """Class -> e2e, ttft, itl -> n and quantiles of both sides, over the requests that were served in both.

    `all` stands first where there are several classes. A ratio is replayed to captured, with its interval.
    """
    captured = captured_of(timeline)
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for of in COMPARED:
        both = mask & measurable(timeline, of) & measurable(captured, of)
        for name, rows in _classes(timeline, both):
            then, now = times(timeline, captured, rows, of), times(timeline, timeline, rows, of)
            found.setdefault(name, {})[of] = {"n": int(rows.sum()), **dict(_quantiles(then, now, window))}
    return found


def _classes(timeline: Timeline, mask: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    codes = np.unique(timeline.class_code[mask])
    if len(codes) > 1:
        yield "all", mask
    for code in codes:
        yield timeline.classes[code], mask & (timeline.class_code == code)


def _quantiles(then: Times, now: Times, window: Window) -> Iterator[tuple[str, dict[str, float]]]:
    sides = [(np.sort(side.values_s), side) for side in (then, now)]
    for name, quantile in QUANTILES.items():
        (then_low, was, then_high), (now_low, is_now, now_high) = (
            _around(ordered, side, quantile, window) for ordered, side in sides
        )
        yield (
            name,
            {
                "captured_s": was,
                "replayed_s": is_now,
                "ratio": _ratio(is_now, was),
                "low": _ratio(now_low, then_high),
                "high": _ratio(now_high, then_low),
            },
        )


def _around(ordered: np.ndarray, side: Times, quantile: float, window: Window) -> tuple[float, float, float]:
    """A quantile between two values that hold it, by exact ranks: wider where the spans of the window differ.

    `nan` on a side that so few values do not show.
    """
    value = float(ordered[statistics.rank(len(ordered), quantile) - 1])
    sample = Sample.clustered(side.due_s, side.values_s > value, window.start_s, window.end_s)
    low, high = sample.ranks_around(quantile, (1 + CONFIDENCE) / 2)
    return float(ordered[low - 1]) if low else np.nan, value, float(ordered[high - 1]) if high else np.nan


def _ratio(now_s: float, then_s: float) -> float:
    return now_s / then_s if then_s else np.nan


# Over time ---------------------------------------------------------------------------------------------------------


def over_time(timeline: Timeline, window: Window) -> list[dict[str, float]]:
    """The window in slices: how many requests a second came and which share of them was refused, then and now, and the
    fullest GPU's memory; `nan` where there is nothing."""
    edges = np.linspace(window.start_s, window.end_s, SLICES + 1)
    used = [(one.at_s, one.used) for one in gpu.gpus(timeline, window)]
    found = []
    for start_s, end_s in pairwise(edges.tolist()):
        row = {"from_s": start_s}
        for name, side in (("captured", captured_of(timeline)), ("replayed", timeline)):
            due = side.seen & side.within(Window("", start_s, end_s))
            row[f"{name}_per_s"] = float(due.sum()) / (end_s - start_s)
            row[f"{name}_refused_share"] = _share(side.observations["status"][due] // 100 == 4)
        inside = [share[(at_s >= start_s) & (at_s < end_s)] for at_s, share in used]
        row["gpu_memory_share"] = max((float(share.max()) for share in inside if len(share)), default=np.nan)
        found.append(row)
    return found


def _share(mask: np.ndarray) -> float:
    return float(mask.mean()) if len(mask) else np.nan


def punctuality(timeline: Timeline, mask: np.ndarray) -> dict[str, float]:
    """How true the replay was to its times: the error of the gaps between requests, and how far they drifted apart."""
    sent_s, due_s = timeline.observations["sent_s"], timeline.due_s
    rows = np.flatnonzero(mask & ~np.isnan(sent_s))
    rows = rows[np.argsort(due_s[rows], kind="stable")]
    late_s = (sent_s - due_s)[rows]
    if len(rows) < 2:
        return {"gap_error_p99_s": np.nan, "drift_share": np.nan}
    tenth, lasts_s = max(1, len(rows) // 10), due_s[rows[-1]] - due_s[rows[0]]
    drift_s = float(np.median(late_s[-tenth:]) - np.median(late_s[:tenth]))
    return {
        "gap_error_p99_s": statistics.nearest_rank(np.abs(np.diff(late_s)), 0.99),
        "drift_share": abs(drift_s) / float(lasts_s) if lasts_s else np.nan,
    }


def tables(timeline: Timeline, mask: np.ndarray, windows: Sequence[Window]) -> dict[str, Any]:
    """What a replay adds to a verdict's tables: how it was played and, when answers were captured, all of the above."""
    told = {key: value for key in _TOLD if (value := timeline.replay.get(key)) is not None}
    found: dict[str, Any] = {"replay": {**told, **punctuality(timeline, mask)}}
    if not replayed(timeline):
        span = Window("judged", min(window.start_s for window in windows), max(window.end_s for window in windows))
        found["answers"] = matrix(timeline, mask)
        found["changes"] = [
            {"change": name, **kind}
            for name, change in changes(timeline, mask).items()
            for kind in kinds(timeline, change)
        ]
        found["against_capture"] = latency(timeline, mask, span)
        found["over_time"] = over_time(timeline, span)
    return found


_TOLD = ("recording", "order", "speed", "requests", "connections", "lost_share")
