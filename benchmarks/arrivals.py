"""How Poisson are the arrivals that the server saw? Three figures, each with the value a true Poisson stream gives.

Pure functions of moments and rate. They say nothing about latency.
"""

from dataclasses import dataclass

import numpy as np

WINDOW_S = 0.1
KS_LIMIT = 1.36  # of KS x sqrt(n): the 5 % level of the Kolmogorov-Smirnov test against a fully given law
DISPERSION_LIMITS = (0.8, 1.2)


@dataclass(frozen=True)
class Regularity:
    """`variation` of the gaps and `dispersion` of counts in windows of 100 ms (both 1 for Poisson); `ks` x sqrt(n)."""

    variation: float
    dispersion: float
    ks: float

    @property
    def poisson(self) -> bool:
        low, high = DISPERSION_LIMITS
        return self.ks < KS_LIMIT and low <= self.dispersion <= high


def regularity(moments_s: np.ndarray, rate_per_s: float) -> Regularity:
    """The figures of sorted moments against the asked rate; needs 3 moments or more."""
    gaps = np.diff(np.sort(moments_s))
    windows = int((moments_s.max() - moments_s.min()) / WINDOW_S)
    counts, _ = np.histogram(moments_s - moments_s.min(), bins=max(1, windows), range=(0, max(1, windows) * WINDOW_S))
    return Regularity(
        variation=float(gaps.std() / gaps.mean()),
        dispersion=float(counts.var() / counts.mean()),
        ks=_ks(gaps, rate_per_s) * float(np.sqrt(len(gaps))),
    )


def _ks(gaps_s: np.ndarray, rate_per_s: float) -> float:
    """Largest distance between the gaps' distribution and the exponential one of this rate."""
    law = 1 - np.exp(-rate_per_s * np.sort(gaps_s))
    n = len(gaps_s)
    return float(max((np.arange(1, n + 1) / n - law).max(), (law - np.arange(n) / n).max()))
