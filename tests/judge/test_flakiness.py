"""F18: a gate that is run on the same stack again and again must not cry wolf."""

import numpy as np
import pytest

from harness.judge.counts import count
from harness.judge.measures import Population
from harness.model import Judgement, Window

pytestmark = pytest.mark.e2e  # hundreds of runs judged

WINDOW = Window("steady", 0.0, 120.0)
LIMIT_S = 1.2
TRUE_P95_S = 0.95


def runs(rng: np.random.Generator, n: int) -> list[tuple[float, Judgement]]:
    """The measured P95 of so many runs of one stack, whose runs differ by 8 %, and what the gate says of each."""
    found = []
    for _ in range(n):
        due_s = np.sort(rng.uniform(WINDOW.start_s, WINDOW.end_s, 300))
        values_s = rng.lognormal(0, 0.5, 300)
        values_s *= TRUE_P95_S / np.exp(0.5 * 1.645) * rng.normal(1, 0.08)
        bad = values_s >= LIMIT_S
        population = Population(due_s, values_s, bad, np.zeros_like(bad))
        finding = count(population, WINDOW, 0.95, 0.95, units="due requests", fault="slow")
        found.append((float(np.quantile(values_s, 0.95)), finding.verdict))
    return found


def test_pairs_of_the_same_stack() -> None:
    """Of 200 pairs of runs of one healthy stack, whose P95 scatters by 10 %, no more than 5 % hold a FAIL."""
    told = runs(np.random.default_rng(18), 400)
    scatter = np.std([p95_s for p95_s, _ in told]) / TRUE_P95_S
    failed = sum(Judgement.FAIL in (one, other) for (_, one), (_, other) in zip(told[::2], told[1::2], strict=True))
    print(f"P95 scatters by {scatter:.1%}; {failed} of 200 pairs hold a FAIL")
    assert scatter > 0.09
    assert failed <= 10


def test_the_same_noise_over_the_limit_is_never_passed() -> None:
    """The caution is not bought with false passes: with its P95 at the limit, at most 5 % of the runs pass."""
    rng = np.random.default_rng(19)
    told = []
    for _ in range(400):
        due_s = np.sort(rng.uniform(WINDOW.start_s, WINDOW.end_s, 300))
        bad = rng.random(300) < 0.05
        population = Population(due_s, np.where(bad, 2.0, 0.5), bad, np.zeros_like(bad))
        told.append(count(population, WINDOW, 0.95, 0.95, units="due requests", fault="slow").verdict)
    assert told.count(Judgement.PASS) <= 20
