import io
import math

import numpy as np
import pytest
from rich.console import Console

from harness import plan_file
from harness.judge.counts import Latency
from harness.judge.gates import Gate
from harness.log import RECORD, Log, ObservationLog
from harness.model import Event, Observation, Outcome, Reading, Request, Window
from harness.plan_file import PlanHeader
from harness.report import panel
from harness.report.panel import LivePanel, LiveState

HEADER = PlanHeader("s", 0, 400, (Window("warm_up", 0, 10), Window("steady", 10, 30)), 30.0)
GATE = Gate("p95_latency", 3, Latency(quantile=0.95, below_s=1.2))
REQUESTS = [
    Request(n, n / 10, "short" if n % 2 else "long", expect=("400",) if n % 10 == 5 else ("2xx",)) for n in range(300)
]


def records(*seen):
    """Observations (index, latency or None for a failure) as the block reader yields them."""
    rows = np.zeros(len(seen), dtype=RECORD)
    for row, (index, latency_s) in zip(rows, seen, strict=True):
        row["index"], row["due_s"] = index, index / 10
        row["ended_s"] = index / 10 + (latency_s or 0.1)
        row["outcome"] = Outcome.TIMEOUT if latency_s is None else Outcome.OK
    return rows


@pytest.fixture
def begun():
    return LiveState.begin(HEADER, [GATE]).with_plan(REQUESTS)


def test_counts_like_the_gate(begun):
    """Bad are slow and failed good requests that were due in the gate's window; nothing else is counted."""
    state = begun.advance(20.0, [records((50, 9.0), (105, 9.0), (110, 1.5), (111, 1.1), (112, None), (114, 0.2))])
    assert "bad 2 of 0 allowed in 4" in panel.line(state) and "P95 never" in panel.line(state)


def test_adds_up(begun):
    """Blocks that come one by one give what they give at once."""
    seen = [(n, 0.2 if n % 30 else 2.0) for n in range(100, 200) if n % 10 != 5]
    at_once = begun.advance(25.0, [records(*seen)])
    step_by_step = begun
    for one in seen:
        step_by_step = step_by_step.advance(25.0, [records(one)])
    assert panel.line(step_by_step) == panel.line(at_once)
    assert "P95 0.200 s" in panel.line(at_once)


def test_a_class_of_its_own():
    """A gate of one class counts that class alone."""
    gate = Gate("p95_latency", 3, Latency(quantile=0.95, below_s=1.2, class_="short"))
    state = LiveState.begin(HEADER, [gate]).with_plan(REQUESTS).advance(20.0, [records((110, 9.0), (111, 0.3))])
    assert "bad 0 of 0 allowed in 1" in panel.line(state)


def test_the_bound_needs_59_answers(begun):
    """The upper bound of a P95 is not known of 58 answers, and is of 59."""
    some = [n for n in range(100, 200) if n % 10 != 5]
    assert "bound ? s" in panel.line(begun.advance(25.0, [records(*[(n, 0.2) for n in some[:58]])]))
    assert "bound 0.200 s" in panel.line(begun.advance(25.0, [records(*[(n, 0.2) for n in some[:59]])]))


@pytest.fixture
def extendable():
    """A run whose plan holds 10 s more than its steady state."""
    header = PlanHeader("s", 0, 300, (Window("steady", 0, 20), Window("extension", 20, 30)), 30.0)
    return LiveState.begin(header, [GATE]).with_plan(REQUESTS)


def test_a_run_that_may_be_extended_has_half_the_doubt(extendable):
    """Such a run is looked at twice, so its bound has half the doubt: 59 answers are too few, 72 are enough."""
    some = [(n, 0.2) for n in range(100) if n % 10 != 5]
    assert extendable.promise.confidence == pytest.approx(0.975)
    assert "bound ? s" in panel.line(extendable.advance(12.0, [records(*some[:71])]))
    assert "bound 0.200 s" in panel.line(extendable.advance(12.0, [records(*some[:72])]))


@pytest.mark.parametrize(
    ("kind", "told", "bad"), [("extended", "steady, 0:08 left", 2), ("decided", "draining, 0:00 left", 1)]
)
def test_an_extension_counts_once_it_is_one(extendable, kind, told, bad):
    """The extension is neither awaited nor counted until the run is extended, though its first answers are there."""
    state = extendable.advance(21.5, [records((100, 2.0), (101, 0.2), (202, 2.0))])
    assert panel.line(state).startswith("extension, 0:00 left") and "bad 1 of" in panel.line(state)
    state = state.advance(22.0, entries=[Event(22.0, kind)])
    assert panel.line(state).startswith(told) and f"bad {bad} of" in panel.line(state)


