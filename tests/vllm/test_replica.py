"""Real vLLM as the local stack runs it: from the zygote or plainly, and wholly gone when it should be."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

from reference_stack.engine.vllm_replica import PYTHON
from reference_stack.profiles import profile
from tests.support.serving import free_port
from tests.support.waiting import until

pytestmark = pytest.mark.vllm

REPOSITORY = Path(__file__).parents[2]
START_LIMIT_S = 240.0
END_LIMIT_S = 30.0


@dataclass(frozen=True)
class Replica:
    """A running `vllm_replica`."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def ready(self) -> "Replica":
        """Waits until users are served, and the replica knows it."""
        self.until(lambda: self.process.poll() is not None or (self.settled() and self.healthy()), START_LIMIT_S)
        assert self.process.poll() is None, self.log.read_text()
        return self

    def until(self, true: Callable[[], bool], limit_s: float = END_LIMIT_S) -> None:
        """Waits for what the replica's own words explain where it does not come."""
        until(true, lambda: f"what was awaited did not come:\n{self.log.read_text()}", limit_s)

    def settled(self) -> bool:
        return self.says("serving, forked by the zygote") or self.says("plain start")

    def says(self, words: str) -> bool:
        return words in self.log.read_text()

    def alive(self) -> list[psutil.Process]:
        """The processes of the replica's group that run; the dead whom nobody has reaped yet do not count."""
        return [process for process in psutil.process_iter() if in_group(process, self.process.pid)]

    def server(self) -> psutil.Process:
        """The process that users talk to: the one whose child is the engine's core."""
        return next(p for p in self.alive() if any("EngineCore" in child.name() for child in p.children()))

    def gone(self) -> bool:
        return self.process.poll() is not None and not self.alive() and refuses(self.port)

    def complete(self, **body: Any) -> IO[bytes]:
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            json.dumps({"model": "tiny", "prompt": "the river", "max_tokens": 8} | body).encode(),
            {"Content-Type": "application/json"},
        )
        answer: IO[bytes] = urllib.request.urlopen(request, timeout=60)
        return answer


def in_group(process: psutil.Process, group: int) -> bool:
    try:
        return os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False


def refuses(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) != 0


