"""Captured answers beside replayed ones: the classes, what counts as a change, the ratios and the slices."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from harness import timeline
from harness.judge import comparison
from harness.judge.against_capture import SameAnswers
from harness.judge.gates import GATES
from harness.model import Judgement, Outcome, Verdict, Window
from harness.timeline import Timeline

Lay = Callable[[Path, dict[str, Any]], None]
Tell = Callable[[dict[str, Any]], Verdict]
STEADY = Window("steady", 0.0, 100.0)
SAME = {"same_answers": {}}

met = st.fixed_dictionaries(
    {
        "outcome": st.sampled_from([o.name for o in Outcome]),
        "status": st.sampled_from([0, 200, 301, 400, 422, 429, 503]),
    }
)


def laid(lay: Lay, run_dir: Path, requests: list[dict[str, Any]], **story: Any) -> Timeline:
    lay(run_dir, {"replay": {}, "requests": requests, **story})
    return timeline.read(run_dir)


@pytest.mark.parametrize(
    ("what", "word"),
    [
        ({}, "2xx"),
        ({"outcome": "ACCEPTED_BUT_BAD", "status": 200}, "2xx"),
        ({"outcome": "REJECTED_AS_EXPECTED", "status": 422}, "422"),
        ({"outcome": "RATE_LIMITED", "status": 429}, "429"),
        ({"outcome": "HTTP_5XX", "status": 503}, "5xx"),
        ({"outcome": "REJECTED", "status": 302}, "3xx"),
        ({"outcome": "RESET"}, "none"),
        ({"outcome": "TIMEOUT"}, "none"),
        ({"outcome": "TRUNCATED", "status": 200}, "broken"),
        ({"outcome": "ERROR_IN_STREAM", "status": 200}, "broken"),
        ({"outcome": "CANCELLED_BY_US", "status": 200, "give_up": 0.5}, "aborted"),
        ({"outcome": "CANCELLED_BY_US", "status": 200}, "unknown"),
        ({"outcome": "OPEN"}, "unknown"),
    ],
)
def test_the_class_of_an_answer(what: dict[str, Any], word: str, tmp_path: Path, lay: Lay) -> None:
    """An answer is its family, its exact status where it is a 4xx, or the word for what it was instead of one."""
    seen = laid(lay, tmp_path, [{"n": 1, **what}])
    assert comparison.answer_name(int(comparison.answers(seen)[0])) == word


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sides=st.lists(st.tuples(met, met), min_size=1, max_size=12))
def test_every_request_is_in_the_matrix_once(
    sides: list[tuple[dict[str, Any], dict[str, Any]]], tmp_path_factory: pytest.TempPathFactory, lay: Lay
) -> None:
    """Whatever either side met, the matrix holds each request once, and a change lies among those it can happen to."""
    requests = [{"n": 2, **now, "captured": then} for then, now in sides]
    seen = laid(lay, tmp_path_factory.mktemp("run"), requests)
    mask = seen.within(STEADY)
    cells = [cell for row in comparison.matrix(seen, mask).values() for cell in row.values()]
    assert sum(cell["n"] for cell in cells) == 2 * len(sides)
    assert all(1 <= len(cell["examples"]) <= min(comparison.EXAMPLES, cell["n"]) for cell in cells)
    for change in comparison.changes(seen, mask).values():
        assert not (change.changed & ~change.among).any()
        assert not (change.unknown & (change.changed | ~change.among)).any()
        assert sum(kind["n"] for kind in comparison.kinds(seen, change)) == change.changed.sum()


@pytest.mark.parametrize(
    ("then", "now", "change"),
    [
        ({"outcome": "REJECTED", "status": 422}, {}, "rejected_then_accepted"),
        ({"outcome": "REJECTED", "status": 400}, {"outcome": "TRUNCATED", "status": 200}, "rejected_then_accepted"),
        ({}, {"outcome": "REJECTED", "status": 422}, "accepted_then_rejected"),
        ({}, {"outcome": "RATE_LIMITED", "status": 429}, "accepted_then_rejected"),
        ({}, {"outcome": "HTTP_5XX", "status": 502}, "accepted_then_failed"),
        ({}, {"outcome": "REFUSED"}, "accepted_then_failed"),
        ({}, {"outcome": "REJECTED", "status": 302}, "accepted_then_failed"),
        ({}, {"outcome": "STALLED", "status": 200}, "accepted_then_failed"),
        ({"outcome": "REJECTED", "status": 422}, {"outcome": "REJECTED", "status": 400}, "rejected_otherwise"),
        ({"outcome": "REJECTED", "status": 422}, {"outcome": "RESET"}, "rejected_otherwise"),
        ({"outcome": "REJECTED", "status": 422}, {"outcome": "REJECTED", "status": 422}, ""),
        ({"outcome": "TRUNCATED", "status": 200}, {"outcome": "TRUNCATED", "status": 200}, ""),
        ({"outcome": "OPEN"}, {}, ""),
        ({"outcome": "RATE_LIMITED", "status": 429}, {}, ""),
        ({"outcome": "HTTP_5XX", "status": 503}, {}, ""),
        ({"outcome": "RESET"}, {"outcome": "REJECTED", "status": 400}, ""),
        ({"finish": "STOP"}, {"finish": "LENGTH"}, "other_finish"),
        ({"finish": "STOP"}, {}, ""),
        ({"shape": 7}, {"shape": 8}, "other_shape"),
        ({}, {"shape": 8}, ""),
    ],
)
def test_what_counts_as_a_change(
    then: dict[str, Any], now: dict[str, Any], change: str, tmp_path: Path, lay: Lay
) -> None:
    """Each pair of answers is one change at most; overload that went, and what one side did not say, is none."""

    def whole(side: dict[str, Any]) -> dict[str, Any]:
        status = 0 if "outcome" in side else 200
        return {"outcome": "OK", "status": status, "finish": "UNSAID", "shape": 0, **side}

    seen = laid(lay, tmp_path, [{"n": 1, **whole(now), "captured": whole(then)}])
    found = comparison.changes(seen, seen.within(STEADY))
    assert [name for name, one in found.items() if one.changed.any()] == ([change] if change else [])


def test_ratios_are_of_the_same_requests(tmp_path: Path, lay: Lay) -> None:
    """A request that only one side served is in neither quantile, and each class has rows of its own."""
    requests = [
        {"n": 300, "class": "chat", "e2e": 0.6, "captured": {"e2e": 0.5}},
        {"n": 300, "class": "other", "e2e": 0.2, "captured": {"e2e": 0.1}},
        {"n": 50, "class": "chat", "e2e": 9.0, "captured": {"outcome": "HTTP_5XX", "status": 503}},
        {"n": 50, "class": "chat", "outcome": "RESET", "captured": {"outcome": "OK", "status": 200, "e2e": 9.0}},
    ]
    seen = laid(lay, tmp_path, requests)
    told = comparison.latency(seen, seen.within(STEADY), STEADY)
    assert list(told) == ["all", "chat", "other"]
    assert list(told["chat"]) == ["e2e"]
    assert told["chat"]["e2e"]["n"] == 300
    assert told["chat"]["e2e"]["p99"]["ratio"] == pytest.approx(1.2)
    assert told["other"]["e2e"]["p50"]["ratio"] == pytest.approx(2.0)


def test_a_ratio_lies_in_its_interval_and_more_requests_narrow_it(tmp_path: Path, lay: Lay) -> None:
    """The interval holds the ratio; a quantile that so few requests do not show has no upper end."""
    widths = []
    for n in (10, 400):
        mixed = [{"n": n, "e2e": 0.1 * k} for k in range(1, 21)]
        run_dir = tmp_path / str(n)
        run_dir.mkdir()
        seen = laid(lay, run_dir, mixed)
        quantiles = comparison.latency(seen, seen.within(STEADY), STEADY)["short"]["e2e"]
        for told in quantiles.values():
            assert isinstance(told, int) or not (told["low"] > told["ratio"] or told["high"] < told["ratio"])
        widths.append(quantiles["p50"]["high"] - quantiles["p50"]["low"])
        assert math.isnan(quantiles["p99.9"]["high"]) == (n == 10)
    assert widths[1] < widths[0]


def test_slices_show_when_it_changed(tmp_path: Path, lay: Lay) -> None:
    """The slices cover the window, with rates, refusals and memory of each."""
    requests = [
        {"n": 240, "to": 50},
        {"n": 240, "from": 50, "outcome": "RATE_LIMITED", "status": 429, "captured": {"outcome": "OK", "status": 200}},
    ]
    seen = laid(lay, tmp_path, requests, gpus={"GPU-0": {"used": 0.5, "peak": 0.9, "peak_at": 99}})
    rows = comparison.over_time(seen, STEADY)
    assert len(rows) == comparison.SLICES
    assert [row["replayed_refused_share"] for row in rows] == [0.0] * 6 + [1.0] * 6
    assert {row["captured_refused_share"] for row in rows} == {0.0}
    assert all(row["captured_per_s"] == row["replayed_per_s"] == pytest.approx(4.8) for row in rows)
    assert [round(row["gpu_memory_share"], 3) for row in rows] == [0.5] * 11 + [0.9]


def test_how_true_a_replay_was_to_its_times(tmp_path: Path, lay: Lay) -> None:
    """Lags that alternate are gap errors without drift; lags that grow are drift."""
    lags = [{"n": 200, "send_lag": 0.0}, {"n": 200, "send_lag": 0.004}]
    told = comparison.punctuality(seen := laid(lay, tmp_path, lags), seen.within(STEADY))
    assert told["gap_error_p99_s"] == pytest.approx(0.004)
    assert told["drift_share"] == pytest.approx(0.0, abs=5e-5)
    (later := tmp_path / "later").mkdir()
    grown = [{"n": 100, "from": 25.0 * k, "to": 25.0 * (k + 1), "send_lag": 0.1 * k} for k in range(4)]
    told = comparison.punctuality(seen := laid(lay, later, grown), seen.within(STEADY))
    assert told["drift_share"] == pytest.approx(0.003, rel=0.02)


@pytest.mark.parametrize("written", [-1, 0.05, True, "five", "5", "101%"])
def test_an_allowance_is_a_count_or_a_share(written: Any) -> None:
    """A bare fraction, a negative number or a word is refused with both ways to say it."""
    with pytest.raises(ValidationError, match=r"neither a count such as 0 nor a share such as 5%"):
        TypeAdapter(GATES["same_answers"]).validate_python({"other_finish": written})


def test_what_is_held_by_default() -> None:
    """Refusals, and service, are to be as they were; what answers say is judged only when asked for."""
    read: SameAnswers = TypeAdapter(GATES["same_answers"]).validate_python({"other_finish": "5%"})
    assert read.allowances == {
        "rejected_then_accepted": 0,
        "accepted_then_rejected": 0,
        "accepted_then_failed": 0,
        "other_finish": 0.05,
    }


@pytest.mark.parametrize(("n", "expected"), [(50, Judgement.INCONCLUSIVE), (2000, Judgement.PASS)])
def test_a_share_of_changes_needs_its_bound(n: int, expected: Judgement, tell: Tell) -> None:
    """A share that holds among few requests proves nothing yet; the same share of many does."""
    same, other = {"n": n, "finish": "STOP"}, {"n": n // 50, "finish": "LENGTH", "captured": {"finish": "STOP"}}
    story = {"replay": {}, "requests": [same, other], "gates": [{"same_answers": {"other_finish": "5%"}}]}
    assert tell(story).findings[0].verdict == expected


def test_a_run_without_a_capture_compares_nothing(tell: Tell) -> None:
    """Without a recording both gates are INVALID and say so."""
    gates = [SAME, {"latency_against_capture": {"quantile": "p99", "at_most": "1.2x"}}]
    verdict = tell({"requests": [{"n": 400}], "gates": gates})
    assert {(f.verdict, f.why) for f in verdict.findings} == {(Judgement.INVALID, "the run replays no capture")}
    assert "answers" not in verdict.tables
