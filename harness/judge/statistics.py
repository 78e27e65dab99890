"""How sure a count lets us be: exact binomial bounds, ranks and sample sizes, over plain numbers.

Every gate here is a count of bad units among `n`, held against the share that may be bad. A quantile gate is one too:
`P95 < T` holds iff at most `n - ceil(0.95 n)` units are not below T (nearest rank, in integers). Nothing is
interpolated, nothing approximated by a normal curve but Student's factor in `Sample.effective`, and nothing here knows
what a request is. The bounds speak of this run only: what differs between runs needs runs.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from statistics import NormalDist

import numpy as np

LONGEST_SPAN_S = 10.0  # requests due within one span share queues, so their fates are not independent
LEAST_SPANS = 10  # that a window is cut into: from fewer it is hard to tell how much they share
HOPELESS = 10_000_000  # units; no run is this long


def exact(share: float) -> Fraction:
    """The decimal that the user wrote, to twelve places: 0.95 as 19/20, not as its nearest double."""
    return Fraction(f"{share:.12f}")


def rank(n: int, quantile: float) -> int:
    """The nearest rank of a quantile among n values, counted from 1."""
    return max(1, math.ceil(exact(quantile) * n))


def allowed(n: int, quantile: float) -> int:
    """How many of n units may be bad while the quantile still holds: n - ceil(quantile * n)."""
    return n - math.ceil(exact(quantile) * n)


def nearest_rank(values: np.ndarray, quantile: float) -> float:
    """The smallest value that at least this share of the values does not exceed; `nan` of nothing."""
    if not len(values):
        return math.nan
    at = rank(len(values), quantile) - 1
    return float(np.partition(values, at)[at])


def binomial_cdf(at_most: int, n: int, p: float) -> float:
    """P(X <= at_most) for X of Binomial(n, p), exact to about 1e-10 relative up to n = 500,000."""
    if at_most < 0:
        return 0.0
    if at_most >= n or p <= 0:
        return 1.0
    if p >= 1:
        return 0.0
    if at_most <= n * p:
        return _tail(at_most, n, p)
    return 1.0 - _tail(n - at_most - 1, n, 1 - p)  # the other tail, so that no term exceeds the first


def _tail(k: int, n: int, p: float) -> float:
    """P(X <= k) for k at or below the mode: the last term, times the sum of what each smaller one is of it."""
    log_last = (
        math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) + k * math.log(p) + (n - k) * math.log1p(-p)
    )
    terms = min(k, 100 + math.ceil(12 * math.sqrt(n * p * (1 - p))))  # all others are far below a double's precision
    j = np.arange(k, k - terms, -1, dtype=np.float64)
    ratios = j / (n - j + 1) * ((1 - p) / p)
    return min(1.0, math.exp(log_last) * (1.0 + float(np.cumprod(ratios).sum())))


def upper_bound(bad: int, n: int, confidence: float) -> float:
    """Clopper and Pearson's one-sided upper bound of the true bad share, by bisection."""
    if bad >= n:
        return 1.0
    low, high = bad / n, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if binomial_cdf(bad, n, middle) > 1 - confidence else (low, middle)
    return high


def proves(bad: int, n: int, tolerated: float, confidence: float) -> bool:
    """Whether `bad` of `n` shows, at this confidence, that the true bad share is below the tolerated one."""
    return n > 0 and binomial_cdf(bad, n, tolerated) <= 1 - confidence


def provable(n: int, tolerated: float, confidence: float) -> int:
    """The most bad units of n that still prove the gate; -1 when even none would not."""
    low, high = -1, math.floor(n * tolerated) + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if proves(middle, n, tolerated, confidence) else (low, middle)
    return low


def units_to_prove(share: float, tolerated: float, confidence: float) -> int | None:
    """About how many units prove the gate when this share of them is bad; None when no run is long enough."""
    return _least(lambda n: proves(math.ceil(share * n), n, tolerated, confidence), share < tolerated)


def units_to_prove_with(bad: int, tolerated: float, confidence: float) -> int | None:
    """How many units prove the gate when no more than `bad` of them are bad: MLPerf's early stopping."""
    return _least(lambda n: proves(min(bad, n), n, tolerated, confidence), tolerated > 0)


def _least(holds: Callable[[int], bool], possible: bool) -> int | None:
    if not possible:
        return None
    high = 1
    while not holds(high):
        high *= 2
        if high > HOPELESS:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


@lru_cache(maxsize=1 << 14)  # a recovery asks the same of each of its tables and gates
def significantly_bad(bad: int, n: int, tolerated: float, confidence: float) -> bool:
    """Whether `bad` of `n` shows, at this confidence, that the true bad share is above the tolerated one."""
    return 1.0 - binomial_cdf(bad - 1, n, tolerated) <= 1 - confidence


def span_s(start_s: float, end_s: float) -> float:
    """How long the spans are that a window is cut into: a tenth of it, and at most 10 s."""
    return min(LONGEST_SPAN_S, (end_s - start_s) / LEAST_SPANS)


