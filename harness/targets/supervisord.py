"""supervisord as the local stack's replicas know it: what runs under which pid, started and stopped by name.

It says what it believes, which after a kill may be the old pid for a moment, and RUNNING is no promise to serve: who
needs more than that asks the processes themselves.
"""

import http.client
import xmlrpc.client
from pathlib import Path
from typing import Any

_ALREADY_STARTED, _NOT_RUNNING = 60, 70  # supervisor.xmlrpc.Faults


class Supervisord:
    """The supervisord at the socket under `state`. Every question raises OSError when it is not there to answer."""

    def __init__(self, state: Path) -> None:
        self._socket = state / "supervisor.sock"

    def programs(self) -> dict[str, tuple[str, int]]:
        """State (RUNNING, STARTING, BACKOFF, STOPPED ...) and pid (0 when there is none) of each program."""
        return {info["name"]: (info["statename"], info["pid"]) for info in self._ask("getAllProcessInfo")}

    def start(self, name: str) -> None:
        """Start a program and do not wait; nothing when it runs, or is about to."""
        self._ask("startProcess", name, False, forgiven=_ALREADY_STARTED)

    def stop(self, name: str) -> None:
        """Stop a program and wait until it is; nothing when it does not run. It also ends the wait before a restart."""
        self._ask("stopProcess", name, forgiven=_NOT_RUNNING)

    def _ask(self, question: str, *about: object, forgiven: int = 0) -> Any:
        """One question on a connection of its own: a transport that has failed once never works again."""
        from supervisor.xmlrpc import SupervisorTransport  # only where a local stack is broken

        transport = SupervisorTransport(None, None, f"unix://{self._socket}")
        proxy = xmlrpc.client.ServerProxy("http://127.0.0.1", transport=transport)
        try:
            return getattr(proxy.supervisor, question)(*about)
        except xmlrpc.client.Fault as fault:
            if fault.faultCode == forgiven:
                return None
            raise ConnectionError(f"supervisord did not do {question}: {fault.faultString}") from fault
        except (xmlrpc.client.Error, http.client.HTTPException) as error:
            raise ConnectionError(f"supervisord did not answer {question}: {error}") from error
