"""Faults of processes on the local stack: replicas that die, crash, freeze or cannot start, a restarted gateway.

What a signal was sent to is no evidence; that is read from /proc, by pid and start, and from completions. supervisord
starts again what ended, so undoing a death means to have it started where it is not, and to wait until it serves.
"""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from harness import document, processes
from harness.chaos import permit
from harness.chaos.fault import Aim, Fault, Refused, Unproven
from harness.targets import url
from harness.targets.base import Target
from harness.targets.local import Process, Program, Stack, ticks, wait_for_answer
from harness.units import Period, spec

ONE_HEALTHY = "one_healthy"
APPLIED_LIMIT_S = 10.0
PERMITS = Path(".harness/crash_loops")
_ROUNDS = 5  # of looking for processes that were forked while the others were stopped


@spec
class _OfReplica(Fault):
    """Hits the replica that `choose` names, or the first that answers, if `leave` others do; it must answer again
    `within` that time of the undo."""

    choose: str = ONE_HEALTHY
    leave: Annotated[int, Field(ge=0)] = 1
    within_s: Period = 120.0

    def resolve(self, target: Target) -> Aim:
        stack = _stack(target)
        chosen, left = self._chosen(target, stack.replicas(target))
        tree = stack.tree(chosen)
        return Aim(
            targets=(f"{chosen.name} (pid {chosen.pid}, {len(tree)} processes)",),
            radius=f"{self._harm(chosen.name)}; healthy replicas left: {left}",
            undo=self._remedy(chosen.name),
            state={
                "stack": str(stack.state),
                "replica": chosen.name,
                "url": chosen.url,
                "pid": chosen.pid,
                "started": chosen.started,
                "tree": tree,
            },
        )

    def undo(self, target: Target, state: Mapping[str, Any]) -> None:
        """Have the replica started where it is not; a stack that was taken down stays down."""
        stack = Stack(Path(state["stack"]))
        if stack.is_up():
            stack.ensure(state["replica"])

    def undone(self, target: Target, state: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"ready": _ready(target, state, self.within_s)}

    def _chosen(self, target: Target, replicas: list[Program]) -> tuple[Program, int]:
        """Who is hit, and how many healthy ones are left. Raises Refused."""
        names = [one.name for one in replicas]
        if self.choose not in (ONE_HEALTHY, *names):
            raise Refused(f"there is no replica `{self.choose}`; {document.suggestion(self.choose, names)}")
        healthy = [one for one in replicas if one.pid and url.serves(target, one.url)]
        wanted = [one for one in healthy if self.choose in (ONE_HEALTHY, one.name)]
        left = len(healthy) - 1
        if wanted and left < self.leave:
            raise Refused(
                f"{len(healthy)} of {len(replicas)} replicas answer, so {left} would be left, not {self.leave}"
            )
        if not wanted:
            raise Refused(f"{self.choose}: {len(healthy)} of {len(replicas)} replicas answer, and it is not among them")
        return wanted[0], left

    @abstractmethod
    def _harm(self, name: str) -> str:
        """What becomes of the replica, in words."""

    def _remedy(self, name: str) -> str:
        return f"supervisorctl -c .stack/supervisord.conf start {name}"


@spec
class ReplicaKilled(_OfReplica):
    """The replica's whole process group and all that descends from it gets SIGKILL, as when its pod is gone."""

    def inject(self, target: Target, state: Mapping[str, Any]) -> None:
        _signal(_held_still(state), signal.SIGKILL)

    def applied(self, target: Target, state: Mapping[str, Any]) -> Mapping[str, Any]:
        _wait_gone(state["tree"])
        return {"replica": state["replica"], "gone": state["tree"]}

    def _harm(self, name: str) -> str:
        return f"all processes of {name} end, its requests in flight fail, and it starts afresh"


