"""What every fault is: naive. It finds its targets, breaks them, proves it, mends them, proves that.

A fault knows nothing of guards, logs, time limits or runs: `discipline` puts those around every fault, in one place.
It keeps no state of its own between the steps: what `resolve` found is a JSON value, written down before anything is
broken, and all later steps work from that alone, in whatever process they are called. So the guard, or `harness heal`
after a power loss, can undo what another process began.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.targets.base import Target


class Refused(Exception):  # noqa: N818 -- an outcome, not an error
    """The fault may not or cannot be injected here: no target, too few would be left, not allowed. One sentence."""


class Absent(Refused):
    """The target has nothing of the kind that the fault breaks, a GPU for one: the fault is no matter there."""


class Unproven(Exception):  # noqa: N818 -- an outcome, not an error
    """There is no evidence that the fault was applied, or that it was undone. One sentence that says what was seen."""


@dataclass(frozen=True, slots=True)
class Aim:
    """What a fault would do, found before it does it. `state` is all that later steps need, as JSON.

    `targets` are what is hit, in words for the user (`engine-1 (pid 4711)`), `radius` what its users would feel, `undo`
    the command or deed that takes it back, also in words.
    """

    targets: tuple[str, ...]
    radius: str
    undo: str
    state: Mapping[str, Any] = field(default_factory=dict)


class Fault(ABC):
    """One way to break a stack. Subclasses are frozen specs (`harness.units.spec`) of what a user may choose.

    All steps may raise OSError when the stack does not answer. `undo` is idempotent, and right in any state: before,
    during and after `inject`, and when the target is long gone.
    """

    @abstractmethod
    def resolve(self, target: Target) -> Aim:
        """Find what would be hit, and change nothing. Raises Refused."""

    @property
    def inject_limit_s(self) -> float:
        """How long `inject` may take at most; a fault that comes on slowly has more."""
        return 30.0

    @abstractmethod
    def inject(self, target: Target, state: Mapping[str, Any]) -> None:
        """Break it."""

    @abstractmethod
    def applied(self, target: Target, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Evidence that it is broken, by another way than the one that broke it. Raises Unproven; waits a few seconds
        at most."""

    @abstractmethod
    def undo(self, target: Target, state: Mapping[str, Any]) -> None:
        """Take it back."""

    @abstractmethod
    def undone(self, target: Target, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Evidence that nothing of it is left. Raises Unproven; waits as long as mending takes, within its limit."""
