import io

from rich.console import Console

from harness.judge import verdict as verdicts
from harness.model import Judgement
from harness.report import text

SHORT = {
    "n": 846,
    "failed": 6,
    "e2e": {"p50_s": 0.31, "p95_s": 0.61, "p99_s": float("inf")},
    "service": {"p50_s": 0.309, "p95_s": 0.609, "p99_s": None},
    "ttft": {"p50_s": 0.05, "p95_s": 0.1, "p99_s": float("nan")},
}
TABLES = {
    "by_class": {"short": SHORT, "long": {**SHORT, "n": 120}},
    "latency": {**SHORT, "send_lag": {"p50_s": 0.0001, "p95_s": 0.0002, "p99_s": 0.0006}},
    "outcomes": {"short": {"ok": 840, "timeout": 6}, "long": {"ok": 120}},
    "rejections": {"empty_body": {"expect": ["400"], "n": 24, "right": 20, "open": 0, "wrong": {"ok 200": 4}}},
    "tokens": {"n": 840, "planned_total": 90_000, "reported_total": 91_000, "difference_median": 1.0},
    "facts": {"windows": {"steady": [20.0, 140.0]}, "due": 1_071, "bad_share": 0.1013, "rate_per_s": 8.9},
    "not_applicable": [],
}

SERVED = {"captured_s": 0.11, "replayed_s": 0.132, "ratio": 1.2, "low": 1.1, "high": float("nan")}
LOST = {"captured": "2xx", "replayed": "5xx", "n": 2, "of": 90, "examples": [4, 8]}
REPLAY = {
    "replay": {"recording": "hour.jsonl", "order": "open", "gap_error_p99_s": 0.0004, "drift_share": 0.0001},
    "answers": {
        "2xx": {"2xx": {"n": 88, "examples": [0]}, "5xx": {"n": 2, "examples": [4, 8]}},
        "422": {"2xx": {"n": 7, "examples": [31, 40]}},
    },
    "changes": [
        {"change": "accepted_then_failed", "path": "/v1/chat/completions", "flaw": "", **LOST},
        {
            "change": "rejected_then_accepted",
            "path": "/v1/completions",
            "flaw": "refused_422",
            **LOST,
            "captured": "422",
        },
    ],
    "against_capture": {"chat": {"ttft": {"n": 90, **dict.fromkeys(("p50", "p95", "p99", "p99.9"), SERVED)}}},
    "over_time": [{"from_s": 0.0, "captured_per_s": 9.0, "replayed_refused_share": 0.25, "gpu_memory_share": None}],
}


def test_ends_with_the_verdict(make, slow, memory):
    """The last lines are the verdict and why, what to do, and what was not real."""
    verdict, to_do, real = text.render(make(slow, memory)).splitlines()[-3:]
    assert verdict.startswith("FAIL  p95_latency: 71 of 1,204 due requests")
    assert "do not release" in to_do and real.startswith("SIMULATED")


def test_simulation_is_said(make, slow, memory):
    """A run on a simulated engine says so in capitals; one on a real engine says it of simulated GPUs alone."""
    assert "SIMULATED: served by sim/h100-8b" in text.render(make(slow))
    real = {"engine": "vllm", "simulated": False}
    assert "SIMULATED" not in text.render(make(slow, provenance=real))
    assert "SIMULATED: the GPUs are" in text.render(make(slow, memory, provenance=real))


def test_gate_row_has_its_figures(make, slow, memory):
    """A gate's row has what was measured, the limit, the counts and its own verdict."""
    rows = text.render(make(slow, memory)).splitlines()
    row = next(line for line in rows if line.startswith("p95_latency"))
    assert all(word in row for word in ("steady", "1.274 s", "p95 e2e < 1.2 s", "1,204", "71", "60", "FAIL"))
    assert "82.03 %" in next(line for line in rows if line.startswith("gpu_memory"))


def test_what_to_do(make, thin):
    """An inconclusive verdict says what would settle it."""
    assert "Needs about 198 more" in text.render(make(thin))


def test_own_health_is_shown(make, slow):
    """What the harness says of itself is a table of its own."""
    assert "send_lag" in text.render(make(slow)).split("to be believed?")[1]


