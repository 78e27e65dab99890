"""The faults by name: a new one is a class in `faults/` and a line here."""

from harness.chaos.fault import Fault

FAULTS: dict[str, type[Fault]] = {}
