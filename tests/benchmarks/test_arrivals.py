"""The figures of arrivals tell a Poisson stream from the ones that only look busy."""

import numpy as np
import pytest

from benchmarks.arrivals import Regularity, regularity

RATE = 200.0


@pytest.mark.parametrize("seed", range(5))
def test_poisson_is_poisson(seed: int) -> None:
    """Exponential gaps of the asked rate pass, with all figures near 1."""
    moments = np.cumsum(np.random.default_rng(seed).exponential(1 / RATE, 4000))
    figures = regularity([(moments, RATE)])
    assert figures.poisson
    assert figures.variation == pytest.approx(1, abs=0.1)


def test_comb_is_not() -> None:
    """A load tool that starts its users once a second is over-dispersed beyond any doubt."""
    moments = np.repeat(np.arange(20.0), int(RATE)) + np.tile(np.arange(RATE) * 1e-4, 20)
    figures = regularity([(moments, RATE)])
    assert not figures.poisson
    assert figures.dispersion > 10


def test_metronome_is_not() -> None:
    """Equal gaps have no dispersion and no exponential law."""
    figures = regularity([(np.arange(4000) / RATE, RATE)])
    assert not figures.poisson
    assert figures.variation == pytest.approx(0, abs=1e-6)


def test_wrong_rate_is_not() -> None:
    """Poisson arrivals at 85 % of the asked rate are found out."""
    moments = np.cumsum(np.random.default_rng(1).exponential(1 / (0.85 * RATE), 4000))
    assert not regularity([(moments, RATE)]).poisson


def test_streams_pool() -> None:
    """A few seconds alone cannot tell; many streams of different rates together can, and one comb among them shows."""
    draw = np.random.default_rng(2)
    streams = [(np.cumsum(draw.exponential(1 / rate, int(8 * rate))), rate) for rate in (50.0, 200.0, 600.0) * 4]
    together = regularity(streams)
    assert together.poisson
    assert together.doubt < regularity(streams[:1]).doubt / 3
    comb = np.repeat(np.arange(8.0), int(RATE)) + np.tile(np.arange(RATE) * 1e-4, 8)
    assert regularity([*streams, (comb, RATE)]).off_dispersion > 2


def test_a_short_sample_is_in_doubt() -> None:
    """Outside the limits by less than chance allows is not Poisson, and hardly off either."""
    short = Regularity(variation=1.0, dispersion=0.75, ks=1.0, doubt=0.15)
    assert not short.poisson
    assert 0 < short.off_dispersion < 1
