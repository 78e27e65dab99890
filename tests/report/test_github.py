from dataclasses import replace

from harness.model import Judgement
from harness.report import github


def test_points_at_the_line(make, slow, memory):
    """A failed gate is an error at its line of the scenario; a passed one is nothing."""
    assert github.annotations(make(slow, memory)) == (
        "::error file=scenarios/load/business_mix.yaml,line=18,title=FAIL p95_latency::"
        "71 of 1,204 due requests were slow or failed; 60 are allowed"
    )


def test_nothing_to_say(make, memory):
    """A verdict that passed has no annotations."""
    assert github.annotations(make(memory)) == ""


def test_invalid_first_and_ten_at_most(make, slow, blind):
    """Of 500 broken gates ten lines are told: INVALID first, the last one a count of the rest."""
    lines = github.annotations(make(*[slow] * 499, blind)).splitlines()
    assert len(lines) == 10
    assert "title=INVALID gpu_memory" in lines[0] and "title=FAIL" in lines[1]
    assert lines[-1].startswith("::error::491 more gates")


def test_ten_broken_gates_are_all_told(make, slow):
    """Exactly ten need no count."""
    assert all("title=FAIL" in line for line in github.annotations(make(*[slow] * 10)).splitlines())


def test_words_cannot_give_commands(make, slow):
    """New lines, percent signs, commas and colons are escaped by the rules of workflow commands."""
    nasty = replace(slow, gate="a,b:c", why="100%\r\n::set-output name=x::y")
    (line,) = github.annotations(make(nasty)).splitlines()
    assert line.endswith("title=FAIL a%2Cb%3Ac::100%25%0D%0A::set-output name=x::y")


def test_a_warning_is_a_warning(make, thin):
    """An inconclusive gate that the policy lets pass is a warning; otherwise it is an error."""
    assert github.annotations(make(thin, exit_code=0)).startswith("::warning ")
    assert github.annotations(make(thin)).startswith("::error ")


def test_own_trouble_has_no_line(make, memory):
    """What no line of the scenario caused names the verdict alone."""
    told = github.annotations(make(memory, judgement=Judgement.INVALID))
    assert told == "::error title=INVALID verdict::nothing was judged"
