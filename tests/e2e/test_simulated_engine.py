"""The simulated engine as a process: what it holds while it lives, and how it refuses to start."""

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from reference_stack.gpu.device import Device
from tests.support.waiting import until

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).parents[2]
TINY = ROOT / ".cache" / "tiny"


@contextmanager
def started(port: int, device: Path, **changed: str) -> Iterator[subprocess.Popen[str]]:
    """The engine's command, with options replaced; killed at the end."""
    options = {"port": str(port), "model": "tiny", "tokenizer": str(TINY), "profile": "h100-8b", "device": str(device)}
    flags = [part for name, value in (options | changed).items() for part in (f"--{name}", value)]
    command = [sys.executable, "-m", "reference_stack.engine.simulated", *flags]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def refused(port: int, device: Path, **changed: str) -> str:
    """What an engine says that cannot start: exit 2, and no traceback."""
    with started(port, device, **changed) as process:
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "Traceback" not in output
    return output


def ready(port: int) -> bool:
    """The engine on that port answers."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


@pytest.fixture(scope="module", autouse=True)
def tiny() -> None:
    """The tiny model, built when missing."""
    if not (TINY / "tokenizer.json").exists():
        words = ROOT / "harness" / "traffic" / "words.txt"
        command = [sys.executable, "-m", "reference_stack.engine.tiny", "--out", str(TINY), "--text", str(words)]
        subprocess.run(command, cwd=ROOT, check=True)


@pytest.fixture
def port() -> int:
    """A free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def device(tmp_path: Path) -> Path:
    """The file of a device that does not exist yet."""
    return tmp_path / "gpu" / "GPU-0.json"


@pytest.fixture
def engine(port: int, device: Path) -> Iterator[subprocess.Popen[str]]:
    """A running engine."""
    with started(port, device) as process:
        until(lambda: ready(port), "the engine serves", 60)
        yield process


def test_memory_lives_and_dies_with_the_engine(engine: subprocess.Popen[str], device: Path) -> None:
    """A running engine holds 82 % of its card, an idle one too; killed, it holds nothing."""
    state = Device(device).read()
    assert state.used_bytes / state.total_bytes == pytest.approx(0.82, rel=0.01)
    engine.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, engine.pid, os.WEXITED | os.WNOWAIT)
    assert Device(device).read().used_bytes == 0


def test_leak_of_another_process_stops_the_next_start(engine: subprocess.Popen[str], port: int, device: Path) -> None:
    """A leak beside a running engine does not hurt it, but the engine cannot start again until the leak is freed."""
    Device(device).allocate("leak", Device(device).read().free_bytes)
    assert ready(port)
    engine.kill()
    engine.wait()
    assert "less than desired GPU memory utilization" in refused(port, device)
    Device(device).free("leak")
    with started(port, device):
        until(lambda: ready(port), "the engine serves", 60)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"profile": "b200"}, "There is no profile 'b200'"),
        ({"tokenizer": "nowhere"}, "There is no tokenizer at nowhere/tokenizer.json"),
        ({"max-model-len": "1000000"}, "fewer than max_model_len"),
    ],
    ids=["profile", "tokenizer", "length"],
)
def test_impossible_start_is_one_sentence(port: int, device: Path, changed: dict[str, str], sentence: str) -> None:
    """An engine that cannot start says why in a line of its log and exits 2, without a traceback."""
    assert sentence in refused(port, device, **changed)


def test_port_in_use_is_one_sentence(port: int, device: Path) -> None:
    """An engine whose port is taken says so and exits 2, and its memory is free again."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        assert "address already in use" in refused(port, device)
    assert Device(device).read().used_bytes == 0
