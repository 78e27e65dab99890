"""The simulated device: memory is finite, shared between processes, and comes back from the dead."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from reference_stack.gpu import device as device_module
from reference_stack.gpu.device import Device, OutOfDeviceMemory, Owner

GIB = 2**30
HOLD = (
    "import sys; from pathlib import Path; from reference_stack.gpu.device import Device;"
    "Device(Path(sys.argv[1])).allocate('leak', int(sys.argv[2])); print('held', flush=True); sys.stdin.read()"
)


@pytest.fixture
def device(tmp_path: Path) -> Device:
    """A device of 10 GiB."""
    device = Device(tmp_path / "gpu" / "GPU-0.json")
    device.create("Test GPU", 10 * GIB)
    return device


@pytest.fixture
def holder(device: Device) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds 4 GiB of the device."""
    command = [sys.executable, "-c", HOLD, str(device.path), str(4 * GIB)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_memory_is_finite(device: Device) -> None:
    """An allocation that does not fit raises, takes nothing, and names what was free."""
    device.allocate("weights", 6 * GIB)
    with pytest.raises(OutOfDeviceMemory, match=r"4\.00 GiB of 10\.00 GiB is free"):
        device.allocate("pool", 4 * GIB + 1)
    assert device.read().used_bytes == 6 * GIB
    device.allocate("pool", 4 * GIB)
    assert device.read().free_bytes == 0


def test_free_returns_one_name(device: Device) -> None:
    """Freeing a name returns that allocation of this process and no other."""
    device.allocate("weights", 6 * GIB)
    device.allocate("pool", 1 * GIB)
    device.free("weights")
    assert [(a.name, a.size_bytes) for a in device.read().allocations] == [("pool", 1 * GIB)]


def test_negative_size_is_refused(device: Device) -> None:
    """Nobody can make room by allocating less than nothing."""
    with pytest.raises(ValueError, match="-1 bytes"):
        device.allocate("trick", -1)


def test_other_process_holds_until_killed(device: Device, holder: subprocess.Popen[str]) -> None:
    """What another process holds is counted, and is free again once it is killed, even before it is reaped."""
    assert device.read().used_bytes == 4 * GIB
    holder.kill()
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)
    assert device.read().used_bytes == 0
    assert holder.returncode is None


def test_reused_pid_is_another_process(device: Device) -> None:
    """A process is known by its number and its start: a later process of the same number holds nothing."""
    device.allocate("weights", GIB)
    owner = device.read().allocations[0].owner
    assert owner.alive
    assert not Owner(owner.pid, owner.started + 1).alive


def test_create_keeps_a_device_and_replaces_another(device: Device) -> None:
    """Creating the same device again keeps its allocations; another size makes a new one."""
    device.allocate("weights", GIB)
    device.create("Test GPU", 10 * GIB)
    assert device.read().used_bytes == GIB
    device.create("Test GPU", 20 * GIB)
    assert (device.read().used_bytes, device.read().total_bytes) == (0, 20 * GIB)


def test_utilisation_fades(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A utilisation is shown while it is fresh; a process that stops reporting leaves the device idle."""
    device.report(0.9, 0.2, 0.6)
    shown = device.read().utilisation
    assert shown
    assert (shown.busy, shown.tensor_active, shown.dram_active) == (0.9, 0.2, 0.6)
    monkeypatch.setattr(device_module, "FRESH_S", 0.0)
    assert device.read().utilisation is None


def test_concurrent_allocations_never_exceed_the_device(device: Device) -> None:
    """Many processes that allocate at once never hold more than there is, and none is lost."""
    program = (
        "import sys; from pathlib import Path; from reference_stack.gpu.device import Device, OutOfDeviceMemory\n"
        "device, got = Device(Path(sys.argv[1])), 0\n"
        "for n in range(8):\n"
        "    try: device.allocate(str(n), 2**30); got += 1\n"
        "    except OutOfDeviceMemory: pass\n"
        "print(got, flush=True); sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program, str(device.path)]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    try:
        got = [int(process.stdout.readline()) for process in processes if process.stdout]
        assert sum(got) == 10
        assert device.read().free_bytes == 0
    finally:
        for process in processes:
            process.communicate("")