@spec
class ServerCrashed(_OfReplica):
    """The replica's server process alone gets SIGKILL. Its children live on as orphans until the undo ends them."""

    def inject(self, target: Target, state: Mapping[str, Any]) -> None:
        _signal([(state["pid"], state["started"])], signal.SIGKILL)

    def applied(self, target: Target, state: Mapping[str, Any]) -> Mapping[str, Any]:
        _wait_gone([(state["pid"], state["started"])])
        gone = {"pid": state["pid"], "started": state["started"]}
        return {"replica": state["replica"], "gone": gone, "orphans": _living(_orphans(state))}

    def undo(self, target: Target, state: Mapping[str, Any]) -> None:
        _signal(_orphans(state), signal.SIGKILL)
        super().undo(target, state)

    def undone(self, target: Target, state: Mapping[str, Any]) -> Mapping[str, Any]:
        _wait_gone(_orphans(state))
        return {**super().undone(target, state), "orphans_swept": _orphans(state)}

    def _harm(self, name: str) -> str:
        return f"the server of {name} ends without its children, its requests in flight fail, and it starts afresh"


@spec
class EngineFrozen(_OfReplica):
    """Every process of the replica stands still (SIGSTOP): it takes connections and answers nothing."""

    def inject(self, target: Target, state: Mapping[str, Any]) -> None:
        _held_still(state)

    def applied(self, target: Target, state: Mapping[str, Any]) -> Mapping[str, Any]:
        frozen = {str(pid): "T" for pid, _ in _living(state["tree"])}
        for _ in ticks(APPLIED_LIMIT_S):
            if (seen := _states(state)) == frozen and frozen:
                return {"replica": state["replica"], "states": seen}
        raise Unproven(f"the processes of {state['replica']} are not stopped: {_states(state)}")

    def undo(self, target: Target, state: Mapping[str, Any]) -> None:
        now = Stack(Path(state["stack"])).tree(_recorded(state))
        _signal([*state["tree"], *now], signal.SIGCONT)
        super().undo(target, state)

    def undone(self, target: Target, state: Mapping[str, Any]) -> Mapping[str, Any]:
        for _ in ticks(APPLIED_LIMIT_S):
            if "T" not in (seen := _states(state)).values():
                return {"states": seen, "ready": _ready(target, state, self.within_s)}
        raise Unproven(f"processes of {state['replica']} are still stopped: {_states(state)}")

    def _harm(self, name: str) -> str:
        return f"{name} answers nothing, and its requests in flight wait"

    def _remedy(self, name: str) -> str:
        return f"SIGCONT to every process of {name}"


