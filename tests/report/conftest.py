"""Verdicts as the judge makes them, to be told."""

import pytest

from harness.model import EXIT_CODE, Finding, Judgement, Verdict

SLOW = Finding(
    gate="p95_latency",
    verdict=Judgement.FAIL,
    why="71 of 1,204 due requests were slow or failed; 60 are allowed",
    window="steady",
    limit="p95 e2e < 1.2 s",
    line=18,
    figures={"measured_s": 1.274, "bound_s": None, "n": 1204, "bad": 71, "allowed": 60, "unknown": 0, "deff": 1.3},
)
MEMORY = Finding(
    gate="gpu_memory",
    verdict=Judgement.PASS,
    why="GPU-0 reached 82.03 % of its memory at 31 s; the limit is 85 %",
    window="steady",
    limit="< 85 %",
    line=21,
    figures={"measured": 0.8203, "per": "GPU-0", "simulated": True},
)
THIN = Finding(
    gate="success",
    verdict=Judgement.INCONCLUSIVE,
    why="0 of 400 good requests were not served; 2 are allowed, but so few do not show it",
    window="steady",
    limit=">= 99.5 %",
    line=19,
    figures={"measured": 1.0, "bound": 0.9925, "n": 400, "bad": 0, "allowed": 2, "unknown": 0},
    needs="about 198 more at this share of bad ones, 10 s at this rate",
)
BLIND = Finding("gpu_memory", Judgement.INVALID, "GPU-0: no sample for 9 s", "steady", "< 85 %", 21)
PUNCTUAL = Finding("send_lag", Judgement.PASS, "sent in time", "steady", "p99 < 50 ms", 0, {"measured_s": 0.0006})
PROVENANCE = {
    "run": "20261130T141500Z-business_mix",
    "scenario": "scenarios/load/business_mix.yaml",
    "stage": 1,
    "seed": 7,
    "engine": "sim/h100-8b",
    "simulated": True,
}


def verdict_of(*findings, believed=(PUNCTUAL,), tables=None, exit_code=None, judgement=None, provenance=PROVENANCE):
    worst = judgement or next(
        j for j in ("INVALID", "FAIL", "INCONCLUSIVE", "PASS") if j in {f.verdict for f in findings}
    )
    why = next((f"{f.gate}: {f.why}" for f in findings if f.verdict == worst), "nothing was judged")
    code = EXIT_CODE[Judgement(worst)] if exit_code is None else exit_code
    return Verdict(Judgement(worst), code, why, believed, findings, tables or {}, ("a note",), provenance)


@pytest.fixture
def make():
    """Makes a verdict of findings."""
    return verdict_of


@pytest.fixture
def slow():
    return SLOW


@pytest.fixture
def memory():
    return MEMORY


@pytest.fixture
def thin():
    return THIN


@pytest.fixture
def blind():
    return BLIND
