"""How Poisson are the arrivals that the server saw? Three figures, each with the value a true Poisson stream gives.

Pure functions of moments and rate. They say nothing about latency.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

WINDOW_S = 0.1
KS_LIMIT = 1.36  # of KS x sqrt(n): the 5 % level of the Kolmogorov-Smirnov test against a fully given law
DISPERSION_LIMITS = (0.8, 1.2)


@dataclass(frozen=True)
class Regularity:
    """`variation` of the gaps and `dispersion` of counts in windows of 100 ms (both 1 for Poisson); `ks` x sqrt(n).

    `doubt` is one standard error of a true Poisson stream's dispersion over as many windows.
    """

    variation: float
    dispersion: float
    ks: float
    doubt: float

    @property
    def poisson(self) -> bool:
        return self.ks < KS_LIMIT and self.off_dispersion == 0

    @property
    def off_dispersion(self) -> float:
        """By how many standard errors the dispersion is outside its limits; 0 inside."""
        low, high = DISPERSION_LIMITS
        return max(low - self.dispersion, self.dispersion - high, 0.0) / self.doubt


def regularity(streams: Sequence[tuple[np.ndarray, float]]) -> Regularity:
    """The figures of independent streams (moments, asked rate) taken together; each needs 3 moments or more.

    Gaps and counts are set against what the asked rate expects, so streams of different rates pool.
    """
    gaps = np.concatenate([np.diff(np.sort(moments_s)) * rate_per_s for moments_s, rate_per_s in streams])
    excess = np.concatenate([_excess(moments_s, rate_per_s) for moments_s, rate_per_s in streams])
    return Regularity(
        variation=float(gaps.std() / gaps.mean()),
        dispersion=float(excess.mean()),
        ks=_ks(gaps) * float(np.sqrt(len(gaps))),
        doubt=float(np.sqrt(2 / len(excess))),
    )


def _excess(moments_s: np.ndarray, rate_per_s: float) -> np.ndarray:
    """For each window of 100 ms, the squared distance of its count from the expected one, over the expected one."""
    windows = max(1, int((moments_s.max() - moments_s.min()) / WINDOW_S))
    counts, _ = np.histogram(moments_s - moments_s.min(), bins=windows, range=(0, windows * WINDOW_S))
    expected = rate_per_s * WINDOW_S
    squares: np.ndarray = (counts - expected) ** 2 / expected
    return squares


def _ks(gaps: np.ndarray) -> float:
    """Largest distance between the distribution of gaps, in units of the mean one, and the exponential law."""
    law = 1 - np.exp(-np.sort(gaps))
    n = len(gaps)
    return float(max((np.arange(1, n + 1) / n - law).max(), (law - np.arange(n) / n).max()))
