"""The zygote: a process that has imported vLLM once and forks a replica whenever it is asked for one.

    .venv-vllm/bin/python -m reference_stack.engine.zygote --socket .stack/zygote.sock

Importing vLLM costs every new process about fifteen seconds of CPU; a fork costs none of it. A client (`vllm_replica`)
connects, sends vLLM's arguments with its own standard output, and holds the connection: on it comes one line when the
replica runs and one when it is over. The replica joins the client's process group, so that one group is one replica.

It refuses to serve, to restart or to watch: those are the client's. It leans on one thing that vLLM does not promise,
that its processes may be forked, so vLLM is pinned and a client can always start vLLM plainly instead.
"""

import argparse
import ctypes
import importlib
import json
import multiprocessing
import os
import selectors
import signal
import socket
import sys
from pathlib import Path
from typing import Any

SERVER = "vllm.entrypoints.launchers.api_server.entry"
REGISTRY = "vllm.model_executor.models"
MODEL = "vllm.model_executor.models.llama"
ARCHITECTURE = "LlamaForCausalLM"

# What a replica needs and would otherwise import by itself when it starts.
IMPORTS = (
    SERVER,
    "vllm.v1.engine.core",
    "vllm.v1.engine.async_llm",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.attention.backends.cpu_attn",
)

# One thread, no pinning and the engine's core without worker processes: two replicas share two cores (facts.md, vLLM).
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
PR_SET_PDEATHSIG = 1  # linux/prctl.h
REQUEST_BYTES = 65_536
REQUEST_LIMIT_S = 5.0


def main() -> None:
    """Listen at once, import vLLM, fork a replica for every client until stopped."""
    parser = argparse.ArgumentParser(description="Fork vLLM replicas from one process that has imported vLLM.")
    parser.add_argument("--socket", type=Path, required=True, help="Unix socket to listen on")
    path: Path = parser.parse_args().socket

    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()  # before the import, so that a client that comes early waits for its end
        os.environ.update(ENVIRONMENT)
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it overrides --kv-cache-memory-bytes, and crashes when empty
        import_vllm()
        sys.stdout.write(f"zygote: vLLM is imported; replicas from {path}\n")
        sys.stdout.flush()  # what is left in the buffer would be written by every replica
        arguments = serve(listener)
    run_server(arguments)


def import_vllm() -> None:
    """Import what a replica needs, and register the model's class: by name, vLLM would look it up in a new process."""
    for module in IMPORTS:
        importlib.import_module(module)
    model = getattr(importlib.import_module(MODEL), ARCHITECTURE)
    importlib.import_module(REGISTRY).ModelRegistry.register_model(ARCHITECTURE, model)


def serve(listener: socket.socket) -> list[str]:
    """Fork a replica for each client and tell it of the end. Returns in the replicas alone, with their arguments."""
    replicas: dict[int, tuple[int, socket.socket]] = {}  # by pidfd, which is readable when the process has ended
    with selectors.DefaultSelector() as events:
        events.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in events.select():
                if key.fd in replicas:
                    events.unregister(key.fd)
                    bury(key.fd, *replicas.pop(key.fd))
                    continue
                connection, _ = listener.accept()
                connection.settimeout(REQUEST_LIMIT_S)
                try:
                    message, streams, _, _ = socket.recv_fds(connection, REQUEST_BYTES, maxfds=2)
                    request = json.loads(message)
                except (OSError, ValueError):
                    connection.close()
                    continue
                pid = os.fork()
                if pid == 0:
                    let_go(connection, replicas)
                    take_streams(streams)
                    return list(request["arguments"])
                for stream in streams:
                    os.close(stream)
                if enrol(pid, request["group"], connection):
                    pidfd = os.pidfd_open(pid)
                    replicas[pidfd] = pid, connection
                    events.register(pidfd, selectors.EVENT_READ)


def enrol(pid: int, group: int, connection: socket.socket) -> bool:
    """Put the replica into its client's process group, then tell the client; a replica of nobody's is killed."""
    try:
        os.setpgid(pid, group)
        connection.send(json.dumps({"pid": pid}).encode())
        return True
    except OSError as refused:  # a group of another session, or a client that has died
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        tell(connection, {"error": f"process group {group}: {refused.strerror}"})
        connection.close()
        return False


def bury(pidfd: int, pid: int, connection: socket.socket) -> None:
    """Reap a replica that has ended and tell its client how."""
    os.close(pidfd)
    _, status = os.waitpid(pid, 0)
    tell(connection, {"exited": os.waitstatus_to_exitcode(status)})
    connection.close()


def tell(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send one message; a client that is gone needs none."""
    try:
        connection.send(json.dumps(message).encode())
    except OSError:
        pass


def let_go(connection: socket.socket, replicas: dict[int, tuple[int, socket.socket]]) -> None:
    """In a replica: close what is the zygote's, or clients would wait for an end that it holds open."""
    connection.close()
    for pidfd, (_, other) in replicas.items():
        os.close(pidfd)
        other.close()


def take_streams(streams: list[int]) -> None:
    """In a replica: write to the client's standard output and error, and read from nobody."""
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    for number, stream in zip((1, 2), streams, strict=True):
        os.dup2(stream, number)
        os.close(stream)


def run_server(arguments: list[str]) -> None:
    """In a replica: be vLLM's server. Its own processes are forked too, which vLLM on CPU would refuse to do."""
    fork = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda method=None: fork  # type: ignore[assignment]  # an overload for each method
    os.register_at_fork(after_in_child=drop_listeners)
    os.register_at_fork(after_in_child=die_with_parent)
    die_with_parent()
    sys.argv = ["vllm", *arguments]
    sys.modules[SERVER].main()


def drop_listeners() -> None:
    """In the engine's core: let go of the server's port, or it would accept and hang after the server's death.

    The port is the one internet socket that the server has when it forks.
    """
    with open(os.devnull, "rb") as nothing:
        for descriptor in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
            try:
                with socket.socket(fileno=os.dup(descriptor)) as candidate:
                    internet = candidate.family in (socket.AF_INET, socket.AF_INET6)
            except OSError:  # not a socket
                continue
            if internet:
                os.dup2(nothing.fileno(), descriptor)  # not closed: a Python object still owns the number


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that forked it ends: nobody else knows of it then."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
