"""The GPU leak on the simulated device: aimed, proven by the exporter, taken back, whatever its injector dies of."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError

from harness import processes
from harness.chaos import experiment, undo
from harness.chaos.catalogue import FAULTS
from harness.chaos.discipline import Injection
from harness.chaos.fault import Absent, Refused, Unproven
from harness.chaos.faults import gpu
from harness.chaos.faults.gpu import GpuLeak
from harness.targets import base
from reference_stack.gpu.device import Device
from tests.support.serving import free_port
from tests.support.waiting import until

ROOT = Path(__file__).parents[3]
GIB = 2**30
FAST = {"step_bytes": GIB // 2, "every_s": 0.05}


def answers(url):
    try:
        return urllib.request.urlopen(url, timeout=2).status == 200
    except OSError:
        return False


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A directory with two simulated devices of 10 GiB where a local stack has them; 8 GiB of the first are taken."""
    monkeypatch.chdir(tmp_path)
    for number in (0, 1):
        Device(Path(f".stack/gpu/GPU-{number}.json")).create("Test GPU", 10 * GIB)
    return tmp_path


@pytest.fixture
def target(home):
    """A target whose exporter is up."""
    port = free_port()
    page = f"http://127.0.0.1:{port}/metrics"
    command = [sys.executable, "-m", "reference_stack.gpu.exporter", "--port", str(port), "--devices", ".stack/gpu"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as exporter:
        until(lambda: answers(page), "the exporter answers")
        yield target_of(home, gpu="simulated", gpu_metrics=page)
        exporter.kill()


def target_of(home, **keys):
    lines = {"kind": "url", "url": "http://127.0.0.1:9", "model": "tiny", "tokenizer": "tiny"} | keys
    (home / "target.yaml").write_text("\n".join(f"{key}: {json.dumps(value)}" for key, value in lines.items()))
    return base.load(str(home / "target.yaml"))


def free_bytes(number=0):
    return Device(Path(f".stack/gpu/GPU-{number}.json")).read().free_bytes


def test_it_is_spelled_as_users_write_it():
    """Every choice is a key with its unit; a step of nothing is refused."""
    text = {"share": "10%", "step": "512MiB", "every": "1s", "floor": "5%", "ttl": "2m", "grows_to": "20%", "device": 1}
    read = TypeAdapter(FAULTS["gpu_leak"]).validate_python(text)
    assert read == GpuLeak(share=0.1, step_bytes=GIB // 2, every_s=1.0, floor=0.05, ttl_s=120.0, grows_to=0.2, device=1)
    for wrong in ({"step": "0MB"}, {"share": "10%", "grows_to": "10%"}):
        with pytest.raises(ValidationError):
            TypeAdapter(GpuLeak).validate_python(wrong)


def test_no_gpu(home):
    """A target without a GPU has nothing to leak on; one whose GPU nobody tells of is refused with the reason."""
    with pytest.raises(Absent, match="the target has no GPU"):
        GpuLeak().resolve(target_of(home, gpu="none"))
    with pytest.raises(Refused, match="names no exporter"):
        GpuLeak().resolve(target_of(home, gpu="simulated"))


@pytest.mark.e2e
def test_aim(target):
    """Aiming says what would be hit, felt and undone, chooses the device, and changes nothing."""
    aim = GpuLeak(device="GPU-1").resolve(target)
    assert aim.targets == ("simulated GPU-1",)
    assert aim.radius.startswith("10.0% of the memory of GPU-1 (1.00 GiB of 10.00 GiB, 10.00 GiB are free) in 2 s")
    assert "ends by itself" in aim.undo and not Path(".harness").exists()
    assert GpuLeak(device=1).resolve(target).state["device"] == "GPU-1"
    assert GpuLeak().resolve(target).state["device"] == "GPU-0"
    with pytest.raises(Refused, match="no DCGM_FI_DEV_FB_FREE"):
        GpuLeak(device="GPU-7").resolve(target)
    with pytest.raises(Refused, match="GPU-1 is not one of the target's `gpus`"):
        GpuLeak(device="GPU-1").resolve(dataclasses.replace(target, gpus={"UUID": ["GPU-0"]}))


@pytest.mark.e2e
def test_what_cannot_be_leaked_is_refused(target, monkeypatch):
    """Too little room above the floor, and a leak that would end before it is whole, are refused with figures."""
    Device(Path(".stack/gpu/GPU-0.json")).allocate("engine", 9 * GIB)
    with pytest.raises(Refused, match=r"1\.00 GiB of 10\.00 GiB free.*at most 5\.0% can be leaked, not 10\.0%"):
        GpuLeak().resolve(target)
    with pytest.raises(Refused, match="whole after 9 s, but ends after 5 s"):
        GpuLeak(share=0.9, step_bytes=GIB, ttl_s=5.0, device=1).resolve(target)
    monkeypatch.chdir("/")
    with pytest.raises(Refused, match="GPU-1 is not of a local stack in this directory"):
        GpuLeak(device=1).resolve(target)


@pytest.mark.e2e
def test_leak_and_undo(target):
    """Injected, the exporter shows the whole aim gone; undone, all of it is back and no process or file is left."""
    fault = GpuLeak(share=0.25, **FAST)
    aim = fault.resolve(target)
    state = json.loads(json.dumps(aim.state))
    fault.inject(target, state)
    try:
        seen = fault.applied(target, state)
        assert (seen["fell_bytes"], seen["simulated"]) == (int(2.5 * GIB), True)
        pid = json.loads(Path(state["permit"]).read_text())["pid"]
        with pytest.raises(Unproven, match="still has its permit"):
            fault.undone(target, state)
    finally:
        fault.undo(target, state)
    assert fault.undone(target, state)["fell_bytes"] == 0
    assert processes.started(pid) is None and not Path(state["permit"]).exists()
    fault.undo(target, state)


@pytest.mark.e2e
def test_a_leak_that_does_nothing_is_no_leak(target, monkeypatch):
    """Without a fall of the device's own counter there is no evidence, whatever was started."""
    monkeypatch.setattr(gpu, "APPLIED_LIMIT_S", 0.2)
    fault = GpuLeak()
    with pytest.raises(Unproven, match=r"fell by 0\.00 GiB, not by 0\.90 GiB or more"):
        fault.applied(target, fault.resolve(target).state)


@pytest.mark.e2e
def test_memory_that_does_not_come_back(target, monkeypatch):
    """When somebody else holds what the leak gave back, that it is undone is not proven."""
    monkeypatch.setattr(gpu, "UNDONE_LIMIT_S", 0.2)
    fault = GpuLeak()
    aim = fault.resolve(target)
    Device(Path(".stack/gpu/GPU-0.json")).allocate("another", GIB // 5)
    with pytest.raises(Unproven, match=r"9\.80 GiB of GPU-0 are free, 10\.00 GiB were before"):
        fault.undone(target, aim.state)


@pytest.mark.e2e
def test_undone_before_it_began(target):
    """A leak whose permit is taken away while it starts takes nothing, and its injector is told."""
    fault = GpuLeak(**FAST)
    aim = fault.resolve(target)
    said = []

    def inject():
        try:
            fault.inject(target, aim.state)
        except Unproven as error:
            said.append(str(error))

    injecting = threading.Thread(target=inject)
    injecting.start()
    until(Path(aim.state["permit"]).exists, "the permit is there")
    fault.undo(target, aim.state)
    injecting.join(30)
    assert said and "ended before it was whole" in said[0]
    assert free_bytes() == 10 * GIB


@pytest.mark.e2e
def test_it_outlives_the_thread_that_injected(target):
    """The kernel takes a thread for a parent: the leak stays when the thread that injected it is over."""
    fault = GpuLeak(**FAST)
    aim = fault.resolve(target)
    thread = threading.Thread(target=fault.inject, args=(target, aim.state))
    thread.start()
    thread.join(30)
    try:
        assert fault.applied(target, aim.state)["fell_bytes"] == GIB
        pid = json.loads(Path(aim.state["permit"]).read_text())["pid"]
        with pytest.raises(subprocess.TimeoutExpired):
            subprocess.run(["tail", f"--pid={pid}", "-f", os.devnull], timeout=0.5, check=True)
    finally:
        fault.undo(target, aim.state)


INJECTOR = """
import json, sys, time
from harness.chaos.faults.gpu import GpuLeak
from harness.targets import base
fault, target = GpuLeak(step_bytes=2**29, every_s=0.05), base.load(sys.argv[1])
aim = fault.resolve(target)
print(json.dumps(dict(aim.state)), flush=True)
fault.inject(target, aim.state)
print("injected", flush=True)
time.sleep(600)
"""


@pytest.mark.e2e
def test_the_injector_is_killed(target):
    """SIGKILL of who injected frees the memory; another process undoes the rest from the state alone."""
    with subprocess.Popen(
        [sys.executable, "-c", INJECTOR, str(target.path)], stdout=subprocess.PIPE, text=True
    ) as injector:
        state = json.loads(injector.stdout.readline())
        assert injector.stdout.readline() == "injected\n" and free_bytes() == 9 * GIB
        injector.send_signal(signal.SIGKILL)
    until(lambda: free_bytes() == 10 * GIB, "the memory is back")
    GpuLeak().undo(target, state)
    assert GpuLeak().undone(target, state)["free_bytes"] == 10 * GIB
    assert not Path(state["permit"]).exists()


@pytest.mark.e2e
def test_under_guard(target):
    """The discipline around it: the fault can be made again from its record, and ends proven gone, with no record."""
    fault = experiment.made("gpu_leak", {"share": "25%", "step": "512MiB", "every": "50ms", "ttl": "1m"})
    injection = Injection("gpu_leak", fault, target, None, ttl_s=60.0, run_dir=None)
    injection.begin()
    try:
        assert free_bytes() == int(7.5 * GIB) and undo.left()
    finally:
        injection.end()
    assert free_bytes() == 10 * GIB and not undo.left()
    assert not list(Path(".harness/leaks").iterdir())


@pytest.mark.e2e
def test_leak_then_kill(target):
    """When a leak has grown into the memory of a killed replica, a new one refuses to start until the leak ends."""
    device = Path(".stack/gpu/GPU-0.json")
    device.unlink()  # the engine makes it anew, as its profile has it: 79.2 GiB, of which it takes 82 %
    first = Engine(device)
    fault = GpuLeak(share=0.10, grows_to=0.25, step_bytes=6 * GIB, every_s=0.1)
    try:
        until(first.serves, "the first engine serves")
        aim = fault.resolve(target)
        fault.inject(target, aim.state)
        try:
            assert 7.9 * GIB < fault.applied(target, aim.state)["fell_bytes"] < 14 * GIB
            assert first.serves()
            first.kill()
            until(lambda: holds(device, 0.25), "the leak holds its share")
            again = Engine(device)
            assert again.process.wait(60) == 2
            assert "is less than desired GPU memory utilization" in again.said()
        finally:
            fault.undo(target, aim.state)
        fault.undone(target, aim.state)
        last = Engine(device)
        try:
            until(last.serves, "the last engine serves")
        finally:
            last.kill()
    finally:
        first.kill()


def holds(device, share):
    read = Device(device).read()
    return read.used_bytes == int(share * read.total_bytes)


class Engine:
    """A simulated replica on a device."""

    def __init__(self, device):
        self.port, self.log = free_port(), device.with_suffix(".out")
        command = [
            sys.executable,
            "-m",
            "reference_stack.engine.simulated",
            "--port",
            str(self.port),
            "--model",
            "tiny",
        ]
        command += ["--tokenizer", str(ROOT / ".cache/tiny"), "--profile", "h100-8b", "--device", str(device)]
        with open(self.log, "w") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)

    def serves(self):
        return answers(f"http://127.0.0.1:{self.port}/health")

    def said(self):
        return self.log.read_text()

    def kill(self):
        self.process.kill()
        self.process.wait()
