"""supervisord's door: its configuration as text, and the few questions we ask it over its Unix socket.

It keeps processes running and restarts what dies; whether they are any good is for others to judge.
"""

import http.client
import os
import shlex
import sys
import xmlrpc.client
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from supervisor.xmlrpc import SupervisorTransport

from reference_stack.local.programs import Program

MARK = "HARNESS_STACK"  # every process of a stack carries this variable: the state directory it belongs to
SOCKET_PATH_LIMIT_BYTES = 100  # the kernel's 108, less what supervisord appends while it binds


def command(state: Path) -> list[str]:
    """The command that starts supervisord as a daemon."""
    return [sys.executable, "-m", "supervisor.supervisord", "--configuration", str(state / "supervisord.conf")]


def config(programs: Sequence[Program], state: Path, directory: Path) -> str:
    """supervisord.conf for programs that run in `directory`, in their order; both paths absolute."""
    head = f"""\
[unix_http_server]
file={_escaped(str(state / "supervisor.sock"))}
chmod=0700

[supervisord]
logfile={_escaped(str(state / "logs" / "supervisord.log"))}
pidfile={_escaped(str(state / "supervisord.pid"))}
directory={_escaped(str(directory))}
nodaemon=false
{"user=root" if os.geteuid() == 0 else ""}

[rpcinterface:supervisor]
supervisor.rpcinterface_factory=supervisor.rpcinterface:make_main_rpcinterface
"""
    return head + "".join(_section(program, priority, state) for priority, program in enumerate(programs, 1))


def _section(program: Program, priority: int, state: Path) -> str:
    return f"""
[program:{program.name}]
command={_escaped(shlex.join(program.command))}
priority={priority}
autorestart=true
startsecs=1
startretries=1000000
stopwaitsecs=5
stopasgroup=true
killasgroup=true
redirect_stderr=true
stdout_logfile={_escaped(str(log_file(state, program.name)))}
stdout_logfile_maxbytes=20MB
stdout_logfile_backups=1
"""


def _escaped(text: str) -> str:
    return text.replace("%", "%%")


def log_file(state: Path, program: str) -> Path:
    """Where a program's output goes."""
    return state / "logs" / f"{program}.log"


class Supervisor:
    """The supervisord at the socket under `state`. Every question raises OSError when it is not there to answer."""

    def __init__(self, state: Path) -> None:
        self._socket = state / "supervisor.sock"

    def pid(self) -> int:
        """Its own pid."""
        return int(self._ask("getPID"))

    def states(self) -> dict[str, tuple[str, int]]:
        """State (RUNNING, STARTING, BACKOFF, ...) and pid (0 when there is none) of each program."""
        return {info["name"]: (info["statename"], info["pid"]) for info in self._ask("getAllProcessInfo")}

    def shut_down(self) -> None:
        """Tell it to stop every program, all at once and not one after the other, then itself; does not wait."""
        self._ask("stopAllProcesses", False)
        self._ask("shutdown")

    def _ask(self, question: str, *about: object) -> Any:
        """One question on a connection of its own: a transport that has failed once never works again."""
        transport = SupervisorTransport(None, None, f"unix://{self._socket}")
        proxy = xmlrpc.client.ServerProxy("http://127.0.0.1", transport=transport)
        try:
            return getattr(proxy.supervisor, question)(*about)
        except (xmlrpc.client.Error, http.client.HTTPException) as error:
            raise ConnectionError(f"supervisord did not answer {question}: {error}") from error
