"""One replica of real vLLM, as a process in the foreground whose process group is the whole replica.

    python -m reference_stack.engine.vllm_replica --port 8081 --model tiny --model-dir .cache/tiny --max-model-len 2304

A replica comes from the zygote in seconds when there is one, and from a plain start of vLLM otherwise; a line of the
log says why. It writes to this process's output, gets its SIGTERM and SIGINT, and ends with it: however this process
dies, what is left of the group is killed, for vLLM's engine would outlive its server for ever (vllm#55510). On a
machine with a GPU the replica serves the profile's model. It refuses to restart what died: that is the supervisor's.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from reference_stack.engine.zygote import ENVIRONMENT, SERVER
from reference_stack.profiles import profile
from reference_stack.profiles.arguments import settings
from reference_stack.profiles.document import ProfileError

PYTHON = Path(".venv-vllm/bin/python")
GPU = Path("/dev/nvidia0")

ZYGOTE_LIMIT_S = 10.0  # for its socket to appear; a client that is connected then waits for the import
READY_LIMIT_S = 120.0
POLL_S = 0.25
MESSAGE_BYTES = 4096


class NoReplicaError(Exception):
    """The zygote gave no replica that serves; the message says why."""


def main() -> None:
    """Run one replica and exit with its status (128 + n when signal n ended it)."""
    options = parse()
    if not PYTHON.exists():
        sys.exit(f"vllm_replica: no {PYTHON}: run scripts/setup-vllm first")
    try:
        command = arguments(options, GPU.exists())
    except ProfileError as error:
        sys.exit(f"vllm_replica: {error}")
    lead_group()
    leash()
    status = None
    if options.zygote and not GPU.exists():
        try:
            status = forked(options.zygote, command, options.port)
        except NoReplicaError as reason:
            say(f"plain start, because {reason}")
    if status is None:
        status = started(command)
    sys.exit(status if status >= 0 else 128 - status)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run one replica of real vLLM.")
    parser.add_argument("--port", type=int, required=True, help="port on 127.0.0.1")
    parser.add_argument("--model", required=True, help="the name that users ask for")
    parser.add_argument("--model-dir", required=True, help="the model to serve on CPU")
    parser.add_argument("--max-model-len", type=int, required=True, help="prompt and answer together, in tokens")
    parser.add_argument("--profile", default="h100-8b", help="on a GPU: the profile whose model and settings to serve")
    parser.add_argument("--zygote", type=Path, help="socket of the process to fork from")
    return parser.parse_args()


def arguments(options: argparse.Namespace, on_gpu: bool) -> list[str]:
    """The arguments of vLLM: on a GPU the profile's model and settings, else the tiny model's for a CPU."""
    chosen = profile.load(options.profile if on_gpu else "cpu", options.max_model_len)
    return [
        *("--model", chosen.checkpoint if on_gpu else options.model_dir),
        *("--served-model-name", options.model),
        *("--host", "127.0.0.1"),
        *("--port", str(options.port)),
        "--disable-uvicorn-access-log",
        *settings(chosen),
    ]


def lead_group() -> None:
    """Be a group of our own, so that killing the group kills a replica and nobody else."""
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)


def leash() -> None:
    """Leave a small process outside the group that kills the group when this process is gone, SIGKILL included."""
    group = os.getpgrp()
    held, holder = os.pipe()  # the kernel closes our end, whatever we die of
    if os.fork():
        os.close(held)
        return
    os.setpgid(0, 0)
    os.close(holder)
    os.read(held, 1)
    try:
        os.killpg(group, signal.SIGKILL)
    finally:
        os._exit(0)


def started(command: list[str]) -> int:
    """Start vLLM plainly and wait for its end; returns its exit status, negative for a signal."""
    wanted = {} if GPU.exists() else ENVIRONMENT
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_CPU_KVCACHE_SPACE"}
    with subprocess.Popen([PYTHON, "-m", SERVER, *command], env=environment | wanted) as server:
        forward_signals(server.pid)
        return server.wait()


def forked(zygote: Path, command: list[str], port: int) -> int:
    """Have the zygote fork a replica into our group and wait for its end; returns its exit status.

    Raises NoReplicaError when there is no zygote, or its replica never served; nothing of the replica is then left.
    Until the replica serves, SIGTERM ends us at once, and so the replica.
    """
    with connect(zygote) as connection:
        request = {"arguments": command, "group": os.getpgrp()}
        socket.send_fds(connection, [json.dumps(request).encode()], [1, 2])
        answer = receive(connection)
        if "pid" not in answer:
            raise NoReplicaError(f"the zygote refused: {answer.get('error', 'it is gone')}")
        try:
            wait_until_ready(connection, port)
        except NoReplicaError:
            kill_rest_of_group()
            raise
        forward_signals(answer["pid"])
        say("serving, forked by the zygote")
        ended = receive(connection)
    if "exited" not in ended:
        sys.exit("vllm_replica: the zygote died, and the replica goes with it")
    return int(ended["exited"])


def connect(zygote: Path) -> socket.socket:
    """A connection to the zygote, which may itself be just starting."""
    deadline = time.monotonic() + ZYGOTE_LIMIT_S
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(str(zygote))
            return connection
        except OSError as refused:
            connection.close()
            if time.monotonic() > deadline:
                raise NoReplicaError(f"there is no zygote at {zygote} ({refused.strerror})") from refused
            time.sleep(POLL_S)


def receive(connection: socket.socket) -> dict[str, Any]:
    """The zygote's next message; empty when the zygote is gone. Raises TimeoutError as the connection is set."""
    try:
        message = connection.recv(MESSAGE_BYTES)
    except ConnectionError:
        return {}
    return dict(json.loads(message)) if message else {}


def wait_until_ready(connection: socket.socket, port: int) -> None:
    """Wait until the replica answers. Raises NoReplicaError when it ends first or takes too long."""
    deadline = time.monotonic() + READY_LIMIT_S
    connection.settimeout(POLL_S)
    while not answers(port):
        if time.monotonic() > deadline:
            raise NoReplicaError(f"the forked replica did not serve within {READY_LIMIT_S:.0f} s")
        try:
            ended = receive(connection)
        except TimeoutError:
            continue
        raise NoReplicaError(f"the forked replica ended before it served (status {ended.get('exited', 'unknown')})")
    connection.settimeout(None)


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def kill_rest_of_group() -> None:
    """Kill every other process of our group."""
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.getpgid(pid := int(entry.name)) == os.getpgrp() and pid != os.getpid():
                os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def say(message: str) -> None:
    """One line in the replica's log."""
    sys.stdout.write(f"vllm_replica: {message}\n")
    sys.stdout.flush()


def forward_signals(pid: int) -> None:
    """From now on, what asks us to stop asks the server to stop."""

    def forward(number: int, _frame: object) -> None:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass

    signal.signal(signal.SIGTERM, forward)
    signal.signal(signal.SIGINT, forward)


if __name__ == "__main__":
    main()
