"""Faults as the judge reads them: windows around them, what is unsafe, whose gate they are, and how they are told."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from pydantic import TypeAdapter, ValidationError

from harness import evidence, timeline
from harness.judge import resilience
from harness.judge.gates import GATES
from harness.judge.recovery import Kind
from harness.model import Judgement, Verdict
from harness.report import markdown, text

Lay = Callable[[Path, dict[str, Any]], None]
JudgeDir = Callable[[Path, dict[str, Any]], Verdict]
Tell = Callable[[dict[str, Any]], Verdict]
HURT = [{"n": 600, "to": 30}, {"n": 200, "from": 30, "to": 40, "outcome": "RESET"}, {"n": 1200, "from": 40}]
KILLED = {"name": "replica_killed", "injecting": 29.9, "injected": 30, "healed": 35}
STORY = {"requests": HURT, "faults": [KILLED], "gates": [{"recovery": {"within": "30s"}}]}


@pytest.mark.parametrize(("healed", "after"), [(35, (40.025, 100.0)), (60, (60.0, 100.0)), (110, None), (None, None)])
def test_windows(healed: float | None, after: tuple[float, float] | None, tmp_path: Path, lay: Lay) -> None:
    """`before` ends where requests could still be in flight; `after` begins when all is well again."""
    lay(tmp_path, {**STORY, "faults": [{**KILLED, "healed": healed}]})
    cut = resilience.with_windows(timeline.read(tmp_path), resilience.Recovery(within_s=30.0)).windows
    found = {name: (window.start_s, window.end_s) for name, window in cut.items()}
    assert found["before"] == pytest.approx((0.0, 28.7))
    assert found["during"] == pytest.approx((30.0, min(healed or 100.0, 100.0)))
    assert found.get("after") == (after and pytest.approx(after))


def test_a_run_without_faults_has_no_such_windows(tmp_path: Path, lay: Lay) -> None:
    """Nothing is cut, told or believed of faults where there were none."""
    lay(tmp_path, {"requests": [{"n": 400}]})
    seen = timeline.read(tmp_path)
    assert resilience.with_windows(seen, resilience.Recovery(within_s=30.0)) is seen
    assert resilience.tables(seen, resilience.Recovery(within_s=30.0)) == {}


def test_a_gate_names_its_fault(tell: Tell) -> None:
    """Of two faults only the one that is named counts; one that was not there proves nothing."""
    faults = [{**KILLED, "name": "gpu_leak", "injecting": 20, "injected": 20, "healed": 34}, KILLED]
    gates = [{"recovery": {"within": "15s", "fault": name}} for name in ("replica_killed", "gpu_leak", "latency")]
    killed, leaked, missing = tell({**STORY, "faults": faults, "gates": gates}).findings
    assert (killed.verdict, killed.figures["measured_s"]) == (Judgement.PASS, pytest.approx(10.025))
    assert (leaked.verdict, leaked.figures["measured_s"]) == (Judgement.FAIL, pytest.approx(20.025))
    assert (missing.verdict, missing.why[-39:]) == (Judgement.INVALID, "applied (latency): nothing was injected")


def test_from_the_end_of_the_fault(tell: Tell) -> None:
    """What lasts can be judged from its end: 5 s after the leak was taken back, not 10 s after it began."""
    finding = tell({**STORY, "gates": [{"recovery": {"within": "30s", "since": "healed"}}]}).findings[0]
    assert finding.figures["measured_s"] == pytest.approx(5.025)


def test_a_slow_service_is_hurt_by_its_own_limit(tell: Tell) -> None:
    """What is good is what is served within `below`: the same run is well or never well again."""
    story = {**STORY, "requests": [{"n": 600, "to": 30}, {"n": 1400, "from": 30, "e2e": 0.9}]}
    gates = [{"recovery": {"within": "30s", "below": below}} for below in ("1.2s", "800ms")]
    kinds = [finding.figures["result"] for finding in tell({**story, "gates": gates}).findings]
    assert kinds == [Kind.UNHURT, Kind.NEVER]


@pytest.mark.parametrize(
    ("faults", "code"), [([{**KILLED, "healed": None}], 5), ([KILLED], 130)], ids=["left", "undone"]
)
def test_an_interrupted_run(faults: list[dict[str, Any]], code: int, tell: Tell) -> None:
    """Interrupted and healed is 130; a fault that is left outranks that."""
    verdict = tell({**STORY, "faults": faults, "interrupted": True})
    assert (verdict.verdict, verdict.exit_code) == (Judgement.INVALID, code)


def test_what_is_unsafe_stands_for_a_stage() -> None:
    """Of several INVALID runs the one that left a fault behind is told."""
    told = [Verdict(Judgement.INVALID, code, str(code)) for code in (3, 130, 5)]
    assert evidence.worst(told).exit_code == 5


def test_a_guard_that_died(tell: Tell) -> None:
    """A fault that was cut short was not what the run is to show."""
    events = [[33, "unproven", "replica_killed", {"why": "its guard was gone", "step": "hold"}]]
    verdict = tell({**STORY, "events": events})
    assert (verdict.exit_code, verdict.why) == (
        3,
        "fault: the fault was cut short (replica_killed): its guard was gone",
    )


def test_arrivals_count_a_new_process_from_nothing(tmp_path: Path, lay: Lay) -> None:
    """An engine that restarts loses its counts, and nothing is counted twice or below nothing."""
    lay(tmp_path, {**STORY, "engines": {"engine-0": [[0, 100, 10]], "engine-1": [[0, 30, 10], [50, 60, 20]]}})
    moments_s, arrived = resilience.arrivals(timeline.read(tmp_path))
    assert (arrived >= 0).all()
    assert arrived.sum() == 990 + 290 + 4 + 180  # the new process holds four when it is first seen
    assert (np.diff(moments_s) >= 0).all()


def test_a_replica_whose_answer_ended_the_fault(tmp_path: Path, lay: Lay, judge_dir: JudgeDir) -> None:
    """The proof that a fault is over may itself be a replica that answers, dated by the machine's clock."""
    back = {"replica": "engine-1", "pid": 8, "started": 77, "at_s": 5034.0}
    fault = {**KILLED, "undone": {"ready": [back, {"replica": "engine-2", "gone": "the stack is down"}, "?"]}}
    story = {**STORY, "faults": [fault], "gates": [{"replica_recovery": {"within": "2m"}}]}
    lay(tmp_path, story)
    run = orjson.loads((tmp_path / "run.json").read_bytes())
    (tmp_path / "run.json").write_bytes(orjson.dumps({**run, "origin_monotonic_s": 5000.0}))
    verdict = judge_dir(tmp_path, story)
    assert (verdict.verdict, verdict.findings[0].figures["measured_s"]) == (Judgement.PASS, 4.0)
    assert [row["pid"] for row in verdict.tables["replicas"]] == [8]


