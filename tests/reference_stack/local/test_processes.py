"""Finding and ending a stack's processes, with processes of the test's own."""

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
from reference_stack.local.supervisor import MARK

Started = subprocess.Popen[bytes]


@pytest.fixture
def started() -> Iterator[list[Started]]:
    """Processes that the test started; those still there at its end are killed."""
    all_started: list[Started] = []
    yield all_started
    for process in all_started:
        process.kill()
        process.wait()


def start(started: list[Started], code: str, mark: Path | None = None, session: bool = False) -> Started:
    """A Python process, ready when it has said so."""
    environment = {**os.environ, MARK: str(mark)} if mark else dict(os.environ)
    command = [sys.executable, "-c", f"{code}\nprint('ready', flush=True)\nimport time; time.sleep(60)"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, start_new_session=session)
    started.append(process)
    assert process.stdout
    assert process.stdout.readline() == b"ready\n"
    return process


def pids(state: Path) -> set[int]:
    return {process.pid for process in processes.of_stack(state)}


def test_marked_processes_are_found(started: list[Started], tmp_path: Path) -> None:
    """The mark makes a process ours; another stack's mark, or none, does not."""
    ours = start(started, "", mark=tmp_path)
    start(started, "", mark=tmp_path / "other")
    start(started, "")
    assert pids(tmp_path) == {ours.pid}


def test_child_that_lost_the_mark_is_found(started: list[Started], tmp_path: Path) -> None:
    """A child with a clean environment, in a session of its own, belongs to the one that started it."""
    code = "import subprocess; subprocess.Popen(['sleep', '60'], env={}, start_new_session=True)"
    parent = start(started, code, mark=tmp_path)
    child = psutil.Process(parent.pid).children()[0]
    try:
        assert pids(tmp_path) == {parent.pid, child.pid}
    finally:
        child.kill()


def test_session_is_found_after_its_leader(started: list[Started], tmp_path: Path) -> None:
    """What supervisord's session holds is ours after supervisord itself was killed."""
    code = (
        "import subprocess; print(subprocess.Popen(['sleep', '60'], env={}, stdout=subprocess.DEVNULL).pid, flush=True)"
    )
    environment = {**os.environ, MARK: str(tmp_path)}
    command = [sys.executable, "-c", f"{code}\nimport time; time.sleep(60)"]
    leader = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, start_new_session=True)
    started.append(leader)
    assert leader.stdout
    orphan = int(leader.stdout.readline())
    (tmp_path / "supervisord.pid").write_text(str(leader.pid))
    leader.kill()
    leader.wait()
    try:
        assert pids(tmp_path) == {orphan}
    finally:
        os.kill(orphan, signal.SIGKILL)


def test_stale_pid_file_hits_nobody(started: list[Started], tmp_path: Path) -> None:
    """A pid that has gone to a stranger since does not make the stranger's session ours."""
    stranger = start(started, "", session=True)
    (tmp_path / "supervisord.pid").write_text(str(stranger.pid))
    assert pids(tmp_path) == set()


def test_caller_is_spared(tmp_path: Path, started: list[Started]) -> None:
    """A caller that runs under the mark itself does not find, and end, itself."""
    code = (
        "import os; from pathlib import Path; from reference_stack.local import processes\n"
        f"print([p.pid for p in processes.of_stack(Path({str(tmp_path)!r}))])"
    )
    environment = {**os.environ, MARK: str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True)
    assert done.stdout == b"[]\n"


def test_end_is_the_end(started: list[Started], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ignores SIGTERM is killed; when `end` returns nothing lives."""
    monkeypatch.setattr(processes, "PATIENCE_S", 0.5)
    start(started, "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)", mark=tmp_path)
    start(started, "", mark=tmp_path)
    processes.end(processes.of_stack(tmp_path))
    assert pids(tmp_path) == set()
    assert {process.wait() for process in started} == {-signal.SIGKILL, -signal.SIGTERM}


def test_who_listens() -> None:
    """The owner of a listening port is named; a free port has none."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert processes.listening_on(port) == os.getpid()
    assert processes.listening_on(port) is None