@pytest.fixture(scope="module")
def running() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts processes from the repository, their output in a log, and kills what is left of them."""
    with ExitStack() as started:

        def run(command: list[str | Path], log: Path, **how: Any) -> subprocess.Popen[bytes]:
            with log.open("wb") as output:
                process = subprocess.Popen(command, cwd=REPOSITORY, stdout=output, stderr=subprocess.STDOUT, **how)
            started.callback(process.wait)
            started.callback(process.kill)
            return process

        yield run


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def zygote(running: Callable[..., subprocess.Popen[bytes]], directory: Path) -> subprocess.Popen[bytes]:
    command = [PYTHON, "-m", "reference_stack.engine.zygote", "--socket", directory / "zygote.sock"]
    process: subprocess.Popen[bytes] = running(command, directory / "zygote.log")
    return process


@pytest.fixture(scope="module")
def start(
    running: Callable[..., subprocess.Popen[bytes]], zygote: subprocess.Popen[bytes], directory: Path
) -> Callable[..., Replica]:
    """Starts a replica, from the zygote unless told of another."""

    def replica(socket_path: Path = directory / "zygote.sock", **how: Any) -> Replica:
        port = free_port()
        log = directory / f"{port}.log"
        command = [
            *(sys.executable, "-m", "reference_stack.engine.vllm_replica", "--port", str(port), "--model", "tiny"),
            *("--model-dir", ".cache/tiny", "--max-model-len", "2304", "--zygote", socket_path),
        ]
        return Replica(running(command, log, **how), port, log)

    return replica


@pytest.fixture(scope="module")
def replica(start: Callable[..., Replica]) -> Replica:
    return start().ready()


def test_a_replica_comes_from_the_zygote(replica: Replica) -> None:
    """The zygote's replica needs no plain start, and its group holds its server and its engine's core."""
    assert replica.says("serving, forked by the zygote")
    assert replica.server().pid in {process.pid for process in replica.alive()}


def test_its_cache_is_what_the_profile_calculates(replica: Replica) -> None:
    """vLLM makes as many tokens of its memory as the arithmetic of the profile does (ENG-2)."""
    assert replica.says(f"KV cache size: {profile.load('cpu').kv_tokens:,} tokens")


def test_it_answers_as_long_as_it_is_asked(replica: Replica) -> None:
    """A completion has the asked number of tokens, in text that is whole."""
    answer = json.load(replica.complete(max_tokens=40))
    assert answer["usage"]["completion_tokens"] == 40
    assert answer["choices"][0]["finish_reason"] == "length"
    assert "\ufffd" not in answer["choices"][0]["text"]


def test_it_streams_as_it_speaks(replica: Replica) -> None:
    """A stream has several events, each of visible text (of two tokens when it is late), and ends with [DONE]."""
    lines = [line for line in replica.complete(max_tokens=40, stream=True).read().decode().splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    texts = [json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines[:-1]]
    assert 2 <= len(texts) <= 40
    assert all(text.strip() for text in texts)


@pytest.mark.parametrize("prompt", ["a", "river " * 5, "river " * 1500])
def test_no_length_of_prompt_kills_it(replica: Replica, prompt: str) -> None:
    """The shortest prompt and a long one are answered by the same processes."""
    before = {process.pid for process in replica.alive()}
    assert json.load(replica.complete(prompt=prompt))["usage"]["completion_tokens"] == 8
    assert {process.pid for process in replica.alive()} == before


def test_sigkill_of_the_replica_leaves_nothing_and_it_starts_again(start: Callable[..., Replica]) -> None:
    """After SIGKILL no process of the group runs and the port refuses; the zygote has another replica to give."""
    first = start().ready()
    first.process.kill()
    first.until(first.gone)
    assert start().ready().complete().status == 200  # type: ignore[attr-defined]


def test_sigkill_of_a_frozen_group_leaves_nothing(start: Callable[..., Replica]) -> None:
    """A replica that is stopped dies with its parent all the same."""
    frozen = start().ready()
    os.killpg(frozen.process.pid, signal.SIGSTOP)
    frozen.process.kill()
    frozen.until(frozen.gone)


def test_the_death_of_the_server_ends_the_replica(start: Callable[..., Replica]) -> None:
    """When vLLM's server is killed, its status is passed on and its engine does not outlive it."""
    replica = start().ready()
    replica.server().kill()
    replica.until(replica.gone)
    assert replica.process.returncode == 128 + signal.SIGKILL


def test_sigterm_stops_it_in_order(start: Callable[..., Replica]) -> None:
    """SIGTERM reaches vLLM, which shuts down by itself with status 0."""
    replica = start().ready()
    replica.process.terminate()
    replica.until(replica.gone)
    assert replica.process.returncode == 0
    assert replica.says("Application shutdown complete")


def test_without_a_zygote_it_starts_plainly(start: Callable[..., Replica], tmp_path: Path) -> None:
    """No zygote at the socket: the log says so, vLLM starts plainly, serves, and dies whole."""
    replica = start(tmp_path / "nobody.sock").ready()
    assert replica.says("plain start, because there is no zygote")
    assert replica.complete().status == 200  # type: ignore[attr-defined]
    replica.process.kill()
    replica.until(replica.gone)


def test_a_zygote_of_another_session_is_not_used(start: Callable[..., Replica]) -> None:
    """A replica that could not join the group is not taken: the log says that the start is plain."""
    replica = start(start_new_session=True)
    replica.until(lambda: replica.says("plain start, because the zygote refused"))
    replica.process.kill()
    replica.until(replica.gone)


def test_the_death_of_the_zygote_ends_its_replicas(
    start: Callable[..., Replica], zygote: subprocess.Popen[bytes]
) -> None:
    """A replica whose end nobody could report goes with its zygote (the last test here, for it takes the zygote)."""
    replica = start().ready()
    zygote.kill()
    replica.until(replica.gone)
    assert replica.process.returncode != 0
