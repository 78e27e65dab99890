"""python -m harness.chaos RUN_DIR: the child of a run that breaks the stack when the scenario says so."""

import sys
from pathlib import Path

from harness.chaos.experiment import play

if __name__ == "__main__":
    sys.exit(play(Path(sys.argv[1])))
