"""Where stage 3 ends: the last replica is spared unless one insists, and a run that does too much harm is stopped."""

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from running import ROOT, harness, run_dir_of, verdict

from tests.support.stack import stack, write_target

pytestmark = pytest.mark.e2e

PORT, LONELY_PORT = 21300, 21320
SCENARIO = """
claim: A fault is felt and gone.
traffic:
  arrivals: {{poisson: {{rate: 10/s}}}}
  warm_up: 2s
  for: {lasts}
  prompts: {{mix: {{short: {{share: 100%, tokens: 16..64}}}}, answer_tokens: {{mean: 8, at_most: 16}}}}
chaos:
  - {{experiment: experiment.yaml, at: 15s}}
{rest}
"""
RECOVERY = "gates:\n  - recovery: {within: 20s, hold: 2s, below: 5s}\n"


@contextlib.contextmanager
def serving(home: Path, port: int, replicas: int) -> Iterator[Path]:
    """A directory with a stack of so many replicas that is up, and its target file."""
    write_target(
        home,
        port,
        engines=[f"http://127.0.0.1:{port + 1 + number}" for number in range(replicas)],
        prometheus=f"http://127.0.0.1:{port + 6}",
        gpu_metrics=f"http://127.0.0.1:{port + 5}/metrics",
        alert_scale=0.033,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        try:
            up = stack(home, "up", "--target", "target.yaml")
            assert up.returncode == 0, up.stdout + up.stderr
            yield home
        finally:
            stack(home, "down")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    assert shutil.which("prometheus"), "prometheus is missing: it is the Debian package prometheus"
    with serving(tmp_path_factory.mktemp("limits"), PORT, 2) as home:
        yield home


def play(home: Path, lasts: str, rest: str, *words: str) -> tuple[int, str, str]:
    """Play the experiment in experiment.yaml; exit code, and what was said."""
    (home / "scenario.yaml").write_text(SCENARIO.format(lasts=lasts, rest=rest))
    done = harness("run", "scenario.yaml", "--target", "target.yaml", *words, cwd=home)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr


def experiment(home: Path, name: str, **changes: str) -> None:
    """A shipped experiment, some of its words changed."""
    text = (ROOT / "experiments" / name).read_text()
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    (home / "experiment.yaml").write_text(text)


def events(run_dir: Path, name: str) -> dict[str, dict[str, Any]]:
    """What was told of a fault, by kind."""
    lines = [json.loads(line) for path in run_dir.glob("log.*.jsonl") for line in path.read_text().splitlines()]
    return {line["event"]: line for line in lines if line.get("event") and line["name"] == name}


def finding(seen: Any, gate: str) -> dict[str, Any]:
    return dict(next(one for one in (*seen["believed"], *seen["gates"]) if one["id"] == gate))


def test_the_last_replica(tmp_path: Path) -> None:
    """It is spared before the run with the reason; by force it is killed, and its users see nothing but failures."""
    with serving(tmp_path, LONELY_PORT, 1):
        experiment(tmp_path, "process/kill_replica.yaml")
        code, _, said = play(tmp_path, "45s", RECOVERY)
        assert code == 2
        assert "1 of 1 replicas answer, so 0 would be left, not 1; --force goes on" in said
        assert not (tmp_path / "runs/latest").exists()
        code, told, _ = play(tmp_path, "45s", RECOVERY, "--force")
        assert "; force yes;" in " ".join(told.split())
        recovery = finding(verdict(run_dir_of(told, tmp_path)), "recovery")
        assert recovery["result"] == "recovered" and recovery["worst_second_bad"] == recovery["worst_second_n"]
        assert code == {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 4}[recovery["verdict"]]


def test_a_leak_over_the_limit(home: Path) -> None:
    """The gate fails, the alert fires and clears, and the memory is back within 1 %."""
    experiment(home, "gpu/leak_over.yaml", **{"lasts: 30s": "lasts: 15s"})
    gates = "gates:\n  - gpu_memory: {below: 85%}\n"
    gates += "  - alert: {name: GpuMemoryHigh, fires_within: 15s, clears_within: 20s}\n"
    code, told, _ = play(home, "60s", gates)
    run_dir = run_dir_of(told, home)
    seen = verdict(run_dir)
    verdicts = {gate: finding(seen, gate)["verdict"] for gate in ("fault", "gpu_memory", "alert")}
    assert verdicts == {"fault": "PASS", "gpu_memory": "FAIL", "alert": "PASS"}, told
    assert (code, seen["verdict"]) == (1, "FAIL")
    healed = events(run_dir, "gpu_leak")["healed"]["detail"]["evidence"]
    assert abs(healed["fell_bytes"]) <= 0.01 * healed["total_bytes"]


@pytest.mark.parametrize(
    ("name", "changes", "limit", "why"),
    [
        (
            "network/aborts.yaml",
            {"10%": "100%", "lasts: 30s": "lasts: 4m"},
            "bad_share: 50%, for: 3s",
            "requests of the",
        ),
        ("gpu/leak_over.yaml", {"lasts: 30s": "lasts: 4m"}, "gpu_memory: 86%", "of the memory of GPU-0 was taken"),
    ],
    ids=["requests", "memory"],
)
def test_a_run_that_does_too_much_harm_is_stopped(
    home: Path, name: str, changes: dict[str, str], limit: str, why: str
) -> None:
    """What is broken is mended at once, long before its time, and the exit code says that somebody must look."""
    experiment(home, name, **changes)
    code, told, _ = play(home, "3m", f"abort: {{{limit}}}\n{RECOVERY}")
    run_dir = run_dir_of(told, home)
    seen = verdict(run_dir)
    assert (code, seen["verdict"]) == (5, "INVALID")
    assert "stopped for safety" in str(seen["why"]) and why in str(seen["why"])
    fault = events(run_dir, {"network": "aborts", "gpu": "gpu_leak"}[name.partition("/")[0]])
    assert {"injecting", "aborted", "healed"} <= fault.keys()
    assert fault["healed"]["at_s"] < fault["injecting"]["at_s"] + 60
    assert harness("heal", cwd=home).stdout == "nothing to heal\n"