def test_it_is_told(tell: Tell) -> None:
    """Text and Markdown show what was broken, what proves it, and the recovery with its interval."""
    events = [[50, "replica_ready", "engine-1", {"pid": 8, "answered": 3}]]
    verdict = tell({**STORY, "events": events})
    for told in (text.render(verdict), markdown.render(verdict)):
        for words in (
            "What was broken",
            "pid 7: gone",
            "pid 8: answers",
            "Recovery of the service",
            "10.0 (10.0-10.0)",
            "Replicas that came back",
            "Before, during and after",
        ):
            assert words in told.replace("\\", ""), words


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("recovery", {}, "within"),
        ("recovery", {"within": 30}, "is not a time"),
        ("recovery", {"within": "30s", "window": "after"}, "window"),
        ("recovery", {"within": "30s", "since": "detected"}, "injected"),
        ("replica_recovery", {"within": "0s"}, "greater than 0"),
        ("alert", {"name": "X", "fires_within": "1s"}, "clears_within"),
        ("retry_storm", {"at_most": 2}, "is not a multiple"),
    ],
)
def test_refused_gates(name: str, value: Any, words: str) -> None:
    """A limit that is missing, bare or unknown is refused with words that say which."""
    with pytest.raises(ValidationError, match=words):
        TypeAdapter(GATES[name]).validate_python(value)
