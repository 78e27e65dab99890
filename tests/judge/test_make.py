"""F17: `make` flattens exit codes, so that verdict.json is the authority."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.judge import verdict as verdicts
from harness.model import EXIT_CODE, Judgement

ROOT = Path(__file__).parent.parent.parent
RECIPE = """#!{python}
import sys
from pathlib import Path
from harness.judge import verdict
from harness.model import EXIT_CODE, Judgement, Verdict
judgement = Judgement("{judgement}")
Path("{told}").write_bytes(verdict.to_json(Verdict(judgement, EXIT_CODE[judgement], "a story")))
sys.exit(EXIT_CODE[judgement])
"""


@pytest.mark.parametrize("judgement", list(Judgement))
def test_make_keeps_pass_and_flattens_the_rest(judgement: Judgement, tmp_path: Path) -> None:
    """`make stage1` ends 0 on PASS and 2 on everything else; the class and its own code are in verdict.json."""
    told, harness = tmp_path / "verdict.json", tmp_path / "harness"
    harness.write_text(RECIPE.format(python=sys.executable, judgement=judgement, told=told))
    harness.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    made = subprocess.run(
        ["make", "-s", "-C", str(ROOT), "stage1", "engine=", f"harness={harness}"],
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert made.returncode == (0 if judgement == Judgement.PASS else 2), made.stderr
    verdict = verdicts.from_json(told.read_bytes())
    assert (verdict.verdict, verdict.exit_code) == (judgement, EXIT_CODE[judgement])
