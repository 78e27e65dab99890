"""Golden cases: a directory each, the log's story in, the verdict out.

Most come from a complaint about another tool; the first line of `log.yaml` names it. `verdict.yaml` holds what must be
there: figures are compared with what verdict.json says, sentences by the fragments given.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml

from harness.judge import verdict as verdicts
from harness.model import Judgement, Verdict

GOLDEN = Path(__file__).parent.parent / "golden"
CASES = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())


def told_in(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = yaml.load(path.read_text(), yaml.CSafeLoader)  # a tenth of the time of the one in Python
    return value


def wound(run_dir: Path, damage: dict[str, Any]) -> None:
    path = run_dir / damage["file"]
    data = bytearray(path.read_bytes())
    if "cut" in damage:
        del data[-damage["cut"] :]
    if "flip" in damage:
        data[damage["flip"]] ^= 1
    path.write_bytes(data)


def assert_holds(expected: Any, found: Any, where: str) -> None:
    """Every key that is expected is there with that value; text is a fragment, a float is within a millionth."""
    if isinstance(expected, dict):
        for key, value in expected.items():
            assert key in found, f"{where} has no {key}: {found}"
            assert_holds(value, found[key], f"{where}.{key}")
    elif isinstance(expected, str):
        assert expected in str(found), f"{where} is {found!r}"
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-5), where
    else:
        assert found == expected, f"{where} is {found!r}"


@pytest.mark.parametrize("case", CASES)
def test_golden(
    case: str,
    tmp_path: Path,
    lay: Callable[[Path, dict[str, Any]], None],
    judge_dir: Callable[[Path, dict[str, Any]], Verdict],
) -> None:
    """The log of this case gives the verdict of this case."""
    story, expected = told_in(GOLDEN / case / "log.yaml"), told_in(GOLDEN / case / "verdict.yaml")
    lay(tmp_path, story)
    if "damage" in story:
        wound(tmp_path, story["damage"])
    written = verdicts.to_json(judge_dir(tmp_path, story))
    told = orjson.loads(written)
    doubted = sorted(finding["id"] for finding in told["believed"] if finding["verdict"] != Judgement.PASS)
    assert doubted == sorted(expected.pop("doubted", [])), told["believed"]
    gates = {gate["id"]: gate for gate in told["gates"]}
    assert_holds(expected.pop("gates", {}), gates, "gates")
    assert_holds(expected, told, "verdict")
    assert b"NaN" not in written


def test_there_are_cases() -> None:
    """The directory of golden cases is found and is not empty."""
    assert len(CASES) > 30
