"""How long users were without their service: from good and bad requests to a recovery, or to why there is none.

    due moments, bad or not, what was usual before -> dips -> Recovery

A dip is a stretch that is significantly worse than the steady state was (exact binomial over slides of 5 s); its edges
are change points, each with an interval. The service has recovered at the end of its last dip, if what follows is good
to the end of observation and for as long as the gate asks. Whatever did not recover gets no number, only what was seen.
"""

import itertools
import math
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from harness.judge import statistics
from harness.judge.statistics import Sample
from harness.model import NEVER

SLIDE_S, SLIDE_LEAST = 5.0, 50  # a slide holds at least so many requests, however slowly they come
CONFIDENCE = 0.95  # of what was usual, and of an edge's interval
CONFIDENCE_OF_A_SLIDE = 0.99999  # there are hundreds, and none may seem bad by chance
WELL = 0.05  # the bad share up to which the service was well before


class Kind(StrEnum):
    """What became of the service."""

    RECOVERED = "recovered"
    UNHURT = "not hurt"
    NEVER = "never"
    RELAPSED = "relapsed"
    ALREADY_BAD = "already bad"
    TOO_SHORT = "too short"


@dataclass(frozen=True, slots=True)
class Edge:
    """A moment at which good became bad or bad good: the likeliest, and the ends of its interval; infinite when the
    series ended first."""

    at_s: float
    lo_s: float
    hi_s: float


@dataclass(frozen=True, slots=True)
class Dip:
    """A stretch of bad service."""

    starts: Edge
    ends: Edge


@dataclass(frozen=True, slots=True)
class Recovery:
    """What the users' requests say. All times count from the fault; `nan` is what there is not.

    `at_s` in `lo_s .. hi_s` is when the service was good again for good. `first_s` of a relapse is when it had seemed
    so. `failed` of `n` requests were bad from the fault on, those in flight included; `worst_s` is the second with the
    most bad ones, `worst_bad` of `worst_n`.
    """

    kind: Kind
    observed_s: float
    usual_n: int
    usual_bad: int
    n: int = 0
    failed: int = 0
    at_s: float = NEVER
    lo_s: float = NEVER
    hi_s: float = NEVER
    first_s: float = NEVER
    onset_s: float = NEVER
    bad_s: float = 0.0
    dips: int = 0
    worst_s: float = NEVER
    worst_bad: int = 0
    worst_n: int = 0


def measure(due_s: np.ndarray, bad: np.ndarray, usual: Sample, within_s: float, hold_s: float) -> Recovery:
    """The recovery that a series shows: moments in order, from the fault (0; those in flight then are negative), each
    bad or not. `usual` is the steady state before, `within_s` when the service must be good again, `hold_s` for how
    long it must then be.
    """
    seen = _seen(due_s, bad, usual)
    if min(usual.n, seen.n) < SLIDE_LEAST:
        return seen
    dips = find_dips(due_s, bad, usual.upper_bound(CONFIDENCE))
    seen = replace(
        seen,
        dips=len(dips),
        onset_s=dips[0].starts.at_s if dips else NEVER,
        bad_s=sum(min(dip.ends.at_s, seen.observed_s) - dip.starts.at_s for dip in dips),
    )
    if usual.bad > WELL * usual.n:
        return replace(seen, kind=Kind.ALREADY_BAD)
    if not dips:
        long_enough = seen.observed_s >= max(within_s, hold_s)
        return replace(seen, kind=Kind.UNHURT, at_s=0.0, lo_s=0.0, hi_s=0.0) if long_enough else seen
    return _after(dips, seen, within_s, hold_s)


def _after(dips: list[Dip], seen: Recovery, within_s: float, hold_s: float) -> Recovery:
    """What became of a service that was hurt. What was lost already stays lost, however short the observation."""
    last, first_s = dips[-1].ends, _first_recovery(dips, within_s, hold_s)
    late = min(last.lo_s, seen.observed_s) > within_s
    relapsed = late and not math.isnan(first_s)
    if relapsed:
        seen = replace(seen, kind=Kind.RELAPSED, first_s=first_s)
    if seen.observed_s - last.at_s < hold_s:
        return seen if relapsed else replace(seen, kind=Kind.NEVER if late else Kind.TOO_SHORT)
    if seen.observed_s < within_s:
        return seen
    at_s, lo_s, hi_s = (max(0.0, moment_s) for moment_s in (last.at_s, last.lo_s, last.hi_s))
    return replace(seen, kind=seen.kind if relapsed else Kind.RECOVERED, at_s=at_s, lo_s=lo_s, hi_s=hi_s)


def _seen(due_s: np.ndarray, bad: np.ndarray, usual: Sample) -> Recovery:
    """The counts, before anything is made of them."""
    seen = Recovery(Kind.TOO_SHORT, float(due_s[-1]) if len(due_s) else 0.0, usual.n, usual.bad, len(due_s))
    if not bad.any():
        return seen
    seconds, second = np.unique(np.floor(due_s), return_inverse=True)
    failed = np.bincount(second, weights=bad)
    worst = int(failed.argmax())
    return replace(
        seen,
        failed=int(bad.sum()),
        worst_s=float(seconds[worst]),
        worst_bad=int(failed[worst]),
        worst_n=int((second == worst).sum()),
    )


