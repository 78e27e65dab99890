"""Pressure on this machine, beside a local stack: its cores busy, its memory taken, its disk full.

Cores and memory are taken by processes of their own (`harness.chaos.pressure`), the disk by one file. What the kernel
accounts to them is the evidence.
"""

import json
import os
import secrets
import subprocess
import sys
import time
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import psutil
from pydantic import Field

from harness import processes
from harness.chaos import permit
from harness.chaos.fault import Aim, Fault, Refused, Unproven
from harness.targets.base import Target
from harness.targets.local import ticks
from harness.units import Count, Period, Size, spec

PERMITS = Path(".harness/pressure")
START_LIMIT_S = 18.0  # on a machine that may be busy already
APPLIED_LIMIT_S = 10.0
PROVEN = 0.90  # of the memory that was asked for
BUSY = 0.05  # of a core that each process must have had: the machine may be busy already
CLOCK_S = 1.0  # over which that is measured


@spec
class _ByProcess(Fault):
    """Processes of its own press `for` that long at most."""

    for_s: Period = 60.0

    def inject(self, target: Target, state: Mapping[str, Any]) -> None:
        for path in state["permits"]:
            permit.grant(Path(path))
            command = [sys.executable, "-m", "harness.chaos.pressure", *self._words()]
            command += ["--for", f"{self.for_s}s", "--permit", path]
            subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)

    def undo(self, target: Target, state: Mapping[str, Any]) -> None:
        for path in state["permits"]:
            permit.revoke(Path(path))

    def undone(self, target: Target, state: Mapping[str, Any]) -> Mapping[str, Any]:
        if left := [path for path in state["permits"] if Path(path).exists()]:
            raise Unproven(f"there are still permits: {', '.join(left)}")
        return {"ended": len(state["permits"]), "available_bytes": psutil.virtual_memory().available}

    @abstractmethod
    def _words(self) -> list[str]:
        """What a process is told to take."""


@spec
class CpuPressure(_ByProcess):
    """Keeps `cores` of this machine busy."""

    cores: Count = 1

    def resolve(self, target: Target) -> Aim:
        _refuse_others(target)
        return _aim(
            self.cores,
            f"{self.cores} of the {os.cpu_count()} cores of this machine",
            f"all that computes here has up to {self.cores} cores less for {self.for_s:g} s",
        )

    def applied(self, target: Target, state: Mapping[str, Any]) -> Mapping[str, Any]:
        holders = [_holder(path) for path in state["permits"]]
        before_s, start_s = [_cpu_s(pid) for pid in holders], time.monotonic()
        for gone_s in ticks(APPLIED_LIMIT_S):
            took_s = [_cpu_s(pid) - since_s for pid, since_s in zip(holders, before_s, strict=True)]
            if gone_s >= CLOCK_S and min(took_s) >= BUSY * CLOCK_S:
                measured_s = time.monotonic() - start_s
                return {"pids": holders, "cores_taken": sum(took_s) / measured_s, "measured_s": measured_s}
        raise Unproven(f"the busy processes {holders} got no time: {took_s}")

    def _words(self) -> list[str]:
        return ["core"]


@spec
class MemoryPressure(_ByProcess):
    """Takes `size` of this machine's memory, and never what would leave less than `leave` available."""

    size_bytes: Annotated[Size, Field(gt=0)]
    leave_bytes: Annotated[Size, Field(gt=0)] = 2**30

    def resolve(self, target: Target) -> Aim:
        _refuse_others(target)
        available_bytes = psutil.virtual_memory().available
        if available_bytes - self.size_bytes < self.leave_bytes:
            raise Refused(
                f"{available_bytes} bytes of memory are available: {self.size_bytes} of them cannot be taken "
                f"and {self.leave_bytes} be left"
            )
        return _aim(
            1,
            f"{self.size_bytes} of {available_bytes} available bytes of this machine's memory",
            f"what needs more than is left may fail, or be killed by the kernel, for {self.for_s:g} s",
        )

    def applied(self, target: Target, state: Mapping[str, Any]) -> Mapping[str, Any]:
        pid, held_bytes = _holder(state["permits"][0]), 0
        for _ in ticks(APPLIED_LIMIT_S):
            held_bytes = _resident_bytes(pid)
            if held_bytes >= PROVEN * self.size_bytes:
                available_bytes = psutil.virtual_memory().available
                return {"pid": pid, "resident_bytes": held_bytes, "available_bytes": available_bytes}
        raise Unproven(f"{held_bytes} of {self.size_bytes} bytes are taken: the rest would not leave what it must")

    def _words(self) -> list[str]:
        return ["memory", "--size", f"{self.size_bytes}B", "--floor", f"{self.leave_bytes}B"]


