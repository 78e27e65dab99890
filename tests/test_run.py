"""What a run refuses to break before it begins, and what a stage goes on without."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import run
from harness import scenario as scenarios
from harness.chaos import experiment
from harness.chaos.fault import Absent, Aim
from harness.model import UsageError
from harness.scenario import Scenario
from harness.targets import base, url
from harness.targets.base import Target

ROOT = Path(__file__).parents[1]
KILL, LEAK = (ROOT / f"scenarios/chaos/{name}.yaml" for name in ("kill_replica", "gpu_leak"))


@pytest.fixture
def aimed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The experiments that were let aim; nothing of a stack is asked."""
    aimed: list[Path] = []

    def aims(path: Path, target: Target, force: bool = False) -> Iterator[tuple[str, Aim]]:
        aimed.append(path)
        if "gpu" in path.parts and target.gpu == "none":
            raise Absent("the target has no GPU (gpu: none)")
        yield "toy", Aim(("engine-1 (pid 7)",), "nobody feels it", "true")

    monkeypatch.setattr(experiment, "aims", aims)
    monkeypatch.setattr(url, "preflight", lambda _: {"gpu_memory_utilization": {}})
    monkeypatch.chdir(ROOT)
    return aimed


def target(work: Path, kind: str = "local", host: str = "127.0.0.1", gpu: str = "none", **keys: str) -> Target:
    more = "".join(f"{key}: {value}\n" for key, value in keys.items())
    text = f"kind: {kind}\nurl: http://{host}:8080\nmodel: tiny\ntokenizer: tiny\ngpu: {gpu}\n{more}"
    (work / "target.yaml").write_text(text)
    return base.load(str(work / "target.yaml"))


def order(work: Path, stage: int = 3) -> run.Order:
    return run.Order((KILL, LEAK), str(work / "target.yaml"), runs=work / "runs", stage=stage)


def loaded(*paths: Path) -> list[Scenario]:
    return [scenarios.load(path) for path in paths]


def test_only_what_is_in_reach_is_broken(tmp_path: Path, aimed: list[Path]) -> None:
    """Of somebody's endpoint nothing is: the list of kinds that may be broken is short."""
    with pytest.raises(UsageError, match="a target of kind url is out of reach") as refused:
        run._to_play(order(tmp_path), loaded(KILL), target(tmp_path, kind="url"), tmp_path)
    assert refused.value.where == f"{tmp_path}/target.yaml:1"
    assert not aimed


@pytest.mark.parametrize("host", ["prod", "llm.prod-7.example.com", "production.example.com"])
def test_production_is_not_broken(host: str, tmp_path: Path, aimed: list[Path]) -> None:
    """A name that says so is enough, unless the target's own file allows it."""
    with pytest.raises(UsageError, match="nothing is broken there, unless its file says `chaos: allowed`"):
        run._to_play(order(tmp_path), loaded(KILL), target(tmp_path, host=host), tmp_path)
    assert not aimed
    assert run._to_play(order(tmp_path), loaded(KILL), target(tmp_path, host=host, chaos="allowed"), tmp_path)


@pytest.mark.parametrize("host", ["product.example.com", "reproduction", "nonprod"])
def test_other_names_are_no_production(host: str, tmp_path: Path, aimed: list[Path]) -> None:
    """A word that only holds it is another word."""
    assert run._to_play(order(tmp_path), loaded(KILL), target(tmp_path, host=host), tmp_path)


def test_a_gate_that_cannot_hold_is_refused_before_anything_is_broken(
    tmp_path: Path, aimed: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that takes 92 % of its GPU at its start can never stay below 85 %."""
    monkeypatch.setattr(url, "preflight", lambda _: {"gpu_memory_utilization": {"http://127.0.0.1:8081": 0.92}})
    with pytest.raises(UsageError, match="gpu_memory cannot stay below 85 %"):
        run._to_play(order(tmp_path), loaded(KILL, LEAK), target(tmp_path, gpu="nvml"), tmp_path)
    assert not aimed


def test_a_limit_that_nobody_watches_is_refused(tmp_path: Path, aimed: list[Path]) -> None:
    """Without a GPU its memory ends no run."""
    text = KILL.read_text().replace("  - gpu_memory: {below: 85%}\n", "") + "abort: {gpu_memory: 95%}\n"
    (tmp_path / "scenario.yaml").write_text(text)
    with pytest.raises(UsageError, match="no GPU whose memory could end the run"):
        run._to_play(order(tmp_path), loaded(tmp_path / "scenario.yaml"), target(tmp_path), tmp_path)


def test_a_stage_goes_on_without_what_the_target_does_not_have(tmp_path: Path, aimed: list[Path]) -> None:
    """A leak where there is no GPU is left out, and on record; alone it is refused, for nothing would be shown."""
    aim, here = order(tmp_path), target(tmp_path)
    assert [one.path for one in run._to_play(aim, loaded(KILL, LEAK), here, tmp_path)] == [KILL]
    assert (tmp_path / "left_out.json").read_text() == '{"gpu_leak":"the target has no GPU (gpu: none)"}'
    with pytest.raises(UsageError, match="nothing to break here: the target has no GPU"):
        run._to_play(aim, loaded(LEAK), here, tmp_path)
    with pytest.raises(UsageError, match="nothing to break here: the target has no GPU"):
        run._to_play(order(tmp_path, stage=0), loaded(KILL, LEAK), here, None)


def test_a_dry_run_tells_what_would_be_broken(tmp_path: Path, aimed: list[Path]) -> None:
    """Targets, what users would feel, the undo, and where there is nothing to break."""
    target(tmp_path)
    told = list(run.preview(order(tmp_path)))
    assert told == [
        f"{KILL}: experiments/process/kill_replica.yaml at {scenarios.load(KILL).chaos[0].at_s:g} s",
        "toy would hit engine-1 (pid 7)",
        "toy would be felt: nobody feels it",
        "toy would be undone: true",
        f"{LEAK} has nothing to break: the target has no GPU (gpu: none)",
    ]
