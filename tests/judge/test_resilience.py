"""Faults as the judge reads them: windows around them, what is unsafe, whose gate they are, and how they are told."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from harness import evidence, timeline
from harness.judge import faults, resilience
from harness.judge.gates import GATES
from harness.judge.recovery import Kind
from harness.model import Judgement, Verdict
from harness.report import markdown, text

Lay = Callable[[Path, dict[str, Any]], None]
Tell = Callable[[dict[str, Any]], Verdict]
HURT = [{"n": 600, "to": 30}, {"n": 200, "from": 30, "to": 40, "outcome": "RESET"}, {"n": 1200, "from": 40}]
KILLED = {"name": "replica_killed", "injecting": 29.9, "injected": 30, "healed": 35}
SHOWN = {"evidence": {"pid 7": "gone"}}
STORY_OF_TWO = [
    *([10, "injecting", "kill", {}], [11, "injected", "kill", SHOWN]),
    *([12, "injecting", "kill", {}], [13, "injected", "kill", SHOWN]),
    *([20, "healing", "kill", {}], [21, "healed", "kill", SHOWN]),
    *([22, "healing", "kill", {}], [23, "healed", "kill", SHOWN]),
]
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


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({**KILLED, "healed": 110}, "no judged traffic was due after the faults"),
        ({**KILLED, "injected": None, "healed": None}, "there is no time after a fault: none is proven"),
    ],
)
def test_a_window_that_a_run_came_not_to(fault: dict[str, Any], words: str, tell: Tell) -> None:
    """A gate on what comes after the faults says why there is nothing, when nothing is."""
    gates = [{"p95_latency": {"below": "1.2s", "window": "after"}}]
    finding = tell({**STORY, "faults": [fault], "gates": gates}).findings[0]
    assert (finding.verdict, words in finding.why) == (Judgement.INVALID, True), finding.why


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


def test_a_fault_that_was_cut_short_and_then_hard_to_undo(tell: Tell) -> None:
    """That its undo failed at first, and came in the end, does not make it whole."""
    events = [
        [31, "aborted", "replica_killed", {"why": "a signal came"}],
        [32, "unproven", "replica_killed", {"why": "it does not answer", "step": "undone"}],
    ]
    verdict = tell({**STORY, "events": events})
    assert (verdict.exit_code, verdict.why) == (
        3,
        "fault: the fault was cut short (replica_killed): a signal came; it does not answer",
    )


def test_two_faults_of_one_name(tmp_path: Path, lay: Lay) -> None:
    """Both may be in force together: each is taken back, the last first, and none is left over."""
    lay(tmp_path, {"requests": [{"n": 400}], "events": STORY_OF_TWO})
    first, second = faults.of(timeline.read(tmp_path))
    assert (first.injected_s, first.healed_s, second.injected_s, second.healed_s) == (11, 23, 13, 21)
    assert faults.finding(timeline.read(tmp_path)).verdict == Judgement.PASS


def test_a_second_fault_of_one_name_that_is_refused(tell: Tell) -> None:
    """It is a fault that never was, and not a word about the first."""
    events = [[32, "refused", "replica_killed", {"why": "nobody is left"}]]
    verdict = tell({**STORY, "events": events})
    assert (verdict.exit_code, verdict.why) == (
        3,
        "fault: no evidence that the fault was applied (replica_killed): nobody is left",
    )


def test_arrivals_count_a_new_process_from_nothing(tmp_path: Path, lay: Lay) -> None:
    """An engine that restarts loses its counts, and nothing is counted twice or below nothing."""
    lay(tmp_path, {**STORY, "engines": {"engine-0": [[0, 100, 10]], "engine-1": [[0, 30, 10], [50, 60, 20]]}})
    moments_s, arrived = resilience.arrivals(timeline.read(tmp_path))
    assert (arrived >= 0).all()
    assert arrived.sum() == 990 + 290 + 4 + 180  # the new process holds four when it is first seen
    assert (np.diff(moments_s) >= 0).all()


def test_a_replica_whose_answer_ended_the_fault(tell: Tell) -> None:
    """The proof that a fault is over may itself be a replica that answers, dated by the machine's clock."""
    back = {"replica": "engine-1", "pid": 8, "started": 77, "at_s": 5034.0}  # the run's origin is at 5,000 s
    fault = {**KILLED, "undone": {"ready": [back, {"replica": "engine-2", "gone": "the stack is down"}, "?"]}}
    story = {**STORY, "faults": [fault], "gates": [{"replica_recovery": {"within": "2m"}}]}
    verdict = tell(story)
    assert (verdict.verdict, verdict.findings[0].figures["measured_s"]) == (Judgement.PASS, 4.0)
    assert [row["pid"] for row in verdict.tables["replicas"]] == [8]


