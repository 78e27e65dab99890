"""One verdict over belief and gates: its order, its bytes, and what judging costs."""

import itertools
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from harness import plan_file, timeline
from harness.judge import verdict as verdicts
from harness.log import ObservationLog
from harness.model import Finding, Judgement, Observation, Outcome, Request, Verdict, Window

P95 = {"p95_latency": {"below": "1.2s"}}
LIMIT_BYTES = 400 * 2**20
LIMIT_CPU_S = 10.0  # CPU time, imports included: what other processes do at the same time is not in it

Lay = Callable[[Path, dict[str, Any]], None]
JudgeDir = Callable[[Path, dict[str, Any]], Verdict]
Tell = Callable[[dict[str, Any]], Verdict]


def test_round_trip(tell: Tell) -> None:
    """A verdict read from its bytes writes the same bytes again."""
    told = verdicts.to_json(tell({"requests": [{"n": 400}], "gates": [P95]}))
    assert verdicts.to_json(verdicts.from_json(told)) == told


def test_another_schema_is_refused() -> None:
    """A file that is no verdict of this version is not read as one."""
    with pytest.raises(ValueError, match="not a verdict"):
        verdicts.from_json(b'{"schema": 99}')


def test_figures_are_rounded_in_one_place_and_provenance_is_not() -> None:
    """Figures have six digits, what is not finite is null, and a wall-clock second stays whole."""
    finding = Finding("g", Judgement.FAIL, "why", figures={"measured_s": 1.23456789, "bound_s": float("inf")})
    verdict = Verdict(Judgement.FAIL, 1, "why", findings=(finding,), provenance={"origin_wall_s": 1790000000.123})
    told = orjson.loads(verdicts.to_json(verdict))
    assert told["gates"] == [{"id": "g", "verdict": "FAIL", "why": "why", "measured_s": 1.23457, "bound_s": None}]
    assert told["provenance"] == {"origin_wall_s": 1790000000.123}


def test_no_gate_at_all_is_invalid(tell: Tell) -> None:
    """A healthy run without a gate has judged nothing."""
    verdict = tell({"requests": [{"n": 400}], "gates": []})
    assert (verdict.verdict, verdict.exit_code) == (Judgement.INVALID, 3)
    assert "nothing judged" in verdict.why


@pytest.mark.parametrize(
    ("requests", "player", "expected"),
    [
        ([{"n": 400}], {}, Judgement.PASS),
        ([{"n": 30}], {}, Judgement.INCONCLUSIVE),
        ([{"n": 30, "outcome": "RESET"}], {}, Judgement.FAIL),
        ([{"n": 30, "outcome": "RESET"}], {"cpu_share": 1.0}, Judgement.INVALID),
    ],
)
def test_the_worst_decides(
    tell: Tell, requests: list[dict[str, Any]], player: dict[str, Any], expected: Judgement
) -> None:
    """INVALID outranks FAIL, FAIL outranks INCONCLUSIVE, and PASS needs all."""
    gates = [{"p50_latency": {"below": "1s"}}, P95]
    assert tell({"requests": requests, "player": player, "gates": gates}).verdict == expected


def test_workers_files_in_any_order(tmp_path: Path, lay: Lay, judge_dir: JudgeDir) -> None:
    """However the observations are spread over files, and whichever file is which, the verdict is the same bytes."""
    groups = [{"n": 300, "ttft": 0.1, "gaps": [0.02, 0.03]}, {"n": 12, "e2e": 1.4}, {"n": 5, "outcome": "TIMEOUT"}]
    story = {"requests": groups, "gates": [P95, {"p99_latency": {"below": "100ms", "of": "itl"}}]}
    told = set()
    for files in (1, 3):
        for number, order in enumerate(itertools.permutations(range(files))):
            laid, run_dir = tmp_path / f"{files}", tmp_path / f"{files}-{number}"
            if not laid.exists():
                laid.mkdir()
                lay(laid, {**story, "files": files})
            shutil.copytree(laid, run_dir)
            for k, to in enumerate(order):
                shutil.copyfile(laid / f"log.player-{k}.bin", run_dir / f"log.player-{to}.bin")
            told.add(verdicts.to_json(judge_dir(run_dir, story)))
    assert len(told) == 1


