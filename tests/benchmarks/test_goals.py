"""Goals are judged from what was measured: noise excuses time and never cost, and what did not run is not met."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.goals import INCONCLUSIVE, MET, NOT_MET, NOT_RUN, Goal, Results, judged
from benchmarks.machine import Usage
from benchmarks.server import TRUTH
from benchmarks.trial import CLAIM, Load, Trial

CLEAN, NOISY = 0.0, 0.5
LOAD = Load(600, 10)


def trial(
    client: str = "harness",
    cpu_s: float = 1.0,
    late_s: float = 0.0001,
    noise_s: float = CLEAN,
    exit_code: int = 0,
    fault: str = "",
    seed: int = 3,
) -> Trial:
    """A run of 1000 steady requests whose sends were all late by `late_s` and its durations right."""
    moments = np.cumsum(np.random.default_rng(seed).exponential(1 / LOAD.rate_per_s, LOAD.requests))
    truth, claims = np.zeros(LOAD.requests, TRUTH), np.zeros(LOAD.requests, CLAIM)
    truth["id"] = claims["id"] = np.arange(LOAD.requests).astype("U")
    truth["read_s"], truth["first_s"], truth["last_s"], truth["chunks"] = moments, moments + 0.05, moments + 0.36, 32
    claims["due_s"], claims["sent_s"], claims["ttft_s"], claims["e2e_s"] = moments - late_s, moments, 0.05, 0.36
    usage = Usage(10.0, cpu_s, 0.0, noise_s, 0.0)
    folder = Path(f"001.{fault or client}")
    whole = (0.0, float(moments[-1]) + 1)
    return Trial(client, LOAD, usage, whole, 1000, 2 * cpu_s, exit_code, truth, claims, folder, disturbed=bool(fault))


def goal(number: int, **sections: list[Trial]) -> Goal:
    return judged(Results(trials=sections))[number - 1]


def test_nothing_measured_meets_nothing() -> None:
    """With no measurement every goal says that it did not run."""
    assert {g.outcome for g in judged(Results())} == {NOT_RUN}
    assert [g.number for g in judged(Results())] == list(range(1, 12))


@pytest.mark.parametrize(
    ("peer_cpu_s", "noise_s", "outcome"),
    [(2.1, CLEAN, MET), (2.1, NOISY, MET), (1.9, CLEAN, NOT_MET), (1.9, NOISY, INCONCLUSIVE)],
)
def test_ratio_decides(peer_cpu_s: float, noise_s: float, outcome: str) -> None:
    """A peer's CPU is set against ours in the run just before it; noise excuses a miss, and never makes one."""
    cost = [trial(noise_s=noise_s), trial("locust FastHttpUser", cpu_s=peer_cpu_s, noise_s=noise_s)]
    assert goal(2, cost=cost).outcome == outcome


def test_ratio_is_the_median_of_rounds() -> None:
    """One odd round of three decides nothing."""
    cost = [each for cpu_s in (3.0, 0.5, 2.5) for each in (trial(), trial("locust FastHttpUser", cpu_s=cpu_s))]
    assert goal(2, cost=cost).outcome == MET


def test_absent_peer_is_named() -> None:
    """A goal over three peers is not met while one of them did not run, and says why it did not."""
    cost = [each for peer in ("inference-perf", "aiperf") for each in (trial(), trial(peer, cpu_s=9.0))]
    found = judged(Results(trials={"cost": cost}, absent={"guidellm": "not installed: no disk"}))[0]
    assert found.outcome == NOT_RUN
    assert "not installed: no disk" in found.measured


@pytest.mark.parametrize(
    ("late_s", "noise_s", "outcome"),
    [(0.0001, CLEAN, MET), (0.0001, NOISY, MET), (0.002, CLEAN, NOT_MET), (0.002, NOISY, INCONCLUSIVE)],
)
def test_noise_excuses_lateness(late_s: float, noise_s: float, outcome: str) -> None:
    """Late sends are not met on a quiet machine, inconclusive on a noisy one; sends on time are met on both."""
    cost = [trial(late_s=late_s), trial("aiperf", late_s=1.0)]
    assert goal(3, send=[trial(late_s=late_s, noise_s=noise_s)], cost=cost).outcome == outcome


