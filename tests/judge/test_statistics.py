"""Our binomial arithmetic beside scipy's, and the sample sizes that the literature gives."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special

from harness.judge import statistics
from harness.judge.statistics import Sample


def cdf(k: int, n: int, p: float) -> float:
    """The binomial distribution function, by scipy's incomplete beta function."""
    return 0.0 if k < 0 else 1.0 if k >= n else float(special.betaincc(k + 1, n - k, p))


shares = st.sampled_from([0.001, 0.005, 0.01, 0.03, 0.05, 0.1, 0.5])


@given(n=st.integers(1, 500_000), p=shares, deviation=st.floats(-6, 6))
def test_binomial_cdf_is_scipys(n: int, p: float, deviation: float) -> None:
    """The distribution function agrees with scipy's in both tails, up to half a million units."""
    k = min(n, max(0, round(n * p + deviation * (n * p * (1 - p)) ** 0.5)))
    assert statistics.binomial_cdf(k, n, p) == pytest.approx(cdf(k, n, p), rel=1e-8)


@given(n=st.integers(1, 20_000), bad=st.integers(0, 200), confidence=st.sampled_from([0.9, 0.95, 0.99]))
def test_upper_bound_is_clopper_pearson(n: int, bad: int, confidence: float) -> None:
    """The upper bound is the beta quantile that Clopper and Pearson give."""
    bad = min(bad, n)
    expected = 1.0 if bad == n else special.betaincinv(bad + 1, n - bad, confidence)
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
    assert cdf(most, n, tolerated) <= 0.05 + 1e-9
    assert cdf(most + 1, n, tolerated) > 0.05 - 1e-9


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
    sample = Sample.clustered(due_s, bad, 0.0, spread_s)
    at = sample.bound_rank(1 - quantile, 0.95)
    bound = np.inf if at is None else np.sort(data)[at - 1]
    assert (bound < limit) == sample.proves(int(bad.sum()), 1 - quantile, 0.95)


def test_independent_units_have_no_design_effect() -> None:
    """Coin flips spread over a window count nearly as they are."""
    rng = np.random.default_rng(3)
    due_s = np.sort(rng.uniform(0, 300, 6000))
    sample = Sample.clustered(due_s, rng.random(6000) < 0.03, 0.0, 300.0)
    assert sample.clusters == 30
    assert sample.deff < 1.6


def test_bursts_have_a_design_effect() -> None:
    """Bad units that come together are worth far fewer independent ones."""
    due_s = np.linspace(0, 300, 6000, endpoint=False)
    bad = (due_s >= 100) & (due_s < 109)
    sample = Sample.clustered(due_s, bad, 0.0, 300.0)
    assert sample.deff > 50
    assert sample.independent < 6000 / 50
    assert not sample.proves(sample.bad, 0.05, 0.95)


@pytest.mark.parametrize(("lasts_s", "spans", "each_s"), [(18.0, 10, 1.8), (90.0, 10, 9.0), (125.0, 13, 10.0)])
def test_every_window_has_ten_spans(lasts_s: float, spans: int, each_s: float) -> None:
    """A window is cut into spans of a tenth of it, or of 10 s where there are more, whatever its length."""
    due_s = np.linspace(7, 7 + lasts_s, 900, endpoint=False).astype(np.float32)
    sample = Sample.clustered(due_s, np.arange(900) == 450, 7.0, 7 + lasts_s)
    assert (sample.clusters, statistics.span_s(7.0, 7 + lasts_s)) == (spans, pytest.approx(each_s))