@dataclass(frozen=True, slots=True)
class Sample:
    """`bad` of `n`, and how much that many units in bursts are worth as independent ones.

    `deff` is the design effect: the variance of the bad share between clusters over what independence would give.
    `independent` units, rounded down, would carry as much evidence. `correlation` is that of neighbouring clusters.
    """

    n: int
    bad: int
    clusters: int = 0
    deff: float = 1.0
    independent: int = 0
    correlation: float = 0.0

    @classmethod
    def clustered(cls, due_s: np.ndarray, bad: np.ndarray, start_s: float, end_s: float) -> "Sample":
        """Count units by the spans of the window that they were due in.

        With at least one bad unit, the design effect is that of the spans (ratio estimator; Korn and Graubard's use of
        Student's factor for few clusters). Units all of one span, some of them bad, are worth a single one: nothing
        shows that they did not share one fate.
        """
        n, total = len(due_s), int(bad.sum())
        if not n:
            return cls(0, 0)
        spans = math.ceil((end_s - start_s) / span_s(start_s, end_s))
        # Clipped, for single precision may put the last moment of a window at its end.
        cluster = ((due_s - start_s) / span_s(start_s, end_s)).astype(np.int32).clip(0, spans - 1)
        size = np.bincount(cluster, minlength=spans)
        filled = size > 0
        k = int(filled.sum())
        if total in (0, n):
            return cls(n, total, k, 1.0, n)
        if k == 1:
            return cls(n, total, k, float(n), 1)
        share = total / n
        excess = (np.bincount(cluster, weights=bad, minlength=spans) - share * size)[filled]
        variance = k / (k - 1) * float((excess**2).sum()) / n**2
        deff = max(1.0, variance / (share * (1 - share) / n))
        independent = math.floor(n / deff * (student(n - 1) / student(k - 1)) ** 2)
        return cls(n, total, k, deff, max(1, independent), _neighbours(excess))

    def worth(self, bad: int) -> int:
        """So many bad units of n, as units of the independent ones; rounded against the gate."""
        return math.ceil(Fraction(bad * self.independent, self.n))

    def proves(self, bad: int, tolerated: float, confidence: float) -> bool:
        return self.n > 0 and proves(self.worth(bad), self.independent, tolerated, confidence)

    def upper_bound(self, confidence: float) -> float:
        return upper_bound(self.worth(self.bad), self.independent, confidence)

    def bound_rank(self, tolerated: float, confidence: float) -> int | None:
        """The rank r for which X(r) bounds the quantile from above; None when n is too small for any.

        The gate is proved iff X(r) is below the limit: the bound shown and the verdict can never disagree.
        """
        if self.n == 0 or (most := provable(self.independent, tolerated, confidence)) < 0:
            return None
        return self.n - most * self.n // self.independent

    def ranks_around(self, quantile: float, confidence: float) -> tuple[int | None, int | None]:
        """The ranks between whose values the quantile lies at this two-sided confidence; None where n is too small."""
        each = (1 + confidence) / 2
        below = provable(self.independent, quantile, each) if self.n else -1
        low = below * self.n // self.independent + 1 if below >= 0 else None
        return low, self.bound_rank(float(1 - exact(quantile)), each)

    def more_needed(self, tolerated: float, confidence: float) -> tuple[int | None, int | None]:
        """How many more units would prove the gate: at the bad share seen, and if no further one is bad."""
        bad, each = self.worth(self.bad), self.n / self.independent
        at_share = units_to_prove(self.bad / self.n, tolerated, confidence)
        if_good = units_to_prove_with(bad, tolerated, confidence)

        def more(units: int | None) -> int | None:
            return None if units is None else max(1, math.ceil((units - self.independent) * each))

        return more(at_share), more(if_good)


def _neighbours(excess: np.ndarray) -> float:
    squares = float((excess**2).sum())
    return float((excess[1:] * excess[:-1]).sum()) / squares if squares else 0.0


_STUDENT = (6.3138, 2.9200, 2.3534, 2.1318, 2.0150, 1.9432, 1.8946, 1.8595)  # at one to eight degrees of freedom


def student(freedom: int) -> float:
    """Student's one-sided 95 % quantile: tabled to eight degrees of freedom, from nine on Cornish and Fisher's."""
    if freedom <= len(_STUDENT):
        return _STUDENT[freedom - 1]
    z = NormalDist().inv_cdf(0.95)
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )


def halves_differ(due_s: np.ndarray, bad: np.ndarray, middle_s: float) -> tuple[float, float] | None:
    """The bad shares of the first and the second half, when they differ by more than four standard errors.

    The errors are those of independent units: a drift is itself what makes clusters differ.
    """
    early = due_s < middle_s
    n = np.array([early.sum(), (~early).sum()])
    if n.min() < 30:
        return None
    shares = np.array([bad[early].mean(), bad[~early].mean()])
    pooled = float(bad.mean())
    error = math.sqrt(pooled * (1 - pooled) * float((1 / n).sum()))
    return (float(shares[0]), float(shares[1])) if abs(shares[1] - shares[0]) > 4 * error > 0 else None