def test_tables_in_words(make, slow):
    """Measured tables carry units, both clocks, wrong answers with their status, and the share of bad requests."""
    told = text.render(make(slow, tables=TABLES))
    assert all(
        word in told for word in ("0.310 s", "50 ms", "ok 200: 4", "10.13 %", "timeout", "8.9/s", "e2e, from sent")
    )
    assert "Not applicable" not in told


def test_a_time_that_never_came(make, slow):
    """Infinite, missing and null times are one dash, so that a verdict reads the same from memory and from its file."""
    rows = [line for line in text.render(make(slow, tables={"latency": SHORT})).splitlines() if "from due" in line]
    assert [row.split()[-1] for row in rows] == ["-", "-"]


def test_a_gate_that_does_not_apply(make, slow):
    """A memory gate on a target without a GPU is told in a table of its own."""
    row = {"gate": "gpu_memory", "line": 21, "why": "the target has no GPU (gpu: none)"}
    assert (
        "the target has no GPU" in text.render(make(slow, tables={"not_applicable": [row]})).split("Not applicable")[1]
    )


def test_plain_and_narrow(make, slow, memory, thin, blind):
    """What is not for a terminal is ASCII, without escapes, in 100 columns."""
    told = text.render(make(slow, memory, thin, blind, tables=TABLES))
    assert told.isascii() and "\x1b" not in told
    assert max(map(len, told.splitlines())) <= 100


def test_not_a_terminal(make, slow):
    """A pipe gets the plain form, whole lines as they are."""
    pipe = io.StringIO()
    text.show(make(slow), Console(file=pipe, width=30))
    assert pipe.getvalue() == text.render(make(slow))


def test_terminal_has_colour_unless_refused(make, slow, monkeypatch):
    """A terminal gets colour; under NO_COLOR it gets the plain form."""
    screen = io.StringIO()
    text.show(make(slow), Console(file=screen, width=120, force_terminal=True, color_system="standard"))
    assert "\x1b[" in screen.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    plain = io.StringIO()
    text.show(make(slow), Console(file=plain, width=120, force_terminal=True))
    assert plain.getvalue() == text.render(make(slow))


def test_markup_is_not_obeyed(make, slow):
    """Square brackets from a server or a file are words, not colours."""
    told = text.render(make(slow, tables={"facts": {"said": "[red]no[/red] [/]"}}))
    assert "[red]no[/red] [/]" in told


def test_one_verdict_over_several_runs(make, slow, memory):
    """A stage's verdict names its scenario in each gate, and tells each scenario's tables."""
    both = {"business_mix": TABLES, "streaming_modes": {"facts": {"bad_share": 0.5}}}
    told = text.render(make(slow, memory, tables=both, provenance={"stage": 1, "runs": ["a", "b"]}))
    assert "business_mix: Latency by class" in told and "streaming_modes: Traffic" in told and "50 %" in told


def test_a_verdict_without_findings(make):
    """A run that was never judged is told as INVALID with its reason."""
    told = text.render(make(judgement=Judgement.INVALID, believed=(), provenance={"run": "r"}))
    assert "\nINVALID  nothing was judged\n" in told


def test_the_same_from_memory_and_from_its_file(make, slow, memory, thin, blind):
    """A verdict that was written and read again is told in the same words."""
    told = make(slow, memory, thin, blind, tables=TABLES)
    assert text.render(verdicts.from_json(verdicts.to_json(told))) == text.render(told)


def test_a_replay_beside_its_capture(make, slow):
    """Answers are a matrix; changes have examples, quantiles both times and their ratio with its interval."""
    told = text.render(make(slow, tables=REPLAY))
    rows = {line.split()[0]: line.split() for line in told.splitlines() if line.strip()}
    assert rows["422"] == ["422", "7"]
    assert rows["accepted"][-3:] == ["90", "4,", "8"]
    assert "refused_422" in told and "0.0001" not in told
    assert rows["chat"][:5] == ["chat", "ttft", "90", "captured", "0.110"]
    assert rows["ratio"][1:3] == ["1.2", "(1.1-?)"]
    assert "0.4 ms" in told and "25 %" in told and "9/s" in told
    assert max(map(len, told.splitlines())) <= 100
    assert text.render(verdicts.from_json(verdicts.to_json(make(slow, tables=REPLAY)))) == told
