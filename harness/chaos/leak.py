"""A process that leaks GPU memory step by step, and cannot fail to give it back.

    python -m harness.chaos.leak --device UUID --aim 10% --step 512MiB --every 1s --floor 5% --ttl 2m

The memory is its own, so it is free again when the process is gone, however that came about: killed, at its TTL by a
timer of the kernel (a hung driver call does not matter), or with its parent. It takes plain allocations of the driver
and writes to them; never managed memory, which could be moved out of the card, or hang it. It never leaves less
free than its floor, and waits there; the first allocation that is refused to it is its last.

Each line it says is a JSON object: the device, then every step with what it holds, then why it takes no more.
"""

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from harness import parent, units
from harness.chaos import permit

LIBRARY = "libcuda.so.1"
PATTERN = 0xA5
GRAIN_BYTES = 2 * 2**20  # the driver's own: no crumbs are fought for
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
_SIMULATOR = (sys.executable, "-m", "reference_stack.gpu")
_SIMULATOR_FULL = 1


class OutOfMemory(Exception):  # noqa: N818 -- the field's own words
    """The device has less than was asked for."""


class Device(Protocol):
    """One GPU, as the process that takes memory of it sees it."""

    simulated: bool

    def memory(self) -> tuple[int, int]:
        """Free and total bytes. Raises OSError."""

    def take(self, size_bytes: int) -> None:
        """Hold so much more until this process ends. Raises OutOfMemory, OSError."""


class Driver:
    """The first device that CUDA_VISIBLE_DEVICES lets the driver see, through a context of our own.

    The context itself takes some hundred MiB, before the first step.
    """

    simulated = False

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL(LIBRARY)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuInit", ctypes.c_uint(0))
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(0))
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)

    def memory(self) -> tuple[int, int]:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def take(self, size_bytes: int) -> None:
        address, size = ctypes.c_uint64(), ctypes.c_size_t(size_bytes)
        self._call("cuMemAlloc_v2", ctypes.byref(address), size)
        self._call("cuMemsetD8_v2", address, ctypes.c_ubyte(PATTERN), size)
        self._call("cuCtxSynchronize")

    def _call(self, name: str, *arguments: Any) -> None:
        if error := getattr(self._cuda, name)(*arguments):
            if error == _OUT_OF_MEMORY:
                raise OutOfMemory(f"{name}: out of memory")
            raise OSError(f"{name} failed with CUDA error {error}")


