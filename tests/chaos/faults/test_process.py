"""Faults of processes, on two toy replicas under a real supervisord: each has a child that has left its group."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness import processes
from harness.chaos.fault import Refused, Unproven
from harness.chaos.faults.process import CrashLoop, EngineFrozen, GatewayRestarted, ReplicaKilled, ServerCrashed
from harness.targets import base, url
from harness.targets.base import Target
from harness.targets.local import Process, Stack
from tests.chaos.faults.steps import broken, mended
from tests.support.waiting import until

pytestmark = pytest.mark.e2e

TOY = Path(__file__).parents[1] / "toys" / "engine.py"
PORT = 21160
LIMIT_S = 30.0
CONFIG = """\
[unix_http_server]
file={state}/supervisor.sock
[supervisord]
logfile={state}/supervisord.log
pidfile={state}/supervisord.pid
[rpcinterface:supervisor]
supervisor.rpcinterface_factory=supervisor.rpcinterface:make_main_rpcinterface
"""
PROGRAM = """
[program:{name}]
command={python} {toy} {port}
autorestart=true
startretries=1000000
killasgroup=true
stopasgroup=true
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two toy replicas and a toy gateway under supervisord; nothing of them is left after the tests."""
    home = tmp_path_factory.mktemp("stack")
    state = home / ".stack"
    state.mkdir()
    config = CONFIG.format(state=state)
    for port, name in enumerate(("gateway", "engine-0", "engine-1"), PORT):
        config += PROGRAM.format(name=name, python=sys.executable, toy=TOY, port=port)
    (state / "supervisord.conf").write_text(config)
    (home / "target.yaml").write_text(
        f"kind: local\nengine: sim\nurl: http://127.0.0.1:{PORT}\nmodel: tiny\ntokenizer: tiny\ngpu: none\n"
        f"engines: [http://127.0.0.1:{PORT + 1}, http://127.0.0.1:{PORT + 2}]\n"
    )
    command = [sys.executable, "-m", "supervisor.supervisord", "--nodaemon", "-c", str(state / "supervisord.conf")]
    with open(state / "out", "wb") as out:
        daemon = subprocess.Popen(command, env={**os.environ, "HARNESS_STACK": str(state)}, stdout=out, stderr=out)
    yield home
    daemon.terminate()
    daemon.wait(LIMIT_S)
    for pid, _ in marked(state):
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def target(home: Path, monkeypatch: pytest.MonkeyPatch) -> Target:
    """The toy stack of the working directory, once all of it answers."""
    monkeypatch.chdir(home)
    target = base.load("target.yaml")
    until(lambda: all(url.serves(target, each) for each in (target.url, *target.engines)), "all answer")
    return target


def marked(state: Path) -> list[Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("HARNESS_STACK") == str(state) and (since := processes.started(process.pid)):
                found.append((process.pid, since))
        except psutil.Error:
            continue
    return found


def is_new(ready: list[dict[str, Any]], state: Mapping[str, Any]) -> bool:
    (one,) = ready
    return one["replica"] == state["replica"] and one["pid"] != state["pid"] and one["at_s"] <= time.monotonic()


def test_replica_killed(target: Target) -> None:
    """The server, its child and the one that left the group are gone; a new process answers."""
    fault = ReplicaKilled()
    state, evidence = broken(fault, target)
    assert state["replica"] == "engine-0"
    assert len(evidence["gone"]) == 3
    assert not any(processes.lives(*one) for one in state["tree"])
    assert is_new(mended(fault, target, state)["ready"], state)


def test_named(target: Target) -> None:
    """The replica that is named is hit, no other."""
    fault = ReplicaKilled(choose="engine-1")
    other = Stack().replicas(target)[0]
    state, _ = broken(fault, target)
    assert state["replica"] == "engine-1"
    mended(fault, target, state)
    assert Stack().replicas(target)[0] == other


def test_server_crashed(target: Target) -> None:
    """Only the server ends; its orphans live until the undo, which ends them and leaves the new replica alone."""
    fault = ServerCrashed()
    state, evidence = broken(fault, target)
    assert len(evidence["orphans"]) == 2
    assert all(processes.lives(*one) for one in evidence["orphans"])
    healed = mended(fault, target, state)
    assert is_new(healed["ready"], state)
    assert healed["orphans_swept"] == evidence["orphans"]
    assert not any(processes.lives(*one) for one in evidence["orphans"])


def test_engine_frozen(target: Target) -> None:
    """All its processes stand still and nothing is answered; then the same processes go on."""
    fault = EngineFrozen()
    state, evidence = broken(fault, target)
    assert set(evidence["states"].values()) == {"T"}
    assert len(evidence["states"]) == 3
    with pytest.raises(Unproven, match="still stopped"):
        fault.undone(target, state)
    healed = mended(fault, target, state)
    assert set(healed["states"].values()) == {"S"}
    assert healed["ready"][0]["pid"] == state["pid"]


def test_crash_loop(target: Target) -> None:
    """What is started is killed until the undo, and then it stays."""
    fault = CrashLoop(for_s=60.0)
    state, evidence = broken(fault, target)
    assert evidence["supervisord"] == "BACKOFF"
    assert not url.serves(target, state["url"])
    healed = mended(fault, target, state)
    assert is_new(healed["ready"], state)
    assert not Path(state["permit"]).exists()
    assert not [one for one in psutil.process_iter(["cmdline"]) if state["permit"] in (one.info["cmdline"] or [])]


def test_crash_loop_ends_by_itself(target: Target) -> None:
    """Without an undo the replica is back soon after its time."""
    fault = CrashLoop(for_s=2.0)
    state, _ = broken(fault, target)
    until(lambda: url.serves(target, state["url"]), "the replica is back")
    mended(fault, target, state)


def test_gateway_restarted(target: Target) -> None:
    """The gateway's process is another one, and serves."""
    fault = GatewayRestarted()
    state, _ = broken(fault, target)
    assert is_new(mended(fault, target, state)["ready"], state)


def test_too_few(target: Target) -> None:
    """No fault that would leave fewer healthy replicas than asked, or hits one that is not there or not healthy."""
    with pytest.raises(Refused, match="2 of 2 replicas answer, so 1 would be left, not 2"):
        ReplicaKilled(leave=2).resolve(target)
    with pytest.raises(Refused, match="engine-1"):
        ReplicaKilled(choose="engine-7").resolve(target)
    frozen = EngineFrozen()
    state, _ = broken(frozen, target)
    try:
        with pytest.raises(Refused, match="1 of 2 replicas answer, so 0 would be left, not 1"):
            ReplicaKilled().resolve(target)
        with pytest.raises(Refused, match="not among them"):
            ReplicaKilled(choose="engine-0", leave=0).resolve(target)
    finally:
        mended(frozen, target, state)


def test_signals_that_do_nothing(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill that kills nobody is no fault."""
    monkeypatch.setattr("harness.chaos.faults.process._signal", lambda whom, number: None)
    monkeypatch.setattr("harness.chaos.faults.process.APPLIED_LIMIT_S", 0.2)
    for fault in (ReplicaKilled(), ServerCrashed(), EngineFrozen()):
        with pytest.raises(Unproven):
            broken(fault, target)
