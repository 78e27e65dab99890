from dataclasses import replace
from xml.etree import ElementTree

import junitparser

from harness.model import Judgement
from harness.report import junit


def read(verdict):
    """The document as a CI server reads it: the one suite in it."""
    (suite,) = junitparser.JUnitXml.fromstring(junit.render(verdict))
    return suite


def endings(verdict):
    return {case.name.rpartition(".")[2]: [(type(r), r.type) for r in case.result] for case in read(verdict)}


def test_each_judgement_has_its_ending(make, slow, memory, thin, blind):
    """FAIL is a failure of type slo, INVALID an error, INCONCLUSIVE a failure of its own type, PASS nothing."""
    assert endings(make(slow, thin, blind)) == {
        "p95_latency": [(junitparser.Failure, "slo")],
        "success": [(junitparser.Failure, "inconclusive")],
        "gpu_memory": [(junitparser.Error, "invalid")],
        "send_lag": [],
    }


def test_suite_counts(make, slow, thin, blind):
    """The suite's own counts agree with its cases, and nothing is skipped."""
    suite = read(make(slow, thin, blind))
    assert (suite.tests, suite.failures, suite.errors, suite.skipped) == (4, 2, 1, 0)


def test_names_are_unique(make, slow):
    """Two gates of one name are two cases, named stage.scenario.gate and numbered."""
    names = [case.name for case in read(make(slow, slow, slow, believed=()))]
    assert names == [f"stage1.business_mix.p95_latency{n}" for n in ("", "#2", "#3")]


def test_always_a_case(make):
    """A verdict without one finding is a suite with one case that is not green."""
    verdict = make(judgement=Judgement.INVALID, believed=())
    assert endings(verdict) == {"verdict": [(junitparser.Error, "invalid")]}


def test_a_worse_verdict_than_its_findings_is_not_green(make, memory):
    """When no finding says what the verdict says, the verdict is a case itself."""
    assert endings(make(memory, judgement=Judgement.INVALID))["verdict"] == [(junitparser.Error, "invalid")]


def test_figures_are_properties(make, slow):
    """A case carries n, bad and bound as programs read them, and its line in the scenario."""
    (case,) = read(make(slow, believed=()))
    properties = {p.name: p.value for p in case.child(junitparser.Properties)}
    assert properties["n"] == "1204" and properties["bad"] == "71" and properties["measured_s"] == "1.274"
    assert properties["line"] == "18" and "bound_s" not in properties


def test_warned_of_only(make, thin):
    """Where the policy lets an inconclusive gate pass, its case passes and says so: JUnit and exit code agree."""
    (case,) = read(make(thin, believed=(), exit_code=0))
    assert case.result == [] and case.system_out.startswith("INCONCLUSIVE")


def test_any_words_make_xml(make, slow):
    """Control characters and markup in a server's words never break the document."""
    document = junit.render(make(replace(slow, why="\x00\x1b[31m ]]> <&\"' \ud800 ü")))
    assert "ü" in ElementTree.fromstring(document).find(".//failure").text


def test_several_runs(make, slow):
    """A stage's verdict over several runs names each case stage.scenario.gate."""
    gates = [replace(slow, gate=f"{name}.p95_latency") for name in ("business_mix", "overload")]
    several = read(make(*gates, believed=(), provenance={"stage": 1, "runs": ["a", "b"], "scenario": "x.yaml"}))
    assert [case.name for case in several] == ["stage1.business_mix.p95_latency", "stage1.overload.p95_latency"]


def test_500_gates(make, slow):
    """500 gates are 500 cases in well under the 30 MB that servers read."""
    document = junit.render(make(*[replace(slow, gate=f"gate_{n}") for n in range(500)], believed=()))
    assert document.count("<testcase ") == 500 and len(document) < 1_000_000