def _first_recovery(dips: list[Dip], within_s: float, hold_s: float) -> float:
    """When the service seemed to have recovered in time, before the next dip; `nan` when it never seemed so."""
    for dip, following in itertools.pairwise(dips):
        if dip.ends.at_s <= within_s and following.starts.at_s - dip.ends.at_s >= hold_s:
            return max(0.0, dip.ends.at_s)
    return NEVER


# Dips ------------------------------------------------------------------------------------------------------------


def find_dips(due_s: np.ndarray, bad: np.ndarray, usual_share: float) -> list[Dip]:
    """The stretches that are significantly worse than the usual bad share, in order."""
    n, length_s = len(due_s), _slide_s(due_s)
    stops = np.searchsorted(due_s, due_s + length_s)  # slide i holds requests i .. stops[i]
    whole = due_s + length_s <= due_s[-1] + length_s / SLIDE_LEAST
    sums = np.concatenate([[0], np.cumsum(bad)])
    found = np.flatnonzero(whole & (sums[stops] - sums[:-1] >= _critical(stops - np.arange(n), usual_share)))
    if not len(found):
        return []
    apart = np.flatnonzero(found[1:] > stops[found[:-1]])
    firsts, lasts = found[np.concatenate([[0], apart + 1])], found[np.concatenate([apart, [len(found) - 1]])]
    begins = np.concatenate([[0], stops[lasts[:-1]]])  # each dip's own requests: between the slides of its neighbours
    finishes = np.concatenate([firsts[1:], [n]])
    return [
        _dip(due_s, bad, (begin, first, last, finish), stops)
        for begin, first, last, finish in zip(begins, firsts, lasts, finishes, strict=True)
    ]


def _dip(due_s: np.ndarray, bad: np.ndarray, around: tuple[int, int, int, int], stops: np.ndarray) -> Dip:
    """A dip's edges. `around` are the indices at which its surroundings begin, of its first and of its last bad slide,
    and at which its surroundings finish.

    It turned good within its last bad slide, by that and what came just before and all after; it turned bad within its
    first one, which is the same in the mirror.
    """
    begin, first, last, finish = around
    since = int(np.searchsorted(due_s, due_s[last] - (due_s[stops[last] - 1] - due_s[last])))
    low, at, high = (since + k for k in _change(bad[since:finish], last - since, stops[last] - since))
    moments = [*due_s.tolist(), np.inf]  # Python's numbers: they are told as they are
    ends = Edge(at_s=moments[at], lo_s=moments[low - 1], hi_s=moments[high])
    stop = min(int(stops[first]), at)
    high, at, low = (stop - k for k in _change(bad[begin:stop][::-1], 0, stop - max(first, begin)))
    return Dip(Edge(at_s=moments[at], lo_s=moments[max(low - 1, 0)], hi_s=moments[high]), ends)


def _slide_s(due_s: np.ndarray) -> float:
    return max(SLIDE_S, SLIDE_LEAST * float(due_s[-1] - due_s[0]) / len(due_s))


def _critical(sizes: np.ndarray, usual_share: float) -> np.ndarray:
    """From how many bad ones on a slide of each size is significantly worse than usual."""
    table, least = {}, 1
    for size in np.unique(sizes).tolist():
        # More requests never need fewer bad ones: each search begins where the last one ended.
        while not statistics.significantly_bad(least, size, usual_share, CONFIDENCE_OF_A_SLIDE):
            least += 1
        table[size] = least
    return np.array([table[size] for size in sizes.tolist()])


def _change(bad: np.ndarray, first: int, stop: int) -> tuple[int, int, int]:
    """The index from which a bad series is better, out of `first + 1 .. stop`: the likeliest, between the interval's.

    The likelihood of two constant shares, each integrated over all that it could be (a Beta function), for every place
    of the change; places are equally likely beforehand.
    """
    sums, n = np.concatenate([[0], np.cumsum(bad)]), len(bad)
    logs = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, n + 2)))])  # of factorials

    def likelihood(k: np.ndarray, of: np.ndarray) -> np.ndarray:
        return np.asarray(logs[k] + logs[of - k] - logs[of + 1])

    places = np.arange(first + 1, stop + 1)
    worse = places[(sums[places] * n > sums[n] * places) | (places == n)]  # before than on the whole
    places = worse if len(worse) else places
    weight = likelihood(sums[places], places) + likelihood(sums[n] - sums[places], n - places)
    weight = np.exp(weight - weight.max())
    below = np.cumsum(weight) / weight.sum()
    low, high = np.searchsorted(below, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    at = int(weight.argmax())
    return int(places[min(low, at)]), int(places[at]), int(places[max(high, at)])