def test_observations_in_any_order_inside_a_file(tmp_path: Path, lay: Lay, judge_dir: JudgeDir) -> None:
    """Requests end in another order than they are due in: the record's order changes nothing."""
    story = {"requests": [{"n": 200, "ttft": 0.1, "gaps": [0.02, 0.04]}, {"n": 20, "e2e": 2.0}], "gates": [P95]}
    lay(tmp_path, story)
    before = verdicts.to_json(judge_dir(tmp_path, story))
    observations = list(timeline.observations_of(timeline.read(tmp_path)))
    random.Random(5).shuffle(observations)
    (tmp_path / "log.player-0.bin").unlink()
    log = ObservationLog(tmp_path / "log.player-0.bin")
    for observation in observations:
        log.append(observation)
    log.close()
    assert verdicts.to_json(judge_dir(tmp_path, story)) == before


@pytest.mark.parametrize("name", ["log.player-0.bin", "log.player-0.jsonl", "log.watch.jsonl", "log.conductor.jsonl"])
def test_a_wreck_is_judged(name: str, tmp_path: Path, lay: Lay, judge_dir: JudgeDir) -> None:
    """Whatever file is cut wherever, judging raises nothing and never passes what the cut took away."""
    gates = [P95, {"gpu_memory": {"below": "85%"}}, {"goodput": {"at_least": "90%", "ttft": "1s"}}]
    story = {"requests": [{"n": 400}], "gpu": "simulated", "gpus": {"GPU-0": {"used": 0.5}}, "gates": gates}
    lay(tmp_path, story)
    assert judge_dir(tmp_path, story).verdict == Judgement.PASS
    whole = (tmp_path / name).read_bytes()
    for tenth in range(10):
        (tmp_path / name).write_bytes(whole[: len(whole) * tenth // 10])
        verdict = judge_dir(tmp_path, story)
        assert verdict.verdict == Judgement.INVALID or name == "log.conductor.jsonl", tenth
        verdicts.to_json(verdict)


@pytest.mark.parametrize("flips", [12, pytest.param(80, marks=pytest.mark.e2e)])  # not for its processes, for its time
@pytest.mark.parametrize("name", ["plan.jsonl", "log.player-0.jsonl", "log.watch.jsonl", "log.conductor.jsonl"])
def test_a_flipped_bit_is_judged(name: str, flips: int, tmp_path: Path, lay: Lay, judge_dir: JudgeDir) -> None:
    """Whatever bit of a file flips, judging raises at most ValueError, and a plan that differs is INVALID."""
    gates = [P95, {"gpu_memory": {"below": "85%"}}, {"p50_latency": {"below": "1s", "of": "itl"}}]
    requests = [{"n": 30, "ttft": 0.1, "gaps": [0.02]}, {"n": 3, "flaw": "over_long", "expect": ["422"]}]
    story = {"window": [0, 8], "requests": requests, "gpu": "simulated", "gpus": {"GPU-0": {"used": 0.5}}}
    lay(tmp_path, story)
    whole = (tmp_path / name).read_bytes()
    rng = random.Random(17)
    head = rng.sample(range(min(400, len(whole))), flips * 3 // 4)  # a header, and the first few lines
    for at in [*head, *(rng.randrange(len(whole)) for _ in range(flips // 4)), len(whole) - 1]:
        flipped = bytearray(whole)
        flipped[at] ^= 1 << rng.randrange(8)
        (tmp_path / name).write_bytes(flipped)
        try:
            verdict = judge_dir(tmp_path, {**story, "gates": gates})
        except ValueError:
            continue
        verdicts.to_json(verdict)
        assert verdict.verdict == Judgement.INVALID or name != "plan.jsonl", (at, bytes(flipped[at - 20 : at + 20]))


def test_one_class_cannot_hide_in_another(tell: Tell) -> None:
    """A gate on one class counts that class alone, and the table shows every class."""
    groups = [{"n": 900, "class": "short"}, {"n": 100, "class": "long", "e2e": 3.0}]
    verdict = tell({"requests": groups, "gates": [{"p90_latency": {"below": "1s", "class": "long"}}]})
    assert verdict.findings[0].figures["n"] == 100
    assert verdict.verdict == Judgement.FAIL
    assert verdict.tables["by_class"]["long"]["e2e"]["p50_s"] == pytest.approx(3.0)
    assert verdict.tables["by_class"]["short"]["e2e"]["p99_s"] == pytest.approx(0.5)


def test_warm_up_is_not_judged(tmp_path: Path, lay: Lay, judge_dir: JudgeDir) -> None:
    """Requests due before the window are recorded, and count nowhere."""
    story = {
        "window": [20.0, 120.0],
        "requests": [{"n": 100, "from": 0, "to": 20, "e2e": 5.0}, {"n": 400, "e2e": 0.4}],
        "gates": [P95],
    }
    lay(tmp_path, story)
    verdict = judge_dir(tmp_path, story)
    assert verdict.verdict == Judgement.PASS
    assert verdict.findings[0].figures["n"] == 400


def test_tokens_as_planned_and_as_reported(tell: Tell) -> None:
    """The table says how far the server's own prompt counts lie from the planned ones."""
    groups = [{"n": 400, "prompt_tokens": 100, "tokens_in": 112}]
    tokens = tell({"requests": groups, "gates": [P95]}).tables["tokens"]
    assert (tokens["n"], tokens["difference_median"]) == (400, 12)


@pytest.mark.e2e  # not for its processes, for its time
def test_two_hundred_thousand_observations(tmp_path: Path) -> None:
    """200,000 streams of 32 events each are read and judged in less than 400 MB and 10 s of one core."""
    n, gaps_s = 200_000, (0.02,) * 31
    header = plan_file.PlanHeader("large", 0, n, (Window("steady", 0.0, n / 20),), 30.0)
    requests = (Request(index, index / 20, "short", prompt_tokens=100, stream=True) for index in range(n))
    with open(tmp_path / "plan.jsonl", "wb") as plan:
        plan.writelines(plan_file.lines(header, requests))
    log = ObservationLog(tmp_path / "log.player-0.bin")
    for index in range(n):
        due_s = index / 20
        first_s, last_s = due_s + 0.1, due_s + 0.8
        log.append(
            Observation(index, due_s, due_s, first_s, first_s, last_s, last_s, 100, 32, 200, Outcome.OK, gaps_s=gaps_s)
        )
    log.close()
    script = """
import resource, sys
from pathlib import Path
from pydantic import TypeAdapter
from harness import timeline
from harness.judge.gates import GATES, Gate
from harness.judge.verdict import judge, to_json
gates = [Gate(n, 1, TypeAdapter(GATES[n]).validate_python(v)) for n, v in (
    ("p95_latency", {"below": "1.2s"}), ("p99_latency", {"below": "100ms", "of": "itl"}),
    ("p90_latency", {"below": "50ms", "of": "tpot"}), ("success", {"at_least": "99.5%"}))]
told = judge(timeline.read(Path(sys.argv[1])), gates, "none", "", {})
to_json(told)
used = resource.getrusage(resource.RUSAGE_SELF)
status = Path("/proc/self/status").read_text()  # ru_maxrss would count what the test's own process held before exec
peak_kb = status.split("VmHWM:")[1].split()[0]
print([f.verdict.value for f in told.findings].count("PASS"), int(peak_kb) * 1024, used.ru_utime + used.ru_stime)
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    passed, peak_bytes, cpu_s = map(float, done.stdout.split())
    print(f"judged in {cpu_s:.1f} s of one core and {peak_bytes / 2**20:.0f} MiB")
    assert passed == 4
    assert peak_bytes < LIMIT_BYTES
    assert cpu_s < LIMIT_CPU_S
