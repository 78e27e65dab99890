"""What a GPU serves, read from a run directory (CAP-1)."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from typer.testing import CliRunner

from harness import cli, evidence
from harness.capacity import measured
from harness.capacity.order import Order
from harness.model import EXIT_CODE, Judgement, UsageError, Verdict
from tests.judge.conftest import lay_out

# 100 s of steady state: 900 good answers, 40 that failed, and 60 refusals that are right.
STORY: dict[str, Any] = {
    "requests": [
        {"n": 900, "e2e": 0.5},
        {"n": 40, "e2e": 0.5, "outcome": "HTTP_5XX", "status": 500},
        {
            "n": 60,
            "class": "bad",
            "flaw": "over_long",
            "expect": ["422"],
            "outcome": "REJECTED_AS_EXPECTED",
            "status": 422,
        },
    ],
}
TARGET = "kind: url\nurl: http://127.0.0.1:9\nmodel: m\ntokenizer: .\ngpu: none\nengines: [http://127.0.0.1:1, http://127.0.0.1:2]\n"


def laid_out(directory: Path, judgement: Judgement = Judgement.PASS, target: str = TARGET, story: Any = STORY) -> Order:
    """A run that ended so, and an order that names it."""
    directory.mkdir(exist_ok=True)
    lay_out(directory, story)
    (directory / "target.yaml").write_text(target)
    evidence.write_verdict(directory, Verdict(judgement, EXIT_CODE[judgement], "as the test says"))
    return Order(users=1000, requests_per_user=1000, price=1.0, run=directory)


def test_the_rate_is_that_of_good_answers_over_all_gpus(tmp_path: Path) -> None:
    """900 good answers in 100 s on two replicas are 4.5/s a GPU, and half that where a replica is two GPUs."""
    wanted = laid_out(tmp_path)
    assert measured.rate(wanted).per_gpu_per_s == pytest.approx(4.5)
    assert measured.rate(replace(wanted, gpus_per_replica=2)).per_gpu_per_s == pytest.approx(2.25)
    assert measured.rate(replace(wanted, replicas=3)).per_gpu_per_s == pytest.approx(3.0)
    assert "4.50/s at least" in measured.rate(wanted).told()


def test_a_simulated_rate_says_so(tmp_path: Path) -> None:
    """What no real GPU served is told as that, to people and to machines."""
    wanted = laid_out(tmp_path)
    run = orjson.loads((tmp_path / "run.json").read_bytes())
    (tmp_path / "run.json").write_bytes(orjson.dumps({**run, "simulated": True}))
    assert "SIMULATED" in measured.rate(wanted).told()
    assert measured.rate(wanted).as_json()["simulated"] is True
    (tmp_path / "run.json").write_bytes(orjson.dumps({**run, "simulated": False}))
    assert "SIMULATED" not in measured.rate(wanted).told()


@pytest.mark.parametrize("judgement", [Judgement.FAIL, Judgement.INVALID, Judgement.INCONCLUSIVE])
def test_a_run_that_did_not_pass_is_no_capacity(tmp_path: Path, judgement: Judgement) -> None:
    """A rate at which a gate failed, or that nobody measured well, is refused."""
    with pytest.raises(UsageError, match=f"is {judgement}: a rate at which the gates do not hold is no capacity"):
        measured.rate(laid_out(tmp_path, judgement))


def test_replicas_must_be_known(tmp_path: Path) -> None:
    """A target that lists no engines needs their number said."""
    wanted = laid_out(tmp_path, target=TARGET.replace("engines", "# engines"))
    with pytest.raises(UsageError, match="lists no engines: say how many `replicas` served"):
        measured.rate(wanted)
    assert measured.rate(replace(wanted, replicas=9)).per_gpu_per_s == pytest.approx(1.0)


def test_damage_and_silence_are_no_rate(tmp_path: Path) -> None:
    """A log that cannot be read whole, and a steady state without one answer, are refused."""
    wanted = laid_out(tmp_path / "silent", story={"requests": [{"n": 9, "outcome": "HTTP_5XX", "status": 500}]})
    with pytest.raises(UsageError, match="served nothing in its steady state"):
        measured.rate(wanted)
    wanted = laid_out(tmp_path / "torn")
    log = next((tmp_path / "torn").glob("log.player-*.bin"))
    log.write_bytes(log.read_bytes()[:-7])
    with pytest.raises(UsageError, match="cannot be counted"):
        measured.rate(wanted)


def test_the_command_plans_from_a_run_and_from_an_assumption(tmp_path: Path) -> None:
    """`harness capacity plan` prints where the rate is from, and the same plan for machines."""
    laid_out(tmp_path / "run")
    flags = ["capacity", "plan", "--users", "1000000", "--requests-per-user", "24", "--price", "0.95/h", "--peak", "5x"]
    said = CliRunner().invoke(cli.app, [*flags, "--run", str(tmp_path / "run")])
    assert said.exit_code == 0, said.output
    assert "A GPU serves 4.50/s at least" in said.output
    assert " 309 " in said.output  # 1,388.9 / 4.5
    said = CliRunner().invoke(cli.app, [*flags, "--rate-per-gpu", "42/s", "--json"])
    told = json.loads(said.output)
    assert told["rate"] == {"rate_per_gpu_per_s": 42.0, "measured": False, "simulated": False}
    assert told["plans"][0]["gpus"] == 34