def test_no_latency_gate():
    """A scenario without one is shown without a P95."""
    state = LiveState.begin(HEADER, []).with_plan(REQUESTS).advance(20.0, [records((110, 1.0))])
    assert "P95" not in panel.line(state) and "steady, 0:10 left" in panel.line(state)


@pytest.mark.parametrize(
    ("now_s", "told"), [(-0.5, "starting, 0:30"), (0, "warm-up, 0:30"), (10, "steady, 0:20"), (31, "draining, 0:00")]
)
def test_phase(begun, now_s, told):
    """The phase is the window at hand."""
    assert panel.line(begun.advance(now_s)).startswith(f"{told} left")


def test_rates_are_of_the_same_seconds(begun):
    """Achieved and planned are over the span of the players' last readings, summed over workers."""
    sent = [Reading(t, "player.sent", 4.0 * t, {"worker": w}) for t in range(5, 20) for w in ("0", "1")]
    state = begun.advance(20.0, entries=sent)
    assert state.rates_per_s == pytest.approx((8.0, 10.0))
    assert "rate 8.0 of 10.0/s" in panel.line(state)
    assert math.isnan(begun.rates_per_s[0]) and "rate ? of ?/s" in panel.line(begun)


def test_memory_and_flight(begun):
    """GPU memory is 1 - free/total of each device; requests in flight are summed over workers."""
    state = begun.advance(
        20.0,
        entries=[
            Reading(19, "gpu.free_bytes", 18.0, {"gpu": "GPU-0"}),
            Reading(19, "gpu.total_bytes", 100.0, {"gpu": "GPU-0"}),
            Reading(19, "player.in_flight", 7, {"worker": "0"}),
            Reading(19, "player.in_flight", 5, {"worker": "1"}),
        ],
    )
    assert "GPU-0 82.0%" in panel.line(state) and "in flight 12" in panel.line(state)


def test_last_event(begun):
    """The latest event by its own time is shown, whichever log it was read from."""
    state = begun.advance(20.0, entries=[Event(15, "error_sample", "http_5xx"), Event(12, "started", "player")])
    assert panel.line(state).endswith("last error_sample http_5xx")


def test_render_and_line_agree(begun):
    """The panel holds every figure of the line."""
    state = begun.advance(20.0, [records((110, 1.0))], [Event(15, "started", "player")])
    paper = io.StringIO()
    Console(file=paper, width=100).print(panel.render(state))
    assert all(part in paper.getvalue() for part in ("steady, 0:10 left", "1.000 s", "started player"))


def test_follows_a_run_directory(tmp_path):
    """Off a terminal there is one plain line every five seconds, of what the run's files hold by then."""
    lines = plan_file.lines(HEADER, REQUESTS)
    (tmp_path / "plan.jsonl").write_bytes(b"".join(lines))
    log, observations = Log(tmp_path / "log.player-0.jsonl"), ObservationLog(tmp_path / "log.p.bin")
    pipe = io.StringIO()
    with LivePanel(LiveState.begin(HEADER, [GATE]), Console(file=pipe, width=40)) as shown:
        shown.show(-0.5, tmp_path)
        log.event(Event(11.0, "started", "player"))
        observations.append(Observation(110, 11.0, sent_s=11.0, ended_s=13.5, outcome=Outcome.OK))
        observations.flush()
        shown.show(4.4, tmp_path)
        shown.show(14.0, tmp_path)
    first, second = pipe.getvalue().splitlines()
    assert first.startswith("starting") and "in 0" in first
    assert "bad 1 of 0 allowed in 1" in second and second.endswith("started player")


def test_in_place_on_a_terminal(tmp_path):
    """On a terminal the panel is drawn in place and leaves nothing behind but its last erasure."""
    (tmp_path / "plan.jsonl").write_bytes(b"".join(plan_file.lines(HEADER, REQUESTS)))
    screen = io.StringIO()
    console = Console(file=screen, width=100, force_terminal=True, legacy_windows=False, _environ={"TERM": "xterm"})
    with LivePanel(LiveState.begin(HEADER, [GATE]), console) as shown:
        shown.show(12.0, tmp_path)
        assert "steady, 0:18 left" in screen.getvalue()
    assert screen.getvalue().rstrip().endswith("\x1b[2K") or "\x1b[?25h" in screen.getvalue()
