"""The local stack's whole life, with the simulated engine: up, used, broken, down, and nothing left."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from reference_stack.local import processes
from tests.support.stack import stack, write_target
from tests.support.waiting import until

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
TINY = ROOT / ".cache" / "tiny"
PORT = 21120


def left(directory: Path) -> list[psutil.Process]:
    return processes.of_stack(directory.resolve() / ".stack")


def complete() -> int:
    """The status of one short completion through the gateway."""
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=20)
    body = json.dumps({"model": "tiny", "prompt": "hello", "max_tokens": 2})
    try:
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        return connection.getresponse().status
    finally:
        connection.close()


def pid_of(directory: Path, program: str) -> int:
    rows = json.loads(stack(directory, "status", "--json").stdout)["programs"]
    return next(int(row["pid"] or 0) for row in rows if row["program"] == program)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A directory with a target of its own; whatever runs there at the end of the test is taken down."""
    if not TINY.exists():
        builder = [sys.executable, "-m", "reference_stack.engine.tiny", "--out", str(TINY)]
        subprocess.run([*builder, "--text", "harness/traffic/words.txt"], cwd=ROOT, check=True)
    write_target(tmp_path, PORT)
    yield tmp_path
    stack(tmp_path, "down")


def test_life(home: Path) -> None:
    """Up serves; up again says so; a killed replica comes back; down leaves nothing, and can be repeated."""
    up = stack(home, "up", "--target", "target.yaml")
    assert up.returncode == 0, up.stderr
    assert complete() == 200

    again = stack(home, "up", "--target", "target.yaml")
    assert (again.returncode, "already up" in again.stdout) == (0, True)

    write_target(home, PORT, prompt_limit=8192)
    another = stack(home, "up", "--target", "target.yaml")
    assert (another.returncode, "another target is up" in another.stderr) == (2, True)

    shown = stack(home, "status", "--json")
    assert shown.returncode == 0
    programs = {row["program"]: row for row in json.loads(shown.stdout)["programs"]}
    assert programs.keys() == {"engine-0", "engine-1", "guard", "gateway", "gpu-exporter"}
    assert "engine-1" in stack(home, "status").stdout
    assert "serving on" in stack(home, "logs", "engine-0").stdout

    killed = programs["engine-0"]["pid"]
    os.kill(killed, signal.SIGKILL)
    assert [complete() for _ in range(20)] == [200] * 20
    until(lambda: pid_of(home, "engine-0") not in (0, killed), "the replica is back")

    down = stack(home, "down")
    assert (down.returncode, down.stderr) == (0, "")
    assert left(home) == []
    assert stack(home, "status").returncode == 1
    assert stack(home, "down").returncode == 0


def test_supervisord_killed(home: Path) -> None:
    """After kill -9 of supervisord the orphans run on; status says so, up starts afresh, and down ends them all."""
    pid_file = home / ".stack/supervisord.pid"
    assert stack(home, "up", "--target", "target.yaml").returncode == 0
    os.kill(int(pid_file.read_text()), signal.SIGKILL)
    assert len(left(home)) >= 5
    assert stack(home, "status").returncode == 1

    up = stack(home, "up", "--target", "target.yaml")
    assert up.returncode == 0, up.stderr
    assert complete() == 200

    os.kill(int(pid_file.read_text()), signal.SIGKILL)
    assert stack(home, "down").returncode == 0
    assert left(home) == []


def test_port_in_use(home: Path) -> None:
    """A port that somebody else has is named, with who has it, before anything is started."""
    with socket.create_server(("127.0.0.1", PORT + 2)):
        refused = stack(home, "up", "--target", "target.yaml")
    assert refused.returncode == 2
    assert f"port {PORT + 2}, for engine-1, is in use by pid {os.getpid()}." in refused.stderr
    assert left(home) == []


def test_program_that_cannot_start(home: Path) -> None:
    """A program that fails is named with its last words, and nothing else is left running."""
    write_target(home, PORT, profile="no-such-card")
    failed = stack(home, "up", "--target", "target.yaml")
    assert failed.returncode == 2
    assert "no-such-card" in failed.stderr
    assert failed.stderr.splitlines()[-1].startswith("engine-")
    assert left(home) == []


def test_usage_errors(home: Path) -> None:
    """What the user can put right is one sentence and exit 2."""
    cases = {
        "unknown key": {"speed": 3},
        "tokenizer.json": {"tokenizer": "nowhere"},
        "run make vllm": {"engine": "vllm"},
    }
    for words, change in cases.items():
        write_target(home, PORT, **change)
        refused = stack(home, "up", "--target", "target.yaml")
        assert refused.returncode == 2
        assert words in refused.stderr
        assert len(refused.stderr.splitlines()) == 1
    assert stack(home, "logs", "nobody").returncode == 2
