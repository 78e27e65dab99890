"""The player as it is started: alone, with workers, with workers on other machines; stopped, orphaned and killed."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from running import process, processes_of
from scripted import Scripted, lay_out, set_origin

from harness import timeline
from harness.drivers import process as player
from harness.drivers.part import NICE
from harness.log import Blocks, read_log
from harness.model import Event, Outcome, Request
from tests.support.serving import free_port
from tests.support.waiting import until

ASKED = Request(index=0, due_s=0.0, class_name="short", text=(0, 5), max_tokens=8, stream=True)
SHORT = [replace(ASKED, index=k, due_s=k * 0.01) for k in range(101)]
LONG = [replace(ASKED, index=k, due_s=k * 0.05) for k in range(2400)]
READY_S = 60


@pytest.fixture(scope="module")
def server() -> Iterator[Scripted]:
    with Scripted(token_s=0.002) as running:
        yield running


def laid_out(tmp_path: Path, server: Scripted, requests: list[Request]) -> Path:
    return lay_out(tmp_path / "run", f"http://127.0.0.1:{server.port}", requests, 5.0)


def started(run_dir: Path, workers: int = 1, master_port: int | None = None) -> subprocess.Popen[str]:
    command = player.command(run_dir, workers, master_port=master_port)
    environment = {**os.environ, **player.environment(run_dir)}
    return process(command, env=environment, stdin=subprocess.DEVNULL)


def events(run_dir: Path, kind: str) -> list[Event]:
    found = [entry for path in run_dir.glob("log.*.jsonl") for entry in read_log(path, [])]
    return [entry for entry in found if isinstance(entry, Event) and entry.kind == kind]


def observed(run_dir: Path) -> int:
    return sum(len(records) for path in run_dir.glob("log.*.bin") for records, _ in Blocks(path).new())


def begun(run_dir: Path) -> None:
    until(lambda: events(run_dir, "ready"), "the player is ready", READY_S)
    set_origin(run_dir)


def assert_all_seen(run_dir: Path, workers: int) -> None:
    seen = timeline.read(run_dir)
    assert seen.seen.all()
    assert seen.damage == []
    assert set(seen.observations["outcome"]) == {Outcome.OK}
    assert (seen.observations["worker"] == seen.observations["index"] % workers).all()
    (stopped,) = events(run_dir, "stopped")
    assert stopped.detail == {"sent": len(SHORT), "done": len(SHORT), "open": 0, "why": "finished"}
    (begun,) = events(run_dir, "started")
    assert begun.detail["nice"] == NICE or any(note.name == "priority" for note in events(run_dir, "note"))
    assert set(seen.series("player.cpu_share")) == {(("worker", str(k)),) for k in range(workers)}


@pytest.mark.parametrize("workers", [1, 2])
def test_any_number_of_workers_plays_the_same_plan(tmp_path: Path, server: Scripted, workers: int) -> None:
    """Every request is sent once, by the worker that its index names, and the records are of one run."""
    run_dir = laid_out(tmp_path, server, SHORT)
    with started(run_dir, workers) as running:
        begun(run_dir)
        assert running.wait(60) == 0
    assert_all_seen(run_dir, workers)


def test_a_worker_without_the_run_directory_is_given_what_it_needs(tmp_path: Path, server: Scripted) -> None:
    """It plays its part from the master's files, and all that it saw ends in the master's run directory."""
    run_dir, port = laid_out(tmp_path, server, SHORT), free_port()
    elsewhere = {name: value for name, value in os.environ.items() if name != player.RUN_DIR}
    command = [sys.executable, "-m", "locust", "-f", str(player.LOCUSTFILE), "--headless", "--worker"]
    command += ["--master-host", "127.0.0.1", "--master-port", str(port)]
    with (
        started(run_dir, 2, port) as master,
        process(command, env=elsewhere, cwd=tmp_path),
        process(command, env=elsewhere, cwd=tmp_path),
    ):
        begun(run_dir)
        assert master.wait(60) == 0
    assert_all_seen(run_dir, 2)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("asked_by", [signal.SIGTERM, signal.SIGINT])
def test_a_player_that_is_asked_to_stop_keeps_all_it_has(
    tmp_path: Path, server: Scripted, workers: int, asked_by: signal.Signals
) -> None:
    """It sends nothing more, writes what it sent, and says how many and why."""
    run_dir = laid_out(tmp_path, server, LONG)
    with started(run_dir, workers) as running:
        begun(run_dir)
        until(lambda: observed(run_dir) >= 20, "twenty observations", 30)
        running.send_signal(asked_by)
        assert running.wait(30) == 0
    seen = timeline.read(run_dir)
    (stopped,) = events(run_dir, "stopped")
    assert stopped.detail["why"] == "asked"
    assert stopped.detail["sent"] == seen.seen.sum() < len(LONG)
    assert seen.damage == []
    assert seen.seen[: seen.seen.sum()].all()


def test_answers_that_are_open_when_the_run_ends_are_recorded_as_open(tmp_path: Path, server: Scripted) -> None:
    """What was sent and not answered is no loss and no failure: it is OPEN."""
    requests = [replace(request, path="/silent") for request in SHORT]
    run_dir = laid_out(tmp_path, server, requests)
    with started(run_dir) as running:
        begun(run_dir)
        until(lambda: timeline.read(run_dir).series("player.sent"), "a reading", 30)
        until(lambda: server.seen["100"], "the last request is sent", 30)
        running.terminate()
        assert running.wait(30) == 0
    outcomes = timeline.read(run_dir).observations["outcome"]
    assert (outcomes == Outcome.OPEN).all()


def test_no_player_outlives_its_conductor(tmp_path: Path, server: Scripted) -> None:
    """When whoever started it is killed, the player and its workers stop by themselves and keep what they have."""
    run_dir = laid_out(tmp_path, server, LONG)
    conductor = (
        "import os, subprocess, sys\n"
        "from pathlib import Path\n"
        "from harness.drivers import process\n"
        "run_dir = Path(sys.argv[1])\n"
        "subprocess.Popen(process.command(run_dir, 2), env={**os.environ, **process.environment(run_dir)}).wait()\n"
    )
    with process([sys.executable, "-c", conductor, str(run_dir)]) as running:
        begun(run_dir)
        until(lambda: observed(run_dir) >= 20, "twenty observations", 30)
        os.kill(running.pid, signal.SIGKILL)
        until(lambda: not processes_of(str(run_dir)), "every process of the player is gone", 30)
    assert timeline.read(run_dir).damage == []
    assert events(run_dir, "stopped")[0].detail["why"] == "asked"


def test_a_worker_that_dies_ends_the_run_as_failed(tmp_path: Path, server: Scripted) -> None:
    """Half a plan is no plan: the master says which worker was lost, and its exit code is not 0."""
    run_dir = laid_out(tmp_path, server, LONG)
    with started(run_dir, 2) as running:
        begun(run_dir)
        until(lambda: observed(run_dir) >= 20, "twenty observations", 30)
        worker = next(pid for pid in processes_of(str(run_dir)) if pid != running.pid)
        os.kill(worker, signal.SIGKILL)
        assert running.wait(60) == 1
    assert "lost worker" in events(run_dir, "stopped")[0].detail["why"]


def test_a_full_disk_is_an_error_and_no_silent_loss(tmp_path: Path, server: Scripted) -> None:
    """When the records can no longer be written the player says so and fails."""
    run_dir = laid_out(tmp_path, server, SHORT)
    (run_dir / "log.player-0.bin").symlink_to("/dev/full")
    with started(run_dir) as running:
        assert running.wait(60) == 1
        assert "No space left on device" in (running.stdout.read() if running.stdout else "")
