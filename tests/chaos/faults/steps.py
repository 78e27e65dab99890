"""The steps that every fault's test takes."""

from collections.abc import Mapping
from typing import Any

from harness.chaos.fault import Fault
from harness.targets.base import Target


def broken(fault: Fault, target: Target) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """State and evidence of a fault that was injected."""
    state = fault.resolve(target).state
    fault.inject(target, state)
    return state, fault.applied(target, state)


def mended(fault: Fault, target: Target, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Evidence of the undo, done twice as a guard might."""
    fault.undo(target, state)
    fault.undo(target, state)
    return fault.undone(target, state)
