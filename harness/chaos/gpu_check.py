"""Whether a leak of GPU memory is real here, and really ends: the fault's own code on a GPU of this machine.

    python -m harness.chaos.gpu_check [--device UUID]

It leaks a tenth of the device four times, and takes under a minute: ended by undo, by its floor, by its TTL, and by the
death of its parent. What it says is read from NVML, never from the leak; the first failure ends it. Exit: 0 every check
held; 1 one did not; 3 nothing was checked, and the line says why: that is no pass.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from harness.chaos.fault import Aim, Refused, Unproven
from harness.chaos.faults.gpu import BACK_WITHIN, GIB, GpuLeak
from harness.model import EXIT_CODE, Judgement
from harness.sources import Nvml
from harness.targets.base import Target

SHARE, STEPS, EVERY_S, TTL_S = 0.10, 16, 0.25, 15.0
LIMIT_S = 30.0  # for anything that is waited for
POINTS = 16  # of a curve, as it is printed
_PARENT = "import subprocess, sys; subprocess.run(sys.argv[1:])"


class Card:
    """One device and a leak that fits it."""

    def __init__(self, device: str | None) -> None:
        """Raises Refused when there is no device, or too little of it is free."""
        self.target = Target(
            kind="url", url="http://127.0.0.1", model="", tokenizer=Path(), gpu="nvml", path=Path("gpu-check")
        )
        self.device = GpuLeak(device=device).resolve(self.target).state["device"]
        self._counters = Nvml({"UUID": [self.device]})
        self.baseline_bytes, self.total_bytes = self.free_bytes(), self._read()["gpu.total_bytes"]
        step_bytes = int(SHARE * self.total_bytes / STEPS) + 1
        self.fault = GpuLeak(share=SHARE, step_bytes=step_bytes, every_s=EVERY_S, ttl_s=TTL_S, device=self.device)

    def free_bytes(self) -> int:
        return self._read()["gpu.free_bytes"]

    def _read(self) -> dict[str, int]:
        return {reading.name: int(reading.value) for reading in self._counters.sample()}

    def wait_until(self, reached: Callable[[int], bool], what: str) -> float:
        """Wait for the free memory to be so; the seconds that took. Raises Unproven at the limit."""
        start_s = time.monotonic()
        while not reached(free_bytes := self.free_bytes()):
            if time.monotonic() - start_s > LIMIT_S:
                raise Unproven(f"{what}: not within {LIMIT_S:g} s, {_gib(free_bytes)} are free")
            time.sleep(0.05)
        return time.monotonic() - start_s

    def is_back(self, free_bytes: int) -> bool:
        return free_bytes >= self.baseline_bytes - BACK_WITHIN * self.total_bytes

    def is_leaked_on(self, free_bytes: int) -> bool:
        return free_bytes <= self.baseline_bytes - SHARE * self.total_bytes / 2

    @contextlib.contextmanager
    def injected(self) -> Iterator[Aim]:
        """The fault, in force and proven; taken back at the end whatever happens."""
        aim = self.fault.resolve(self.target)
        try:
            self.fault.inject(self.target, aim.state)
            self.fault.applied(self.target, aim.state)
            yield aim
        finally:
            self.fault.undo(self.target, aim.state)

    @contextlib.contextmanager
    def leaking(self, *options: str) -> Iterator[subprocess.Popen[str]]:
        """The leak's own command under a parent, which is killed at the end."""
        leak = [sys.executable, "-m", "harness.chaos.leak", "--device", self.device, "--every", "0.1s", "--ttl", "15s"]
        step = ["--step", f"{self.fault.step_bytes}B"]
        command = [sys.executable, "-c", _PARENT, *leak, *step, *options]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                yield process
            finally:
                process.kill()


def leak_and_undo(card: Card) -> str:
    """Free memory falls by what was aimed at, and is back when the leak is undone."""
    with _curve(card) as curve:
        with card.injected() as aim:
            seen = card.fault.applied(card.target, aim.state)
        back = card.fault.undone(card.target, aim.state)
    return (
        f"free fell by {_gib(seen['fell_bytes'])}, the driver's context included, of {_gib(seen['aim_bytes'])} aimed "
        f"at, and came back to within {abs(back['fell_bytes']) / card.total_bytes:.2%} of the device\n"
        f"  free, GiB: {_drawn(curve)}"
    )


def floor(card: Card) -> str:
    """A leak that would take half of the device waits at its floor."""
    floor_bytes = card.free_bytes() - int(SHARE * card.total_bytes)
    with card.leaking("--aim", "50%", "--floor", f"{floor_bytes}B") as process:
        lines: Iterator[dict[str, Any]] = map(json.loads, process.stdout or ())
        waited = next((line for line in lines if line.keys() & {"waiting", "stopped", "failed"}), {})
        free_bytes = card.free_bytes()
    if "waiting" not in waited or free_bytes < floor_bytes:
        raise Unproven(f"{_gib(free_bytes)} are free at a floor of {_gib(floor_bytes)}; the leak said {waited}")
    card.wait_until(card.is_back, "memory is back")
    return f"it stopped with {_gib(free_bytes)} free, its floor is {_gib(floor_bytes)}"


def ttl(card: Card) -> str:
    """A leak that nobody undoes ends by itself."""
    with card.injected():
        took_s = card.wait_until(card.is_back, "memory is back at the TTL")
    return f"memory was back by itself {took_s:.1f} s after the leak was whole, with a TTL of {TTL_S:g} s"


def parent(card: Card) -> str:
    """A leak whose parent is killed ends with it."""
    with card.leaking("--aim", f"{SHARE:.0%}") as process:
        card.wait_until(card.is_leaked_on, "it leaks")
        process.kill()
        took_s = card.wait_until(card.is_back, "memory is back when the parent is dead")
    return f"memory was back {took_s:.1f} s after the parent was killed"


@contextlib.contextmanager
def _curve(card: Card) -> Iterator[list[int]]:
    """Free memory ten times a second, for as long as the block lasts."""
    seen: list[int] = []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.1):
            seen.append(card.free_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def _drawn(curve: list[int]) -> str:
    every = max(1, len(curve) // POINTS)
    return " ".join(f"{free_bytes / GIB:.1f}" for free_bytes in [*curve[::every], *curve[-1:]])


def main() -> int:
    """Check, and say it; the exit status."""
    parser = argparse.ArgumentParser(prog="gpu-check", description="Leak and free GPU memory for real.")
    parser.add_argument("--device", help="UUID or index (default: the first)")
    try:
        card = Card(parser.parse_args().device)
    except Refused as error:
        _say(f"gpu-check DID NOT RUN, so nothing is known: {error}")
        return EXIT_CODE[Judgement.INVALID]
    _say(f"{card.device}: {_gib(card.total_bytes)}, {_gib(card.baseline_bytes)} free before")
    return int(not all(_held(check, card) for check in (leak_and_undo, floor, ttl, parent)))  # up to the first failure


def _held(check: Callable[[Card], str], card: Card) -> bool:
    name = check.__name__.replace("_", " ")
    try:
        _say(f"ok   {name}: {check(card)}")
    except (Refused, Unproven, OSError) as error:
        _say(f"FAIL {name}: {error}")
        return False
    return True


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / GIB:.2f} GiB"


if __name__ == "__main__":
    sys.exit(main())
