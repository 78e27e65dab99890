"""A simulated GPU: a file that says how much memory there is and which process holds what.

It stands in for the driver: it hands out memory until there is none, takes back what a dead process held, and keeps
the latest utilisation that the engine reported. Any process may allocate, so memory can be leaked and fought for. It
refuses to be anything but the simulation of a device: no real GPU is ever read here.

The file is replaced whole, under a lock beside it, so a reader never sees half of it and a killed writer harms nothing.
"""

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

FRESH_S = 3.0  # utilisation older than this is that of a process which has stopped reporting: the device is idle


class OutOfDeviceMemory(Exception):  # noqa: N818 -- the field's own words
    """An allocation that does not fit into what is free."""


@dataclass(frozen=True)
class Owner:
    """A process, told from a later one of the same number by its start (clock ticks since boot)."""

    pid: int
    started: int

    @property
    def alive(self) -> bool:
        """It still runs; a zombie's memory is already returned, so it does not count."""
        return _started(self.pid) == self.started


@dataclass(frozen=True)
class Allocation:
    """Device memory that one process holds under a name."""

    owner: Owner
    name: str
    size_bytes: int


@dataclass(frozen=True)
class Utilisation:
    """How busy the device was in the last moments before at_s (monotonic clock); all shares are 0 to 1."""

    owner: Owner
    at_s: float
    busy: float
    tensor_active: float
    dram_active: float

    @property
    def current(self) -> bool:
        """Its process lives and has reported lately."""
        return self.owner.alive and time.monotonic() - self.at_s < FRESH_S


@dataclass(frozen=True)
class State:
    """The device at one moment; allocations of dead processes are not part of it."""

    model: str
    total_bytes: int
    allocations: list[Allocation] = field(default_factory=list)
    utilisation: Utilisation | None = None

    @property
    def used_bytes(self) -> int:
        """Memory that living processes hold."""
        return sum(allocation.size_bytes for allocation in self.allocations)

    @property
    def free_bytes(self) -> int:
        """Memory that can still be allocated."""
        return self.total_bytes - self.used_bytes


@dataclass(frozen=True)
class Device:
    """The device whose file is `path`; the stem of the name is its UUID."""

    path: Path

    @property
    def uuid(self) -> str:
        """The name under which the device is exported."""
        return self.path.stem

    def create(self, model: str, total_bytes: int) -> None:
        """Make the device unless it exists as it should be; a device of another size or model is replaced."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._locked():
            if self.path.exists():
                state = self.read()
                if (state.model, state.total_bytes) == (model, total_bytes):
                    return
            self._write(State(model, total_bytes))

    def read(self) -> State:
        """The device now. Raises FileNotFoundError when there is none."""
        return _decode(json.loads(self.path.read_text()))

    def allocate(self, name: str, size_bytes: int, pid: int | None = None) -> None:
        """Take memory for a process, this one by default; held until `free` or until the process dies.

        Raises OutOfDeviceMemory, and takes nothing, when it does not fit; ProcessLookupError for a dead process.
        """
        if size_bytes < 0:
            raise ValueError(f"cannot allocate {size_bytes} bytes")
        with self._locked():
            state = self.read()
            if size_bytes > state.free_bytes:
                raise OutOfDeviceMemory(
                    f"{self.uuid} out of memory: tried to allocate {size_bytes / 2**30:.2f} GiB for {name}, "
                    f"{state.free_bytes / 2**30:.2f} GiB of {state.total_bytes / 2**30:.2f} GiB is free."
                )
            allocation = Allocation(_owner(pid or os.getpid()), name, size_bytes)
            self._write(replace(state, allocations=[*state.allocations, allocation]))

    def free(self, name: str) -> None:
        """Return whatever this process holds under that name."""
        owner = _owner(os.getpid())
        with self._locked():
            state = self.read()
            kept = [a for a in state.allocations if (a.owner, a.name) != (owner, name)]
            self._write(replace(state, allocations=kept))

    def report(self, busy: float, tensor_active: float, dram_active: float) -> None:
        """Set the utilisation on behalf of this process; shares of the time since the last report."""
        utilisation = Utilisation(_owner(os.getpid()), time.monotonic(), busy, tensor_active, dram_active)
        with self._locked():
            self._write(replace(self.read(), utilisation=utilisation))

    def _write(self, state: State) -> None:
        draft = self.path.with_suffix(".draft")
        draft.write_text(json.dumps(asdict(state)))
        os.replace(draft, self.path)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the device's lock; the kernel drops it when the holder dies."""
        with self.path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _decode(document: dict[str, Any]) -> State:
    """A State from its JSON, without what dead processes held: the driver has taken that back."""
    allocations = [Allocation(**held | {"owner": Owner(**held["owner"])}) for held in document["allocations"]]
    last = document["utilisation"]
    utilisation = Utilisation(**last | {"owner": Owner(**last["owner"])}) if last else None
    return State(
        model=document["model"],
        total_bytes=document["total_bytes"],
        allocations=[allocation for allocation in allocations if allocation.owner.alive],
        utilisation=utilisation if utilisation and utilisation.current else None,
    )


def _owner(pid: int) -> Owner:
    started = _started(pid)
    if started is None:
        raise ProcessLookupError(f"there is no process {pid}")
    return Owner(pid, started)


def _started(pid: int) -> int | None:
    """When the process started, in clock ticks since boot (proc(5), stat); None when it is gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *rest = stat.rpartition(")")[2].split()
    return None if state in "ZX" else int(rest[18])
