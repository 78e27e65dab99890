"""Faults of a GPU's memory: a neighbour that leaks.

The leak is `harness.chaos.leak` in a process of its own; what it says of itself is no evidence. That is read from the
device's counters, by NVML or from the exporter of the simulated device. Only a device of this machine can be leaked on.
"""

import json
import os
import queue
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from harness import sources
from harness.chaos import permit
from harness.chaos.fault import Absent, Aim, Fault, Refused, Unproven
from harness.sources import Dcgm, Matchers, Nvml, Prometheus, Unwatchable
from harness.targets.base import Target
from harness.units import Part, Period, Share, Size, spec

GIB = 2**30
PERMITS = Path(".harness/leaks")
SIMULATED_DEVICES = Path(".stack/gpu")  # where the local stack has them
PROVEN = 0.90  # of the aim must be gone from the device's free memory
BACK_WITHIN = 0.01  # of the device, after the leak
START_LIMIT_S = 30.0  # driver and context, on a busy machine
APPLIED_LIMIT_S = 5.0
UNDONE_LIMIT_S = 30.0
_POLL_S = 0.1
_LOOK_BACK_S = 150  # holds two samples of a Prometheus that scrapes once a minute


@spec
class GpuLeak(Fault):
    """Another process on the GPU takes `share` of its memory, a `step` at a time, and holds it until the fault ends.

    With `grows_to` it goes on to that share when there is room again: a replica that dies is robbed of its memory and
    cannot come back. Neither takes what would leave less than `floor` of the device free. `ttl` ends the leak whatever
    else happens, so it must be longer than the experiment holds. `device` is a UUID, or an index; the first by default.
    """

    share: Part = 0.10
    grows_to: Part | None = None
    step_bytes: Annotated[Size, Field(gt=0)] = 512 * 2**20
    every_s: Period = 1.0
    floor: Share = 0.05
    ttl_s: Period = 120.0
    device: int | str | None = None

    def __post_init__(self) -> None:
        if self.grows_to is not None and self.grows_to <= self.share:
            raise ValueError("grows_to is no more than share: nothing would grow")

    def resolve(self, target: Target) -> Aim:
        if target.gpu == "none":
            raise Absent("the target has no GPU (gpu: none)")
        device = _device(target, self.device)
        try:
            free_bytes, total_bytes = _memory(target, device)
        except Unwatchable as error:
            raise Refused(f"{device} cannot be leaked on from this machine: {error}") from None
        aim_bytes = int(self.share * total_bytes)
        self._check(device, free_bytes, total_bytes)
        state = {
            "device": device,
            "simulated": str(_simulated_file(device)) if target.gpu == "simulated" else None,
            "total_bytes": total_bytes,
            "baseline_free_bytes": free_bytes,
            "aim_bytes": aim_bytes,
            "most_bytes": max(aim_bytes, int((self.grows_to or 0.0) * total_bytes)),
            "floor_bytes": int(self.floor * total_bytes),
            "permit": str((PERMITS / secrets.token_hex(8)).resolve()),
        }
        return Aim(
            targets=(f"{'simulated ' if state['simulated'] else ''}{device}",),
            radius=self._radius(device, free_bytes, total_bytes),
            undo=f"end the process that {state['permit']} names; after {self.ttl_s:g} s it ends by itself",
            state=state,
        )

    @property
    def inject_limit_s(self) -> float:
        return START_LIMIT_S + self.ttl_s

    def inject(self, target: Target, state: Mapping[str, Any]) -> None:
        """Returns when the leak says that it holds what it aims at, or nearly; raises Unproven when it cannot."""
        permit.grant(Path(state["permit"]))
        said = _started(self._command(state))
        deadline_s = time.monotonic() + START_LIMIT_S + 2 * self._ramp_s(state["total_bytes"])
        line: dict[str, Any] = {}
        while line.get("held_bytes", 0) < state["aim_bytes"]:
            try:
                line = said.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                raise Unproven(f"the leak is not there in time; it last said {line}") from None
            if why := line.get("failed") or line.get("ended"):
                raise Unproven(f"the leak ended before it was whole: {why}")
            if why := line.get("waiting") or line.get("stopped"):
                if line["held_bytes"] >= PROVEN * state["aim_bytes"]:
                    return
                raise Unproven(f"the leak has {_gib(line['held_bytes'])} of {_gib(state['aim_bytes'])}: {why}")

    def applied(self, target: Target, state: Mapping[str, Any]) -> Mapping[str, Any]:
        wanted_bytes = PROVEN * state["aim_bytes"]
        most_bytes = int(state["baseline_free_bytes"] - wanted_bytes)
        free_bytes = _wait(target, state["device"], lambda free: free <= most_bytes, APPLIED_LIMIT_S)
        if free_bytes > most_bytes:
            fallen_bytes = state["baseline_free_bytes"] - free_bytes
            raise Unproven(
                f"free memory of {state['device']} fell by {_gib(fallen_bytes)}, not by {_gib(wanted_bytes)} or more"
            )
        return self._evidence(state, free_bytes)

    def undo(self, target: Target, state: Mapping[str, Any]) -> None:
        permit.revoke(Path(state["permit"]))

    def undone(self, target: Target, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """The process is gone, and as much is free as before, to within 1 % of the device; more may be free."""
        if Path(state["permit"]).exists():
            raise Unproven(f"the leak still has its permit {state['permit']}")
        least_bytes = state["baseline_free_bytes"] - BACK_WITHIN * state["total_bytes"]
        free_bytes = _wait(target, state["device"], lambda free: free >= least_bytes, UNDONE_LIMIT_S)
        if free_bytes < least_bytes:
            raise Unproven(
                f"{_gib(free_bytes)} of {state['device']} are free, {_gib(state['baseline_free_bytes'])} were before "
                "the leak: the leak has ended, so somebody else holds the rest"
            )
        return self._evidence(state, free_bytes)

    def _check(self, device: str, free_bytes: int, total_bytes: int) -> None:
        """Raises Refused when the leak could not be whole, or not long enough."""
        room_bytes = free_bytes - self.floor * total_bytes
        if self.share * total_bytes > room_bytes:
            most = max(0.0, room_bytes) / total_bytes
            raise Refused(
                f"{device} has {_gib(free_bytes)} of {_gib(total_bytes)} free: with a floor of {self.floor:.1%}, "
                f"at most {most:.1%} can be leaked, not {self.share:.1%}"
            )
        if self.ttl_s <= self._ramp_s(total_bytes):
            raise Refused(
                f"the leak would be whole after {self._ramp_s(total_bytes):.0f} s, but ends after {self.ttl_s:g} s: "
                "make `step` larger, `every` shorter or `ttl` longer"
            )

    def _ramp_s(self, total_bytes: int) -> float:
        """How long the leak takes to be whole."""
        return (self.share * total_bytes // self.step_bytes) * self.every_s

    def _radius(self, device: str, free_bytes: int, total_bytes: int) -> str:
        grown = f", then on to {self.grows_to:.1%} as room is made" if self.grows_to else ""
        return (
            f"{self.share:.1%} of the memory of {device} ({_gib(self.share * total_bytes)} of {_gib(total_bytes)}, "
            f"{_gib(free_bytes)} are free) in {self._ramp_s(total_bytes):.0f} s{grown}: what needs more memory there, "
            "or starts there, may fail"
        )

    def _command(self, state: Mapping[str, Any]) -> list[str]:
        command = [sys.executable, "-m", "harness.chaos.leak", "--device", state["device"]]
        command += ["--aim", f"{state['most_bytes']}B", "--floor", f"{state['floor_bytes']}B"]
        command += ["--step", f"{self.step_bytes}B", "--every", f"{self.every_s:f}s", "--ttl", f"{self.ttl_s:f}s"]
        command += ["--parent", str(os.getpid()), "--permit", state["permit"]]
        return command + (["--simulated", state["simulated"]] if state["simulated"] else [])

    def _evidence(self, state: Mapping[str, Any], free_bytes: int) -> dict[str, Any]:
        baseline_bytes = state["baseline_free_bytes"]
        return {
            "device": state["device"],
            "simulated": state["simulated"] is not None,
            "total_bytes": state["total_bytes"],
            "baseline_free_bytes": baseline_bytes,
            "free_bytes": free_bytes,
            "aim_bytes": state["aim_bytes"],
            "fell_bytes": baseline_bytes - free_bytes,
        }


# The device and its counters -------------------------------------------------------------------------------------


def _device(target: Target, asked: int | str | None) -> str:
    """The UUID of the device to leak on: the one that is asked for, or the first of the target's. Raises Refused."""
    matchers = dict(target.gpus)
    if asked is not None:
        label = "gpu" if str(asked).isdigit() else "UUID"
        if str(asked) not in matchers.get(label, [str(asked)]):
            raise Refused(f"the GPU {asked} is not one of the target's `gpus`")
        matchers[label] = [str(asked)]
    try:
        device = _listed(target, matchers)[0]
    except Unwatchable as error:
        raise Refused(f"no GPU {'' if asked is None else f'{asked} '}to leak on: {error}") from None
    if "/" in device:
        raise Refused(f"{device} is a slice of a GPU (MIG), and a slice cannot be leaked on")
    return device


def _listed(target: Target, matchers: Matchers) -> list[str]:
    """The target's devices that match, by whoever knows their labels. Raises Unwatchable when there is none."""
    if target.gpu == "nvml":
        return Nvml(matchers).gpus
    if target.gpu_metrics:
        return sources.exporter(target.gpu_metrics, matchers).gpus
    if target.prometheus:
        ask = Prometheus(target.prometheus, matchers).ask
        return Dcgm(target.prometheus, "wall", ask, ask(_LOOK_BACK_S)).gpus
    raise Unwatchable("the target names no exporter (gpu_metrics) and no prometheus that knows its devices")


def _counters(target: Target, device: str) -> Dcgm | Nvml:
    """Who counts the memory of a device now. For a real one that is NVML on this machine: exporters are seconds late.

    Raises Unwatchable when the device is not here, OSError.
    """
    here: Matchers = {"UUID": [device]}
    if target.gpu != "simulated":
        return Nvml(here)
    if not target.gpu_metrics:
        raise Unwatchable("the target names no exporter of the simulated device (gpu_metrics)")
    return sources.exporter(target.gpu_metrics, here)


def _simulated_file(device: str) -> Path:
    """The file that is the simulated device. Raises Refused when no local stack of this directory has it."""
    file = (SIMULATED_DEVICES / f"{device}.json").resolve()
    if not file.exists():
        raise Refused(f"the simulated {device} is not of a local stack in this directory: there is no {file}")
    return file


def _memory(target: Target, device: str) -> tuple[int, int]:
    """Free and total bytes of a device by its counters. Raises Unwatchable, OSError."""
    seen = {reading.name: int(reading.value) for reading in _counters(target, device).sample()}
    return seen["gpu.free_bytes"], seen["gpu.total_bytes"]


def _wait(target: Target, device: str, reached: Callable[[int], bool], limit_s: float) -> int:
    """The free bytes at which it is reached, or those at the limit. Raises Unproven when there is no answer then."""
    deadline_s = time.monotonic() + limit_s
    while True:
        late = time.monotonic() > deadline_s
        try:
            free_bytes, _ = _memory(target, device)
        except (Unwatchable, OSError, ValueError) as error:
            if late:
                raise Unproven(f"nobody tells the memory of {device}: {error}") from error
        else:
            if late or reached(free_bytes):
                return free_bytes
        time.sleep(_POLL_S)


# The process -----------------------------------------------------------------------------------------------------


def _started(command: list[str]) -> "queue.Queue[dict[str, Any]]":
    """Start the leak; gives its lines as they come, the last being `{"ended": exit status}`.

    The thread that starts it stays until the leak has ended: for the kernel, a child's parent is a thread, and the leak
    would end with a thread that has done its work.
    """
    said: queue.Queue[dict[str, Any]] = queue.Queue()

    def watch() -> None:
        status: object = "it could not be started"
        try:
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
                for line in process.stdout or ():
                    said.put(json.loads(line))
            status = f"exit status {process.returncode}"
        finally:
            said.put({"ended": status})

    threading.Thread(target=watch, name="leak", daemon=True).start()
    return said


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / GIB:.2f} GiB"
