import io

from rich.console import Console

from harness.model import Judgement
from harness.report import text

TABLES = {
    "by_class": {
        "short": {"n": 846, "e2e": {"p50_s": 0.31, "p95_s": 0.61}, "ttft": {"p50_s": 0.05, "p95_s": 0.1}},
        "long": {"n": 120, "e2e": {"p50_s": 2.9, "p95_s": float("inf")}, "ttft": {"p50_s": 0.5, "p95_s": 0.9}},
    },
    "rejections": {"empty_body": {"expect": ["400"], "n": 24, "right": 20, "open": 0, "wrong": {"ok 200": 4}}},
    "outcomes": {"short": {"ok": 840, "timeout": 6}, "long": {"ok": 120}},
    "facts": {"bad_share": 0.1013},
}


def test_first_line_is_the_verdict(make, slow, memory):
    """The first words are the verdict and why."""
    assert text.render(make(slow, memory)).strip().startswith("FAIL  p95_latency: 71 of 1,204 due requests")


def test_simulation_is_said(make, slow):
    """A run on a simulated engine says so in capitals before any figure; a real one does not."""
    assert "SIMULATED" in text.render(make(slow)).split("Gates")[0]
    assert "SIMULATED" not in text.render(make(slow, provenance={"engine": "vllm", "simulated": False}))


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
    """Measured tables carry units, wrong answers with their status, and `never` for what did not end."""
    told = text.render(make(slow, tables=TABLES))
    assert all(word in told for word in ("2.900 s", "50 ms", "never", "ok 200: 4", "10.13 %", "timeout"))


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
    assert "By class (business_mix)" in told and "Facts (streaming_modes)" in told and "50 %" in told


def test_a_verdict_without_findings(make):
    """A run that was never judged is told as INVALID with its reason."""
    told = text.render(make(judgement=Judgement.INVALID, believed=(), provenance={"run": "r"}))
    assert told.strip().startswith("INVALID  nothing was judged")