@spec
class CrashLoop(_OfReplica):
    """The replica comes back bad `for` that long: each of its processes is killed as soon as it is there."""

    for_s: Period = 20.0

    def resolve(self, target: Target) -> Aim:
        aim = super().resolve(target)
        return replace(aim, state={**aim.state, "permit": str((PERMITS / secrets.token_hex(8)).resolve())})

    def inject(self, target: Target, state: Mapping[str, Any]) -> None:
        permit.grant(Path(state["permit"]))
        command = [sys.executable, "-m", "harness.chaos.crash_loop", "--stack", state["stack"]]
        command += ["--program", state["replica"], "--for", f"{self.for_s}s", "--permit", state["permit"]]
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)

    def applied(self, target: Target, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """The old process is gone, and a later one, too: supervisord waits before it tries again."""
        _wait_gone(state["tree"])
        stack = Stack(Path(state["stack"]))
        for _ in ticks(APPLIED_LIMIT_S):
            if (said := stack.said(state["replica"])) == "BACKOFF":
                return {"replica": state["replica"], "gone": state["tree"], "supervisord": said, "for_s": self.for_s}
        raise Unproven(f"{state['replica']} does not crash again: supervisord says {said}")

    def undo(self, target: Target, state: Mapping[str, Any]) -> None:
        permit.revoke(Path(state["permit"]))
        super().undo(target, state)

    def undone(self, target: Target, state: Mapping[str, Any]) -> Mapping[str, Any]:
        if Path(state["permit"]).exists():
            raise Unproven(f"what kills {state['replica']} still has its permit {state['permit']}")
        return super().undone(target, state)

    def _harm(self, name: str) -> str:
        return f"all processes of {name} end, and what is started after them ends at once for {self.for_s:g} s"

    def _remedy(self, name: str) -> str:
        return f"end harness.chaos.crash_loop, then {super()._remedy(name)}"


@spec
class GatewayRestarted(Fault):
    """The gateway gets SIGTERM and is started again: connections break, and nobody is served meanwhile."""

    within_s: Period = 60.0

    def resolve(self, target: Target) -> Aim:
        stack = _stack(target)
        gateway = stack.program("gateway", target.url)
        if not gateway.pid:
            raise Refused("the gateway does not run")
        return Aim(
            targets=(f"gateway (pid {gateway.pid})",),
            radius="every connection breaks, and nobody is served until the gateway is back",
            undo="supervisorctl -c .stack/supervisord.conf start gateway",
            state={
                "stack": str(stack.state),
                "replica": "gateway",
                "url": target.url,
                "pid": gateway.pid,
                "started": gateway.started,
            },
        )

    def inject(self, target: Target, state: Mapping[str, Any]) -> None:
        _signal([(state["pid"], state["started"])], signal.SIGTERM)

    def applied(self, target: Target, state: Mapping[str, Any]) -> Mapping[str, Any]:
        _wait_gone([(state["pid"], state["started"])])
        return {"gone": {"pid": state["pid"], "started": state["started"]}}

    def undo(self, target: Target, state: Mapping[str, Any]) -> None:
        stack = Stack(Path(state["stack"]))
        if stack.is_up():
            stack.ensure("gateway")

    def undone(self, target: Target, state: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"ready": _ready(target, state, self.within_s)}


# Processes --------------------------------------------------------------------------------------------------------


def _stack(target: Target) -> Stack:
    if target.kind != "local":
        raise Refused(f"the processes of a target of kind {target.kind} are out of reach")
    return Stack()


def _ready(target: Target, state: Mapping[str, Any], limit_s: float) -> list[dict[str, Any]]:
    """Who answers a completion again, and since when; empty when the stack itself is gone. Raises Unproven."""
    stack = Stack(Path(state["stack"]))
    back = wait_for_answer(target, stack, Program(state["replica"], state["url"], 0, 0), limit_s)
    if back is None and stack.is_up():
        raise Unproven(f"{state['replica']} answers no completion within {limit_s:g} s")
    if back is None:
        return [{"replica": state["replica"], "gone": "the stack is down"}]
    now, at_s = back
    return [{"replica": now.name, "pid": now.pid, "started": now.started, "at_s": at_s}]


def _held_still(state: Mapping[str, Any]) -> list[Process]:
    """Stop every process of a replica, with those that are forked meanwhile; all that were found, stopped."""
    stack, program = Stack(Path(state["stack"])), _recorded(state)
    found: list[Process] = [(pid, started) for pid, started in state["tree"]]
    for _ in range(_ROUNDS):
        _signal(found, signal.SIGSTOP)
        if not processes.lives(*program.process):
            break  # what bears its mark now may be what was started after it
        new = [one for one in stack.tree(program) if one not in found]
        if not new:
            break
        found += new
    return found


def _recorded(state: Mapping[str, Any]) -> Program:
    """The replica as it was when it was chosen."""
    return Program(state["replica"], state["url"], state["pid"], state["started"])


def _signal(whom: Iterable[Process], number: signal.Signals) -> None:
    """To each that still is who it was."""
    for pid, started in whom:
        if processes.lives(pid, started):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def _living(some: Iterable[Process]) -> list[Process]:
    return [(pid, started) for pid, started in some if processes.lives(pid, started)]


def _wait_gone(some: Iterable[Process]) -> None:
    """Raises Unproven when one of them is still alive at the limit."""
    left = _living(some)
    for _ in ticks(APPLIED_LIMIT_S):
        if not (left := _living(left)):
            return
    raise Unproven(f"still alive: {', '.join(f'pid {pid}' for pid, _ in left)}")


def _orphans(state: Mapping[str, Any]) -> list[Process]:
    return [(pid, started) for pid, started in state["tree"] if pid != state["pid"]]


def _states(state: Mapping[str, Any]) -> dict[str, str]:
    """What the kernel says of each living process: T is stopped."""
    seen = {}
    for pid, _ in _living(state["tree"]):
        with contextlib.suppress(OSError):
            seen[str(pid)] = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    return seen
