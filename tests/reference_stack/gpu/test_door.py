"""The simulated driver's command: memory for a process that shares no code with it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from reference_stack.gpu.device import Device

pytestmark = pytest.mark.e2e
GIB = 2**30


@pytest.fixture
def device(tmp_path: Path) -> Device:
    """A device of 10 GiB."""
    device = Device(tmp_path / "GPU-0.json")
    device.create("Test GPU", 10 * GIB)
    return device


def ask(device: Device, verb: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "reference_stack.gpu", verb, "--device", str(device.path), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def take(device: Device, size_bytes: int, pid: int) -> subprocess.CompletedProcess[str]:
    return ask(device, "allocate", "--bytes", str(size_bytes), "--pid", str(pid))


def test_memory_belongs_to_the_process_that_is_named(device: Device) -> None:
    """It is held when the command is over, and free when the process is dead; it is told as simulated."""
    with subprocess.Popen(["sleep", "60"]) as owner:
        assert take(device, 4 * GIB, owner.pid).returncode == 0
        assert take(device, 3 * GIB, owner.pid).returncode == 0
        told = json.loads(ask(device, "info").stdout)
        assert told == {
            "simulated": True,
            "uuid": "GPU-0",
            "model": "Test GPU",
            "free_bytes": 3 * GIB,
            "total_bytes": 10 * GIB,
        }
        owner.kill()
    assert json.loads(ask(device, "info").stdout)["free_bytes"] == 10 * GIB


def test_out_of_memory_is_exit_1(device: Device) -> None:
    """What does not fit is refused as the driver does it, and nothing is taken."""
    with subprocess.Popen(["sleep", "60"]) as owner:
        refused = take(device, 11 * GIB, owner.pid)
        owner.kill()
    assert (refused.returncode, "out of memory" in refused.stderr) == (1, True)
    assert device.read().used_bytes == 0


def test_what_cannot_be_done_is_exit_2(device: Device) -> None:
    """A dead owner, a negative size and a device that is not there each give a sentence and exit 2."""
    with subprocess.Popen(["true"]) as gone:
        pass
    dead, less = take(device, GIB, gone.pid), take(device, -1, 1)
    device.path.unlink()
    for refused in (dead, less, ask(device, "info")):
        assert refused.returncode == 2 and refused.stderr.count("\n") == 1
        assert "Traceback" not in refused.stderr