class Simulated:
    """The simulated device of a local stack, asked through the stack's own command; we own what that takes for us."""

    simulated = True

    def __init__(self, file: Path) -> None:
        self._file = str(file)

    def memory(self) -> tuple[int, int]:
        told = json.loads(self._ask("info"))
        return int(told["free_bytes"]), int(told["total_bytes"])

    def take(self, size_bytes: int) -> None:
        self._ask("allocate", "--bytes", str(size_bytes), "--pid", str(os.getpid()))

    def _ask(self, verb: str, *options: str) -> str:
        command = [*_SIMULATOR, verb, "--device", self._file, *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == _SIMULATOR_FULL:
            raise OutOfMemory(done.stderr.strip())
        if done.returncode:
            raise OSError(f"the simulated device: {done.stderr.strip()}")
        return done.stdout


def leak(
    device: Device, aim_bytes: int, step_bytes: int, floor_bytes: int, ticks: Iterator[float]
) -> Iterator[dict[str, Any]]:
    """Take one step at each tick until the aim is held; yields what it says of each.

    A step that would leave less free than the floor is cut down to what does not. Without any room it is put off to a
    later tick: what others give back, it takes.
    """
    held_bytes, waiting = 0, False
    for at_s in ticks:
        free_bytes, _ = device.memory()
        size_bytes = _step(min(step_bytes, aim_bytes - held_bytes), free_bytes - floor_bytes)
        seen = {"at_s": round(at_s, 3), "free_bytes": free_bytes}
        if not size_bytes:
            if not waiting:
                yield seen | {"held_bytes": held_bytes, "waiting": "any more would leave less free than the floor"}
            waiting = True
            continue
        try:
            device.take(size_bytes)
        except OutOfMemory:
            yield seen | {"held_bytes": held_bytes, "stopped": "out of memory"}
            return
        held_bytes, waiting = held_bytes + size_bytes, False
        yield seen | {"held_bytes": held_bytes}
        if held_bytes == aim_bytes:
            yield {"held_bytes": held_bytes, "stopped": "all is held"}
            return


def _step(wanted_bytes: int, room_bytes: int) -> int:
    """How much of a step there is room for, in whole grains; 0 for none."""
    return wanted_bytes if wanted_bytes <= room_bytes else max(0, room_bytes // GRAIN_BYTES * GRAIN_BYTES)


def every(period_s: float) -> Iterator[float]:
    """Seconds since the first tick, at each tick. Never two within a period: what was held up is not made up for."""
    start_s = tick_s = time.monotonic()
    while True:
        yield tick_s - start_s
        time.sleep(max(0.0, tick_s + period_s - time.monotonic()))
        tick_s = time.monotonic()


def main() -> int:
    """Leak, then hold until killed; 1 and a line that says why when there is no device to leak on."""
    asked = _parse()
    _be_mortal(asked.ttl, asked.parent)
    try:
        if asked.permit:
            permit.claim(asked.permit)
        device = _open(asked)
        free_bytes, total_bytes = device.memory()
        about = {"device": asked.device, "simulated": device.simulated, "pid": os.getpid()}
        _say(about | {"free_bytes": free_bytes, "total_bytes": total_bytes})
        aim_bytes, floor_bytes = asked.aim(total_bytes), asked.floor(total_bytes)
        for line in leak(device, aim_bytes, asked.step, floor_bytes, every(asked.every)):
            _say(line)
    except (OSError, OutOfMemory, permit.Revoked) as error:
        _say({"failed": str(error) or type(error).__name__})
        return 1
    while True:
        signal.pause()


def _be_mortal(ttl_s: float, parent_pid: int) -> None:
    """See to the end before the beginning. Signals are the kernel's to act on, not Python's: it may hang in a call."""
    mortal = {signal.SIGALRM, signal.SIGTERM, signal.SIGINT}
    for number in mortal:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, mortal)
    signal.setitimer(signal.ITIMER_REAL, ttl_s)
    parent.die_with(parent_pid)


def _open(asked: argparse.Namespace) -> Device:
    if asked.simulated:
        return Simulated(asked.simulated)
    os.environ |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": asked.device}
    return Driver()


def _say(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m harness.chaos.leak", description="Leak GPU memory, within limits.")
    parser.add_argument("--device", required=True, help="UUID or index of the GPU")
    parser.add_argument("--simulated", type=Path, metavar="FILE", help="leak on the simulated device in this file")
    parser.add_argument("--aim", type=_amount, required=True, help="how much to hold: 8GiB, or 10%% of the device")
    parser.add_argument("--step", type=_some, default="512MiB", help="of one allocation (default: %(default)s)")
    parser.add_argument("--every", type=units.duration, default="1s", help="between two steps (default: %(default)s)")
    parser.add_argument("--floor", type=_amount, default="5%", help="what stays free (default: 5%%)")
    parser.add_argument("--ttl", type=units.duration, default="2m", help="when it ends (default: %(default)s)")
    parser.add_argument("--parent", type=int, default=os.getppid(), help="the parent to end with")
    parser.add_argument("--permit", type=Path, metavar="FILE", help="a permit, without which it does not begin")
    return parser.parse_args()


def _some(text: str) -> int:
    if size_bytes := units.size(text):
        return size_bytes
    raise ValueError("no step at all")


def _amount(text: str) -> Callable[[int], int]:
    """`10%` or `8GiB` -> bytes of a total."""
    if text.endswith("%"):
        share = units.share(text)
        return lambda total_bytes: int(share * total_bytes)
    size_bytes = units.size(text)
    return lambda _: size_bytes


if __name__ == "__main__":
    sys.exit(main())
