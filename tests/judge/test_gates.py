"""What a scenario may write under each gate, and what is refused."""

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from harness.judge.gates import GATES, unknown_names
from harness.judge.gpu import GpuMemory


def read(name: str, value: Any) -> Any:
    return TypeAdapter(GATES[name]).validate_python(value)


@pytest.mark.parametrize(
    ("name", "quantile"),
    [
        ("p50_latency", 0.5),
        ("p90_latency", 0.9),
        ("p95_latency", 0.95),
        ("p99_latency", 0.99),
        ("p99.9_latency", 0.999),
    ],
)
def test_the_quantile_is_in_the_name(name: str, quantile: float) -> None:
    """A latency gate knows its quantile from its key, and reads response latency of the steady state unless told."""
    spec = read(name, {"below": "1.2s"})
    assert (spec.quantile, spec.below_s, spec.of, spec.window, spec.classes) == (quantile, 1.2, "e2e", "steady", ())


def test_a_quantile_may_be_written() -> None:
    """Any other quantile is written out; a class is one name or several."""
    spec = read("latency", {"quantile": "97%", "below": "300ms", "of": "ttft", "class": ["short", "long"]})
    assert (spec.quantile, spec.below_s, spec.of, spec.classes) == (0.97, 0.3, "ttft", ("short", "long"))
    assert read("success", {"at_least": "99.5%", "class": "short"}).classes == ("short",)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("p95_latency", {"below": 1.2}, "is not a time"),
        ("p95_latency", {}, "below"),
        ("p95_latency", {"below": "1.2s", "quantile": "97%"}, "quantile"),
        ("p95_latency", {"below": "1.2s", "of": "e2e_s"}, "ttft"),
        ("success", {"at_least": 0.995}, "is not a share"),
        ("success", {"at_least": "99%", "class": []}, "names no class"),
        ("goodput", {"at_least": "95%"}, "goodput needs a limit"),
        ("throughput", {}, "throughput needs one limit"),
        ("throughput", {"at_least": "1/s", "tokens": "1/s"}, "throughput needs one limit"),
        ("rejections", "mostly", "there is one: exact"),
        ("gpu_memory", {"below": "85%", "stat": "mean"}, "max"),
        ("same_answers", {"other_shape": "few"}, "neither a count such as 0 nor a share such as 5%"),
        ("latency_against_capture", {"quantile": "p99", "at_most": 1.2}, "is not a multiple"),
        ("latency_against_capture", {"quantile": "99%", "at_most": "1.2x"}, "is not a quantile"),
        ("latency_against_capture", {"quantile": "p99", "at_most": "1.2x", "of": "tpot"}, "itl"),
    ],
)
def test_refused_gates(name: str, value: Any, words: str) -> None:
    """A wrong unit, a bare number, an unknown key or a missing limit is refused with words that say which."""
    with pytest.raises(ValidationError, match=words):
        read(name, value)


def test_every_gate_has_a_schema() -> None:
    """Editors get a schema for each gate, spelled as users write it."""
    for name, kind in GATES.items():
        schema = TypeAdapter(kind).json_schema()
        assert "const" in schema or not any(key.endswith("_s") for key in schema["properties"]), name


def test_unknown_names_are_told_with_the_nearest() -> None:
    """A class or window that is not there is named together with what may have been meant."""
    spec = read("p95_latency", {"below": "1s", "class": "medum"})
    assert unknown_names(spec, ["short", "medium"], ["steady"]) == "there is no class `medum`; did you mean `medium`?"
    assert unknown_names(spec, ["x"], ["steady"]) == "there is no class `medum`; there are: x"
    assert unknown_names(spec, ["medum"], ["warm_up"]).startswith("there is no window `steady`")
    assert unknown_names(spec, ["medum"], ["steady"]) == ""


def test_a_memory_gate_that_cannot_hold_is_refused() -> None:
    """F22: an engine that takes 92 % of the card at its start cannot stay below 85 %; one that takes 80 % can."""
    gate = GpuMemory(below=0.85)
    assert "takes 92 %" in gate.refusal(0.92)
    assert "82 % or less" in gate.refusal(0.85)
    assert gate.refusal(0.80) == ""
