"""The plan as a file: what is written is read back, and another file is refused."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import plan_file
from harness.model import Request, Window
from harness.plan_file import PlanHeader


@given(
    request=st.builds(
        Request,
        index=st.integers(0, 2**31),
        due_s=st.floats(0, 1e6).map(lambda value: round(value, 9)),
        class_name=st.text(min_size=1, max_size=20),
        path=st.text(min_size=1, max_size=40),
        text=st.tuples(st.integers(0, 2**40), st.integers(0, 2**40)),
        prompt_tokens=st.integers(0, 2**31),
        max_tokens=st.integers(0, 2**31),
        stream=st.booleans(),
        flaw=st.text(max_size=20),
        expect=st.lists(st.sampled_from(["2xx", "400", "422", "429"]), min_size=1, max_size=3).map(tuple),
        give_up_s=st.none() | st.floats(0, 100),
        headers=st.lists(st.tuples(st.text(max_size=9), st.text(max_size=9)), max_size=3).map(tuple),
    )
)
def test_a_plan_line_is_read_back(request: Request) -> None:
    """A request written as a line of the plan is the same request when read."""
    header = PlanHeader("story", 0, 1, (), 30.0)
    _, line = plan_file.lines(header, [request])
    assert plan_file.read_request(line) == request


def test_a_plan_is_read_back(tmp_path: Path) -> None:
    """The header and every request come back, in order."""
    header = PlanHeader("story", 7, 50, (Window("steady", 0.0, 50.0),), 30.0)
    requests = [Request(index, float(index), "short", stream=True) for index in range(50)]
    (tmp_path / "plan.jsonl").write_bytes(b"".join(plan_file.lines(header, requests)))
    found, again = plan_file.read(tmp_path / "plan.jsonl")
    assert (found, list(again)) == (header, requests)


def test_another_file_is_no_plan(tmp_path: Path) -> None:
    """A file of another version, or of another kind, is refused as a plan."""
    (tmp_path / "plan.jsonl").write_bytes(b'{"plan": 2}\n')
    with pytest.raises(ValueError, match="not a plan"):
        plan_file.read(tmp_path / "plan.jsonl")