def test_bad_stretches_of_a_short_window() -> None:
    """24,800 gaps of 90 s prove nothing when all bad ones lie in two stretches; spread evenly, the same number does."""
    due_s = np.linspace(0, 90, 24_800, endpoint=False)
    stretches = ((due_s >= 20) & (due_s < 22)) | ((due_s >= 61) & (due_s < 63))
    bursts = Sample.clustered(due_s, stretches, 0.0, 90.0)
    even = Sample.clustered(due_s, np.arange(24_800) % (24_800 // bursts.bad) == 0, 0.0, 90.0)
    assert statistics.proves(bursts.bad, bursts.n, 0.05, 0.95)
    assert not bursts.proves(bursts.bad, 0.05, 0.95)
    assert bursts.independent < 100
    assert even.proves(even.bad, 0.05, 0.95)


def test_units_of_one_moment_are_one() -> None:
    """Units that all fall into one span, some of them bad, prove nothing; without a bad one they are as they are."""
    due_s = np.full(500, 3.0)
    sample = Sample.clustered(due_s, np.arange(500) < 2, 0.0, 90.0)
    assert (sample.clusters, sample.independent) == (1, 1)
    assert not sample.proves(2, 0.05, 0.95)
    assert Sample.clustered(due_s, np.zeros(500, dtype=bool), 0.0, 90.0).independent == 500


@pytest.mark.parametrize(("lasts_s", "rate_per_s", "burst_s"), [(18.0, 15, 1.0), (90.0, 16, 3.0), (60.0, 20, 2.0)])
def test_bursts_pass_falsely_far_less_often(lasts_s: float, rate_per_s: int, burst_s: float) -> None:
    """Of runs that are bad in bursts, 5 % of the time on average, few pass a P95; taken as independent, several do."""
    rng, runs = np.random.default_rng(8), 200
    naive = clustered = 0
    for _ in range(runs):
        due_s = np.sort(rng.uniform(0, lasts_s, rng.poisson(rate_per_s * lasts_s)))
        bad = _in_bursts(rng, due_s, burst_s) & (rng.random(len(due_s)) < 0.5)
        sample = Sample.clustered(due_s, bad, 0.0, lasts_s)
        naive += statistics.proves(sample.bad, sample.n, 0.05, 0.95)
        clustered += sample.proves(sample.bad, 0.05, 0.95)
    print(f"{naive / runs:.0%} of runs pass as independent, {clustered / runs:.0%} by spans")
    assert clustered < 0.65 * naive


def _in_bursts(rng: np.random.Generator, due_s: np.ndarray, burst_s: float) -> np.ndarray:
    """Mask of what is due in stretches that take a tenth of the time, `burst_s` long on average."""
    lasting_s = rng.exponential([9 * burst_s, burst_s], size=(200, 2))
    if rng.random() < 0.1:
        lasting_s[0, 0] = 0.0  # the run begins inside a stretch
    edges_s = np.cumsum(lasting_s.ravel())
    assert edges_s[-1] > due_s[-1]
    return np.asarray(np.searchsorted(edges_s, due_s, side="right") % 2 == 1)


@pytest.mark.parametrize("share", [0.9999999, 0.99999999, 0.999, 0.95, 1.0])
def test_a_share_is_the_decimal_that_was_written(share: float) -> None:
    """A share of many nines is not rounded to the whole."""
    assert statistics.exact(share) == Fraction(repr(share))


@pytest.mark.parametrize("freedom", [1, 2, 5, 8, 9, 11, 29, 100, 5000])
def test_students_quantile(freedom: int) -> None:
    """Student's quantile is scipy's to a thousandth."""
    assert statistics.student(freedom) == pytest.approx(special.stdtrit(freedom, 0.95), abs=1e-3)


def test_drift_shows_between_halves() -> None:
    """Ten times as many bad in the second half are told; the same number, or too few to tell, are not."""
    due_s = np.linspace(0, 100, 2000, endpoint=False)
    even = np.arange(2000) % 50 == 0
    late = even & (due_s >= 50) | (np.arange(2000) == 500)
    assert statistics.halves_differ(due_s, even, 50.0) is None
    assert statistics.halves_differ(due_s, late, 50.0) == pytest.approx((0.001, 0.02))
    assert statistics.halves_differ(due_s[:20], late[:20], 50.0) is None


@given(n=st.integers(1, 3000), quantile=st.sampled_from([0.5, 0.9, 0.99]))
def test_a_quantile_lies_between_its_ranks(n: int, quantile: float) -> None:
    """By scipy's binomial, each rank fails to hold the quantile no more often than its share of the doubt."""
    low, high = Sample(n, 0, 1, 1.0, n).ranks_around(quantile, 0.95)
    assert low is None or 1 <= low <= n
    assert high is None or low is None or low <= high <= n
    if low is not None:
        assert cdf(low - 1, n, quantile) <= 0.025 + 1e-9 < cdf(low, n, quantile) + 2e-9
    if high is not None:
        assert 1 - cdf(high - 1, n, quantile) <= 0.025 + 1e-9
    else:
        assert quantile**n > 0.025 - 1e-9