def test_flags() -> None:
    """Every fault must be flagged, no clean run may be, and 20 clean runs are needed to say so."""
    caught, missed = trial(late_s=0.1, exit_code=3, fault="hog"), trial(late_s=0.1, exit_code=0, fault="hog")
    assert goal(8, faults=[caught], send=[trial()] * 20).outcome == MET
    assert goal(8, faults=[caught], send=[trial()] * 19).outcome == INCONCLUSIVE
    assert goal(8, faults=[caught, missed], send=[trial()] * 20).outcome == NOT_MET
    assert goal(8, faults=[caught], send=[trial(exit_code=3)] * 20).outcome == NOT_MET


def test_flag_on_a_noisy_machine_is_right() -> None:
    """A flag in a run that strangers disturbed is no false one."""
    caught = trial(late_s=0.1, exit_code=3, fault="hog")
    found = goal(8, faults=[caught], send=[trial()] * 20 + [trial(exit_code=3, noise_s=NOISY)])
    assert found.outcome == MET


def test_flag_on_a_run_whose_times_moved_is_right() -> None:
    """Near its ceiling a player may be late with nobody's help: saying so is no false alarm."""
    caught = trial(late_s=0.1, exit_code=3, fault="hog")
    assert goal(8, faults=[caught], ceiling=[trial(late_s=0.1, exit_code=3)], send=[trial()] * 20).outcome == MET


def test_two_workers_on_a_core_are_a_fault() -> None:
    """Late sends of two workers that share a core must be flagged; sends on time need not be, and prove nothing."""
    quiet = [trial()] * 20
    caught = trial("harness, 2 workers", late_s=0.1, exit_code=3)
    missed = trial("harness, 2 workers", late_s=0.1)
    faults = [trial(late_s=0.1, exit_code=3, fault="hog")]
    assert goal(8, faults=faults, send=quiet, workers=[trial("harness, 2 workers"), caught]).outcome == MET
    assert goal(8, faults=faults, send=quiet, workers=[missed]).outcome == NOT_MET


def test_noisy_run_without_a_flag_counts() -> None:
    """Noise that raised no flag makes a run no less clean; noise that did takes it out of the count."""
    caught = [trial(late_s=0.1, exit_code=3, fault="hog")]
    noisy = [trial(noise_s=NOISY)] * 20
    assert goal(8, faults=caught, send=noisy).outcome == MET
    assert goal(8, faults=caught, send=[*noisy[1:], trial(noise_s=NOISY, exit_code=3)]).outcome == INCONCLUSIVE


def test_arrivals_need_the_union_of_workers() -> None:
    """Poisson arrivals of one worker alone do not meet the goal; with those of two they do."""
    assert goal(7, cost=[trial()]).outcome == NOT_RUN
    assert goal(7, cost=[trial()], workers=[trial("harness, 2 workers")]).outcome == MET


def test_arrivals_of_another_rate_are_found_out() -> None:
    """Either pool alone can miss the goal, and noise makes that inconclusive."""
    slow = replace(trial("harness, 2 workers"), load=Load(700, 10))
    assert goal(7, cost=[trial()], workers=[slow]).outcome == NOT_MET
    assert goal(7, cost=[replace(trial(noise_s=NOISY), load=Load(700, 10))]).outcome == INCONCLUSIVE


def test_more_workers_cost() -> None:
    """Two workers may cost a fifth more CPU than one."""
    assert goal(11, workers=[trial(), trial("harness, 2 workers", cpu_s=1.19)]).outcome == MET
    assert goal(11, workers=[trial(), trial("harness, 2 workers", cpu_s=1.21)]).outcome == NOT_MET


def test_storage() -> None:
    """Storage is judged on memory, CPU and what comes back."""
    cost = {"samples": 1e6, "rss_growth_mb": 1.0, "cpu_us_per_sample": 2.0, "percentile_error": 0.0}
    assert judged(Results(storage=[cost]))[9].outcome == MET
    assert judged(Results(storage=[cost | {"percentile_error": 0.01}]))[9].outcome == NOT_MET
