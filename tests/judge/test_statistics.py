"""Our binomial arithmetic beside scipy's, and the sample sizes that the literature gives."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from harness.judge import statistics
from harness.judge.statistics import Sample

shares = st.sampled_from([0.001, 0.005, 0.01, 0.03, 0.05, 0.1, 0.5])


@given(n=st.integers(1, 500_000), p=shares, deviation=st.floats(-6, 6))
def test_binomial_cdf_is_scipys(n: int, p: float, deviation: float) -> None:
    """The distribution function agrees with scipy's in both tails, up to half a million units."""
    k = min(n, max(0, round(n * p + deviation * (n * p * (1 - p)) ** 0.5)))
    assert statistics.binomial_cdf(k, n, p) == pytest.approx(stats.binom.cdf(k, n, p), rel=1e-8)


@given(n=st.integers(1, 20_000), bad=st.integers(0, 200), confidence=st.sampled_from([0.9, 0.95, 0.99]))
def test_upper_bound_is_clopper_pearson(n: int, bad: int, confidence: float) -> None:
    """The upper bound is the beta quantile that Clopper and Pearson give."""
    bad = min(bad, n)
    expected = 1.0 if bad == n else stats.beta.ppf(confidence, bad + 1, n - bad)
    assert statistics.upper_bound(bad, n, confidence) == pytest.approx(expected, rel=1e-9)


def test_ends_of_the_binomial() -> None:
    """Nothing is below none, everything at or below all, and certain shares are certain."""
    assert statistics.binomial_cdf(-1, 10, 0.5) == 0
    assert statistics.binomial_cdf(10, 10, 0.5) == 1
    assert statistics.binomial_cdf(3, 10, 0.0) == 1
    assert statistics.binomial_cdf(3, 10, 1.0) == 0


@pytest.mark.parametrize(
    ("n", "most"),
    [(58, -1), (59, 0), (100, 1), (200, 4), (500, 16), (1000, 38), (5000, 224), (10_000, 463)],
)
def test_provable_counts_for_p95(n: int, most: int) -> None:
    """So many bad units of n prove a P95 at 95 %: 59 clean ones are the least."""
    assert statistics.provable(n, 0.05, 0.95) == most


@given(n=st.integers(1, 5000), tolerated=shares)
def test_false_passes_are_as_rare_as_promised(n: int, tolerated: float) -> None:
    """At the limit itself, a pass is at most as likely as the confidence allows; with one more it would be likelier."""
    most = statistics.provable(n, tolerated, 0.95)
    assert stats.binom.cdf(most, n, tolerated) <= 0.05 + 1e-9
    assert stats.binom.cdf(most + 1, n, tolerated) > 0.05 - 1e-9


@pytest.mark.parametrize(
    ("bad", "tolerated", "confidence", "units"),
    [(0, 0.05, 0.99, 90), (1, 0.05, 0.99, 130), (5, 0.05, 0.99, 259), (100, 0.05, 0.99, 2504), (1, 0.01, 0.99, 662)],
)
def test_early_stopping_is_mlperfs(bad: int, tolerated: float, confidence: float, units: int) -> None:
    """How many units prove a gate when no further one is bad is MLPerf's table, its 662 among them."""
    assert statistics.units_to_prove_with(bad, tolerated, confidence) == units


def test_success_of_three_nines_and_a_half() -> None:
    """99.95 % at 95 % confidence needs 5,990 clean requests, 99.5 % needs 598."""
    assert statistics.units_to_prove(0.0, 0.0005, 0.95) == 5990
    assert statistics.units_to_prove(0.0, 0.005, 0.95) == 598


def test_no_amount_proves_a_share_at_the_limit() -> None:
    """A bad share at or above the tolerated one has no size that proves it, nor has a limit of nothing."""
    assert statistics.units_to_prove(0.05, 0.05, 0.95) is None
    assert statistics.units_to_prove(0.0499999, 0.05, 0.95) is None
    assert statistics.units_to_prove_with(0, 0.0, 0.95) is None


@given(n=st.integers(1, 100_000), quantile=st.sampled_from(["0.5", "0.9", "0.95", "0.97", "0.99", "0.999", "1"]))
def test_allowed_is_integer_arithmetic(n: int, quantile: str) -> None:
    """The allowed count is n - ceil(q n) of the decimal that was written, never off by a rounding."""
    thousandths = round(float(quantile) * 1000)
    assert statistics.allowed(n, float(quantile)) == n * (1000 - thousandths) // 1000


