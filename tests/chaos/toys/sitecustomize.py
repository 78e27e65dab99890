"""Puts the toy fault into the catalogue of every process that has this folder on its path: the product knows none."""

from toy import Toy

from harness.chaos import discipline, undo
from harness.chaos.catalogue import FAULTS

FAULTS["toy"] = Toy
discipline.STEP_LIMIT_S, undo.PAUSE_S = 1.0, 0.01
