"""The door of the orchestrator: python -m reference_stack.orchestrator CONFIG.

Everything that can be known to be wrong is found before a worker starts: exit 2 and one sentence. Then it keeps its
workers running: one that dies is replaced. SIGHUP replaces them one by one, SIGTERM ends.
"""

import argparse
import os
import socket
import sys
import tempfile
from pathlib import Path

import uvicorn
from uvicorn.supervisors import Multiprocess

from reference_stack.orchestrator import config as configuration
from reference_stack.orchestrator import keys, retrieval
from reference_stack.orchestrator.config import CONFIG_VARIABLE, Config, UsageError
from reference_stack.orchestrator.counts import SHARED_DIRECTORY

GRACE_S = 30  # for streams that are open when a worker is to end
START_LIMIT_S = 20  # for a worker to begin on a busy machine; one that stands still for as long is replaced


def main() -> int:
    """Serve until told to stop; the exit status."""
    parser = argparse.ArgumentParser(prog="orchestrator", description="Serve chats in front of a gateway.")
    parser.add_argument("config", type=Path, metavar="CONFIG", help="YAML file")
    path = parser.parse_args().config
    try:
        config = check(path)
        listening = bind(config, path)
    except UsageError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    with tempfile.TemporaryDirectory(prefix="orchestrator-") as shared:
        os.environ |= {CONFIG_VARIABLE: str(path.resolve()), SHARED_DIRECTORY: shared}
        serve(config, listening)
    return 0


def check(path: Path) -> Config:
    """The configuration, with every file that it names read once. UsageError."""
    config = configuration.read(path)
    keys.read(config.keys, list(config.tiers))
    if config.retrieval and config.retrieval.documents:
        retrieval.read_documents(config.retrieval.documents)
    return config


def bind(config: Config, path: Path) -> socket.socket:
    """The socket that all workers accept from. UsageError when the port is taken."""
    family = socket.AF_INET if config.host.version == 4 else socket.AF_INET6
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((str(config.host), config.port))
    except OSError as error:
        listening.close()
        raise UsageError(f"{path}: port: {config.host}:{config.port} cannot be used: {error.strerror}.") from None
    return listening


def serve(config: Config, listening: socket.socket) -> None:
    """Run the workers until SIGTERM or SIGINT."""
    options = uvicorn.Config(
        "reference_stack.orchestrator.app:worker",
        factory=True,
        workers=config.workers,
        loop="asyncio",
        http="httptools",
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=GRACE_S,
        timeout_worker_healthcheck=START_LIMIT_S,
    )
    Multiprocess(options, sockets=[listening]).run()


if __name__ == "__main__":
    sys.exit(main())