def test_it_is_told(tell: Tell) -> None:
    """Text and Markdown show what was broken, what proves it, and the recovery with its interval."""
    verdict = tell({**STORY, "faults": [{**KILLED, "back": {"engine-1": 34}}]})
    for told in (text.render(verdict), markdown.render(verdict)):
        for words in (
            "What was broken",
            "pid 7: gone",
            "pid: 8",
            "Recovery of the service",
            "10.0 (10.0-10.0)",
            "Replicas that came back",
            "Before, during and after",
        ):
            assert words in told.replace("\\", ""), words


LEAKED = {"name": "gpu_leak", "injected": 10, "healed": 20}
TWICE = {
    "requests": [{"n": 2000}],
    "faults": [LEAKED, {**LEAKED, "injected": 60, "healed": 70}],
    "alerts": {"High": [[0, 100]]},
    "gates": [{"alert": {"name": "High", "fires_within": "8s", "clears_within": "8s"}}],
}


FIRST = [[14, "alert_fired", "High", {}], [25, "alert_cleared", "High", {}]]
SECOND = [[67, "alert_fired", "High", {}], [75, "alert_cleared", "High", {}]]


@pytest.mark.parametrize(
    ("events", "judgement", "why"),
    [
        ([*FIRST, *SECOND], Judgement.PASS, "gpu_leak: High fired after 7 s, and cleared after 5 s"),
        (FIRST, Judgement.FAIL, "gpu_leak: High never fired in the 39.25 s observed"),
        (SECOND, Judgement.FAIL, "gpu_leak: High never fired in the 49.25 s observed"),
    ],
)
def test_an_alert_answers_each_fault(events: list[list[Any]], judgement: Judgement, why: str, tell: Tell) -> None:
    """Of two faults in turn, each needs an alert that fires and clears in its own time."""
    finding = tell({**TWICE, "events": events}).findings[0]
    assert (finding.verdict, finding.why) == (judgement, why)


@pytest.mark.parametrize(
    ("told", "events", "judgement", "words"),
    [
        ([[0, 14]], [], Judgement.INVALID, "too short to tell: nobody told of it any more from 13 s of the run on"),
        ([[0, 50]], [], Judgement.FAIL, "High never fired in the 39.25 s observed"),
        ([[0, 12], [30, 100]], [], Judgement.INVALID, "nobody told of High for 19 s from 11 s of the run on"),
        ([[0, 12], [17, 100]], [[30, "alert_fired", "High", {}]], Judgement.INVALID, "for 6 s from 11 s"),
        ([[0, 12], [14, 100]], [], Judgement.FAIL, "High never fired in the 89.25 s observed"),
        ([[0, 23]], [[12, "alert_fired", "High", {}]], Judgement.INVALID, "not cleared in the 2.25 s observed"),
        (
            [[0, 40]],
            [[12, "alert_fired", "High", {}], [22, "alert_cleared", "High", {}]],
            Judgement.PASS,
            "High fired after 2 s, and cleared after 2 s",
        ),
        ([], [], Judgement.INVALID, "nobody told of High after the fault began"),
    ],
    ids=[
        "died before it was due",
        "died long after it was due",
        "silent while it was due",
        "seen late",
        "one look missed",
        "died before it cleared",
        "died when all was seen",
        "its rule always failed",
    ],
)
def test_an_alert_that_nobody_told_of(
    told: list[list[int]], events: list[list[Any]], judgement: Judgement, words: str, tell: Tell
) -> None:
    """Silence of the Prometheus is not an alert that did not fire: what it could hide is INVALID, and says so."""
    story = {**TWICE, "faults": [LEAKED], "alerts": {"High": told, "Low": [[0, 100]]}, "events": events}
    finding = tell(story).findings[0]
    assert (finding.verdict, words in finding.why) == (judgement, True), finding.why


def test_each_fault_has_its_own_replicas(tell: Tell) -> None:
    """A replica that another fault took later is not waited for."""
    faults = [
        {**KILLED, "injected": 10, "healed": 15, "injecting": 10, "back": {"engine-0": 15}},
        {**KILLED, "injected": 50, "healed": 58, "injecting": 50, "back": {"engine-1": 58}},
    ]
    verdict = tell({**STORY, "faults": faults, "gates": [{"replica_recovery": {"within": "20s"}}]})
    assert (verdict.findings[0].verdict, verdict.findings[0].figures["measured_s"]) == (Judgement.PASS, 8.0)
    assert [row["back_s"] for row in verdict.tables["replicas"]] == [5.0, 8.0]


@pytest.mark.parametrize("silent", [[[0, 60, 10]], [[0, 60, 10], [80, 100, 10]]], ids=["to the end", "for a while"])
def test_a_storm_that_an_engine_did_not_tell_of(silent: list[list[int]], tell: Tell) -> None:
    """Requests that reached an engine which does not say so are not taken for none."""
    story = {**STORY, "requests": [{"n": 2000}], "gates": [{"retry_storm": {"at_most": "2x"}}]}
    finding = tell({**story, "engines": {"engine-0": [[0, 100, 10]], "engine-1": silent}}).findings[0]
    assert finding.verdict == Judgement.INVALID
    assert "engine-1 did not say for" in finding.why


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
