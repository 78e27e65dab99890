"""How the player is started: one command, its workers its own to start or, on other machines, to wait for.

A worker on another machine is started there with `python -m locust -f locustfile.py --worker --master-host HOST
--master-port PORT`; it needs this package and the target's secrets in its environment, and gets the rest by message.
"""

import socket
import sys
from pathlib import Path

RUN_DIR = "HARNESS_RUN_DIR"
LOCUSTFILE = Path(__file__).with_name("locustfile.py")


def command(run_dir: Path, workers: int, web_port: int | None = None, master_port: int | None = None) -> list[str]:
    """The player of `run_dir`. With `master_port` its workers come from elsewhere, else it starts them itself.

    `web_port` shows the traffic in locust's web UI on this machine while the run lasts.
    """
    words = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--loglevel", "WARNING", "--only-summary"]
    words += ["--users", str(workers), "--spawn-rate", str(workers)]
    if web_port is None:
        words += ["--headless"]
    else:
        words += ["--autostart", "--web-host", "127.0.0.1", "--web-port", str(web_port)]
    if master_port is not None:
        words += ["--master", "--master-bind-port", str(master_port), "--expect-workers", str(workers)]
    elif workers > 1:
        port = str(_free_port())
        words += ["--processes", str(workers), "--master-bind-host", "127.0.0.1", "--master-bind-port", port]
        words += ["--master-host", "127.0.0.1", "--master-port", port]
    return words


def environment(run_dir: Path) -> dict[str, str]:
    """What the command needs in its environment."""
    return {RUN_DIR: str(run_dir.absolute())}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
