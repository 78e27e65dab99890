"""Stage 3 end to end, on a stack of its own: what is broken shows in the verdict, and nothing of it is left."""

import contextlib
import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from running import HARNESS, ROOT, harness, process, run_dir_of, verdict

from tests.support.waiting import until

pytestmark = pytest.mark.e2e

PORT = 21260
MENDED_S = 120.0  # a replica that has to start afresh, on a busy machine
SCENARIO = """
claim: A fault is felt and gone.
traffic:
  arrivals: {{poisson: {{rate: 10/s}}}}
  warm_up: 2s
  for: {lasts}
  prompts: {{mix: {{short: {{share: 100%, tokens: 16..64}}}}, answer_tokens: {{mean: 8, at_most: 16}}}}
chaos:
  - {{experiment: {experiment}, at: 12s}}
gates:
  - recovery: {{within: 8s, hold: 2s, below: 5s}}
  - replica_recovery: {{within: 2m}}
"""
NO_KILL = """
import sys

if "harness.chaos" in sys.orig_argv:
    from harness.chaos.faults.process import ReplicaKilled

    ReplicaKilled.inject = lambda *_: None
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with a stack that is up, its target file, and scenarios in the making."""
    home = tmp_path_factory.mktemp("stage3")
    target = yaml.safe_load((ROOT / "reference_stack/local/target.yaml").read_text())
    target |= {
        "url": f"http://127.0.0.1:{PORT}",
        "engines": [f"http://127.0.0.1:{PORT + 1}", f"http://127.0.0.1:{PORT + 2}"],
        "gpu_metrics": f"http://127.0.0.1:{PORT + 5}/metrics",
        "tokenizer": str(ROOT / ".cache/tiny"),
    }
    del target["prometheus"]
    (home / "target.yaml").write_text(yaml.safe_dump(target))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        up = harness("stack", "up", "--target", "target.yaml", cwd=home)
        assert up.returncode == 0, up.stdout + up.stderr
        yield home
        harness("stack", "down", cwd=home)


def scenario(home: Path, experiment: Path, lasts: str = "25s") -> str:
    (home / "scenario.yaml").write_text(SCENARIO.format(experiment=experiment, lasts=lasts))
    return "scenario.yaml"


def run(home: Path, experiment: str) -> tuple[int, Path]:
    """Play one of the shipped experiments to the end; exit code and run directory."""
    done = harness("run", scenario(home, ROOT / "experiments" / experiment), "--target", "target.yaml", cwd=home)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, run_dir_of(done.stdout, home)


def told(run_dir: Path) -> list[dict[str, Any]]:
    """The events of chaos so far."""
    log = run_dir / "log.chaos.jsonl"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def named(findings: Any, gate: str) -> dict[str, Any]:
    return dict(next(finding for finding in findings if finding["id"] == gate))


def test_a_killed_replica_is_seen_and_comes_back(home: Path) -> None:
    """Each step is in the log with its evidence, both recoveries are judged, and the verdict can be verified."""
    _, run_dir = run(home, "process/kill_replica.yaml")
    kinds = [event["event"] for event in told(run_dir)]
    assert kinds == ["ready", "injecting", "injected", "healing", "healed"]
    injected, healed = told(run_dir)[2], told(run_dir)[4]
    assert injected["detail"]["evidence"]["gone"]
    assert healed["detail"]["evidence"]["ready"][0]["pid"] != injected["detail"]["evidence"]["gone"][0][0]
    seen: dict[str, Any] = verdict(run_dir)
    assert named(seen["believed"], "fault")["verdict"] == "PASS"
    assert named(seen["gates"], "recovery")["verdict"] in ("PASS", "FAIL", "INCONCLUSIVE")
    assert named(seen["gates"], "replica_recovery")["verdict"] == "PASS"
    assert "experiment-0.yaml" in seen["provenance"]["logs"]
    assert "log.chaos.jsonl" in seen["provenance"]["logs"]
    assert harness("verify", str(run_dir)).returncode == 0


def test_a_fault_that_does_nothing_is_invalid(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill that kills nobody gives no evidence: exit 3, whatever users saw."""
    (tmp_path / "sitecustomize.py").write_text(NO_KILL)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    code, run_dir = run(home, "process/kill_replica.yaml")
    seen: dict[str, Any] = verdict(run_dir)
    assert (code, seen["verdict"]) == (3, "INVALID")
    assert "no evidence that the fault was applied" in named(seen["believed"], "fault")["why"]
    assert "still alive" in next(event for event in told(run_dir) if event["event"] == "unproven")["detail"]["why"]


@pytest.mark.parametrize("with_guard", [False, True], ids=["guard lives", "guard killed too"])
def test_kill_9_of_everything(home: Path, with_guard: bool) -> None:
    """The guard takes the fault back when all else is killed; `harness heal` does where it was killed as well."""
    frozen = home / "freeze.yaml"
    frozen.write_text((ROOT / "experiments/process/freeze_engine.yaml").read_text().replace("15s", "100s"))
    command = [HARNESS, "run", scenario(home, frozen, "2m"), "--target", "target.yaml"]
    before = (home / "runs/latest").resolve()
    with process(command, cwd=home) as conductor:
        until(lambda: in_force(home / "runs/latest", before, conductor), "the engine is frozen", 120)
        everybody = psutil.Process(conductor.pid).children(recursive=True)
        guards = [one for one in everybody if "harness.chaos.guard" in one.cmdline()]
        assert len(guards) == 1
        killed = [psutil.Process(conductor.pid), *(one for one in everybody if with_guard or one not in guards)]
        victim = told(home / "runs/latest")[2]["detail"]["evidence"]["states"]
        for one in killed:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.send_signal(signal.SIGKILL)
    records = home / ".harness/undo"
    if with_guard:
        until(lambda: not any(one.is_running() and one.status() != "zombie" for one in guards), "the guard is dead", 10)
        assert set(states(victim)) == {"stopped"} and len(list(records.iterdir())) == 1
        healed = harness("heal", cwd=home)
        assert healed.returncode == 0 and "engine_frozen: gone" in healed.stdout, healed.stdout + healed.stderr
    until(lambda: not list(records.glob("*.json")), "the fault is taken back", MENDED_S)
    assert "stopped" not in states(victim)
    again = harness("heal", cwd=home)
    assert (again.returncode, again.stdout) == (0, "nothing to heal\n")
    assert harness("judge", str((home / "runs/latest").resolve())).returncode in (3, 5)


def in_force(run_dir: Path, before: Path, conductor: subprocess.Popen[str]) -> bool:
    assert conductor.poll() is None, "the run has ended"
    return run_dir.resolve() != before and any(event["event"] == "injected" for event in told(run_dir))


def states(victim: dict[str, str]) -> list[str]:
    return [psutil.Process(int(pid)).status() for pid in victim]
