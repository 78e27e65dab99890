"""The engines that the contract binds: the simulated one, and real vLLM on CPU. One suite, no exceptions for either."""

import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.serving import free_port
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
TINY = ROOT / ".cache" / "tiny"
VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
MAX_MODEL_LEN = 2304
READY_LIMIT_S = {"sim": 60, "vllm": 300}


@dataclass(frozen=True)
class Reply:
    """An HTTP answer, read to its end."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


@dataclass(frozen=True)
class Engine:
    """A running engine that serves the tiny model, and what a client can do with it."""

    kind: str
    port: int
    max_model_len: int = MAX_MODEL_LEN

    @contextmanager
    def asked(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Iterator[http.client.HTTPResponse]:
        """A request under way; leaving closes the connection. A body that is not bytes is sent as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            connection.request("POST", path, data, {"Content-Type": "application/json"} if headers is None else headers)
            yield connection.getresponse()
        finally:
            connection.close()

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Reply:
        """POST and read all of the answer."""
        with self.asked(path, body, headers) as response:
            return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())

    def get(self, path: str) -> Reply:
        """GET and read all of the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def sample(self, name: str) -> float:
        """The value of a metric without further labels, read now."""
        for line in self.get("/metrics").body.decode().splitlines():
            if line.startswith(f"{name}{{"):
                return float(line.rsplit(" ", 1)[1])
        raise AssertionError(f"no sample of {name}")

    def count(self, asked: dict[str, Any]) -> int:
        """The prompt tokens of a request, as /tokenize counts them."""
        return int(self.post("/tokenize", asked).json["count"])


@pytest.fixture(scope="session")
def tiny() -> Path:
    """The tiny model, built when missing."""
    if not (TINY / "tokenizer.json").exists():
        words = ROOT / "harness" / "traffic" / "words.txt"
        command = [sys.executable, "-m", "reference_stack.engine.tiny", "--out", str(TINY), "--text", str(words)]
        subprocess.run(command, cwd=ROOT, check=True)
    return TINY


@pytest.fixture(scope="session", params=["sim", pytest.param("vllm", marks=pytest.mark.vllm)])
def engine(request: pytest.FixtureRequest, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Each engine in turn, started for the session and killed with all of its processes after it."""
    kind = request.param
    if kind == "vllm" and not VLLM_PYTHON.exists():
        pytest.fail(
            "Real vLLM is not installed: there is no .venv-vllm. Run `make vllm`, then try again.", pytrace=False
        )
    log = tmp_path_factory.mktemp(kind) / "engine.log"
    started = Engine(kind, free_port())
    command = [sys.executable, "-m", *COMMANDS[kind](tiny, log.parent), "--port", str(started.port)]
    command += ["--model", "tiny", "--max-model-len", str(MAX_MODEL_LEN)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)
    try:

        def said() -> str:
            return f"{kind} did not start:\n{log.read_text()[-3000:]}"

        until(lambda: process.poll() is not None or healthy(started), said, READY_LIMIT_S[kind])
        assert process.poll() is None, said()
        yield started
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


COMMANDS: dict[str, Callable[[Path, Path], list[str]]] = {
    "sim": lambda tiny, state: [
        *("reference_stack.engine.simulated", "--tokenizer", str(tiny)),
        *("--profile", "h100-8b", "--device", str(state / "GPU-0.json")),
    ],
    "vllm": lambda tiny, state: ["reference_stack.engine.vllm_replica", "--model-dir", str(tiny)],
}


def healthy(engine: Engine) -> bool:
    """The engine answers /health."""
    try:
        return engine.get("/health").status == 200
    except OSError:
        return False
