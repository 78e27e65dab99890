"""F17: `make` flattens exit codes, so that verdict.json is the authority."""

import os
import subprocess
from pathlib import Path

import pytest

from harness.judge import verdict as verdicts
from harness.model import EXIT_CODE, Judgement, Verdict

ROOT = Path(__file__).parent.parent.parent
RECIPE = """#!/bin/sh
cp {judged} {told}
exit {code}
"""


@pytest.mark.parametrize("judgement", list(Judgement))
def test_make_keeps_pass_and_flattens_the_rest(judgement: Judgement, tmp_path: Path) -> None:
    """`make stage1` ends 0 on PASS and 2 on everything else; the class and its own code are in verdict.json."""
    told, judged, harness = tmp_path / "verdict.json", tmp_path / "judged.json", tmp_path / "harness"
    judged.write_bytes(verdicts.to_json(Verdict(judgement, EXIT_CODE[judgement], "a story")))
    harness.write_text(RECIPE.format(judged=judged, told=told, code=EXIT_CODE[judgement]))
    harness.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    made = subprocess.run(
        ["make", "-s", "-C", str(ROOT), "stage1", "engine=", f"harness={harness}"],
        env=environment,
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert made.returncode == (0 if judgement == Judgement.PASS else 2), made.stderr
    verdict = verdicts.from_json(told.read_bytes())
    assert (verdict.verdict, verdict.exit_code) == (judgement, EXIT_CODE[judgement])