@spec
class DiskFull(Fault):
    """One file takes the disk that `path` is on, but for `leave`. A run whose records are there may lose some, and is
    then not believed."""

    path: str = "."
    leave_bytes: Annotated[Size, Field(gt=0)] = 10_000_000

    def resolve(self, target: Target) -> Aim:
        _refuse_others(target)
        folder = Path(self.path).resolve()
        if not folder.is_dir():
            raise Refused(f"{self.path} is no directory")
        size_bytes = _free_bytes(folder) - self.leave_bytes
        if size_bytes <= 0:
            raise Refused(f"{folder} has {_free_bytes(folder)} bytes free, so {self.leave_bytes} cannot be left")
        file = folder / f".harness-fills-{secrets.token_hex(8)}"
        return Aim(
            targets=(f"the disk of {folder}",),
            radius=f"whatever writes there has {self.leave_bytes} bytes left",
            undo=f"rm {file}",
            state={"file": str(file), "size_bytes": size_bytes},
        )

    def inject(self, target: Target, state: Mapping[str, Any]) -> None:
        file = os.open(state["file"], os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        try:
            os.posix_fallocate(file, 0, state["size_bytes"])
        finally:
            os.close(file)

    def applied(self, target: Target, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Less than a hundredth of what it took is free beside what was to be left: others write and remove, too."""
        free_bytes = _free_bytes(Path(state["file"]).parent)
        if free_bytes > self.leave_bytes + state["size_bytes"] / 100:
            raise Unproven(f"{free_bytes} bytes are free, not {self.leave_bytes}")
        return {"free_bytes": free_bytes, "taken_bytes": state["size_bytes"]}

    def undo(self, target: Target, state: Mapping[str, Any]) -> None:
        Path(state["file"]).unlink(missing_ok=True)

    def undone(self, target: Target, state: Mapping[str, Any]) -> Mapping[str, Any]:
        if Path(state["file"]).exists():
            raise Unproven(f"{state['file']} is still there")
        return {"free_bytes": _free_bytes(Path(state["file"]).parent)}


def _refuse_others(target: Target) -> None:
    if target.kind != "local":
        raise Refused(f"a target of kind {target.kind} does not run on this machine")


def _aim(processes_n: int, what: str, radius: str) -> Aim:
    permits = [str((PERMITS / secrets.token_hex(8)).resolve()) for _ in range(processes_n)]
    return Aim((what,), radius, "end harness.chaos.pressure", {"permits": permits})


def _holder(path: str) -> int:
    """The pid of the process that has claimed a permit. Raises Unproven when none does."""
    for _ in ticks(START_LIMIT_S):
        if (said := Path(path).read_text()) and processes.lives((who := json.loads(said))["pid"], who["started"]):
            return int(who["pid"])
    raise Unproven(f"no process has claimed {path}")


def _cpu_s(pid: int) -> float:
    """The time a process has computed for so far; none once it has ended."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


def _resident_bytes(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def _free_bytes(folder: Path) -> int:
    """What we ourselves could still write there: root has the reserve, too."""
    disk = os.statvfs(folder)
    return disk.f_frsize * (disk.f_bavail if os.geteuid() else disk.f_bfree)