def test_a_quantile_parsed_from_percent_is_exact() -> None:
    """99.9 % is not a double, and is still 999 of 1,000."""
    assert statistics.allowed(1000, 99.9 / 100) == 1


@given(st.lists(st.floats(0, 10), min_size=1, max_size=60), st.sampled_from([0.5, 0.9, 0.95, 0.99]))
def test_nearest_rank_is_numpys_inverted_cdf(values: list[float], quantile: float) -> None:
    """Nearest rank is one of the values: numpy's `inverted_cdf`."""
    expected = sorted(values)[statistics.rank(len(values), quantile) - 1]
    assert statistics.nearest_rank(np.array(values), quantile) == expected


def test_nearest_rank_of_infinities_and_of_nothing() -> None:
    """A failure at infinity is a value like any other; nothing has no quantile."""
    assert statistics.nearest_rank(np.array([1.0, np.inf]), 0.95) == np.inf
    assert np.isnan(statistics.nearest_rank(np.zeros(0), 0.95))


@given(
    values=st.lists(st.floats(0, 2), min_size=1, max_size=400),
    limit=st.sampled_from([0.5, 1.0, 1.9, 2.5]),
    quantile=st.sampled_from([0.5, 0.9, 0.95]),
    spread_s=st.sampled_from([5.0, 200.0]),
)
def test_the_bound_and_the_count_never_disagree(
    values: list[float], limit: float, quantile: float, spread_s: float
) -> None:
    """The order statistic shown as the bound is below the limit iff the count proves the gate."""
    data = np.array(values)
    due_s = np.linspace(0, spread_s, len(data), endpoint=False)
    bad = data >= limit
    sample = Sample.clustered(due_s, bad, 0.0)
    at = sample.bound_rank(1 - quantile, 0.95)
    bound = np.inf if at is None else np.sort(data)[at - 1]
    assert (bound < limit) == sample.proves(int(bad.sum()), 1 - quantile, 0.95)


def test_independent_units_have_no_design_effect() -> None:
    """Coin flips spread over a window count nearly as they are."""
    rng = np.random.default_rng(3)
    due_s = np.sort(rng.uniform(0, 300, 6000))
    sample = Sample.clustered(due_s, rng.random(6000) < 0.03, 0.0)
    assert sample.clusters == 30
    assert sample.deff < 1.6


def test_bursts_have_a_design_effect() -> None:
    """Bad units that come together are worth far fewer independent ones."""
    due_s = np.linspace(0, 300, 6000, endpoint=False)
    bad = (due_s >= 100) & (due_s < 109)
    sample = Sample.clustered(due_s, bad, 0.0)
    assert sample.deff > 50
    assert sample.independent < 6000 / 50
    assert not sample.proves(sample.bad, 0.05, 0.95)


def test_few_spans_have_no_design_effect() -> None:
    """Nine spans of 10 s cannot tell how they differ: independence is assumed, and the count of spans says so."""
    due_s = np.linspace(0, 90, 900, endpoint=False)
    sample = Sample.clustered(due_s, due_s < 2, 0.0)
    assert (sample.clusters, sample.deff, sample.independent) == (9, 1.0, 900)


@pytest.mark.parametrize("freedom", [9, 11, 29, 100, 5000])
def test_students_quantile(freedom: int) -> None:
    """Student's quantile is scipy's to a thousandth."""
    assert statistics.student(freedom) == pytest.approx(stats.t.ppf(0.95, freedom), abs=1e-3)


def test_drift_shows_between_halves() -> None:
    """Ten times as many bad in the second half are told; the same number, or too few to tell, are not."""
    due_s = np.linspace(0, 100, 2000, endpoint=False)
    even = np.arange(2000) % 50 == 0
    late = even & (due_s >= 50) | (np.arange(2000) == 500)
    assert statistics.halves_differ(due_s, even, 50.0) is None
    assert statistics.halves_differ(due_s, late, 50.0) == pytest.approx((0.001, 0.02))
    assert statistics.halves_differ(due_s[:20], late[:20], 50.0) is None
