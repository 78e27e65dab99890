"""Faults of the connections between the gateway and its engines: slow, thin, reset or dead ones, for all or for one.

The local gateway has a detour to its engines, which two runtime values have everything take: through a proxy of ours
(`harness.chaos.proxy`) that makes the ways to some of them worse. While it does, Envoy counts what it does for engines
under the cluster `detour`. The undo sends all straight again, waits for what is still on the way, and ends the proxy.
"""

import contextlib
import secrets
import socket
import subprocess
import sys
import time
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import Field

from harness import document
from harness.chaos import permit
from harness.chaos.fault import Aim, Fault, Refused, Unproven
from harness.targets import envoy
from harness.targets.base import Target
from harness.targets.local import Stack, admin_url, ticks
from harness.units import Duration, Period, Size, spec

PERMITS = Path(".harness/proxies")
PREFIX = "routing."
DETOUR = {"routing.detour": "100", "routing.engines": "0"}
DETOUR_DISTANCE = 100  # of the proxy's port from its engine's, as the gateway has it
ALL = "all"
START_LIMIT_S = 15.0
APPLIED_LIMIT_S = 10.0
UNDONE_LIMIT_S = 30.0
DRAIN_LIMIT_S = 15.0
LOOK_S = 2.0  # without a byte, until a probe has seen enough
DEAD_S = 1.0  # that a black hole must be silent for
_PAGE = "/metrics"  # the largest that an engine has without computing anything


@spec
class _Link(Fault):
    """Makes the way to `upstream` worse, one of the engines (engine-0) or all; after `for` it is as good as ever."""

    upstream: str = ALL
    for_s: Period = 120.0

    def resolve(self, target: Target) -> Aim:
        if target.kind != "local":
            raise Refused(f"the gateway of a target of kind {target.kind} has no detour to its engines")
        engines = {f"engine-{number}": each for number, each in enumerate(target.engines)}
        if self.upstream not in (ALL, *engines):
            raise Refused(f"there is no engine `{self.upstream}`; {document.suggestion(self.upstream, list(engines))}")
        admin = admin_url(target)
        if left := envoy.values(admin, PREFIX):
            raise Refused(f"the gateway's traffic is on a detour already: {left}")
        back = "&".join(f"{key}=" for key in DETOUR)
        hit = list(engines) if self.upstream == ALL else [self.upstream]
        return Aim(
            targets=tuple(f"the way from {target.url} to {name}" for name in hit),
            radius=f"{self._model()}, for {len(hit)} of {len(engines)} engines",
            undo=f"curl -X POST '{admin}/runtime_modify?{back}', then end harness.chaos.proxy",
            state={
                "stack": str(Stack().state),
                "admin": admin,
                "before": _taken(admin),
                "ways": {str(_port(each) + DETOUR_DISTANCE): each for each in engines.values()},
                "worse": [_port(engines[name]) + DETOUR_DISTANCE for name in hit],
                "permit": str((PERMITS / secrets.token_hex(8)).resolve()),
            },
        )

    def inject(self, target: Target, state: Mapping[str, Any]) -> None:
        """The proxy first, and nobody is sent there before it listens."""
        permit.grant(Path(state["permit"]))
        command = [sys.executable, "-m", "harness.chaos.proxy", "--for", f"{self.for_s}s", "--permit", state["permit"]]
        for port, url in state["ways"].items():
            command += ["--way", f"{port}={urlsplit(url).netloc}"]
        for port in state["worse"]:
            command += ["--worse", str(port)]
        command += self._words()
        proxy = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)
        for _ in ticks(START_LIMIT_S):
            if all(_listens(int(port)) for port in state["ways"]):
                envoy.modify(state["admin"], DETOUR)
                return
            if proxy.poll() is not None:
                break
        raise Unproven("the proxy does not listen")

    def applied(self, target: Target, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Envoy counts requests on the detour, and one of our own meets the fault on each way that is worse."""
        met = {str(port): self._met(port) for port in state["worse"]}
        if missing := [port for port, seen in met.items() if not seen]:
            raise Unproven(f"a request through the proxy's port {', '.join(missing)} met nothing")
        for _ in ticks(APPLIED_LIMIT_S):
            with contextlib.suppress(OSError):  # it may meet the fault
                envoy.exchange(f"{target.url}/v1/models", "GET", target.sent_headers(), limit_s=DEAD_S)
            if (rose := _taken(state["admin"]) - state["before"]) > 0:
                return {"model": self._model(), "upstream": self.upstream, "probes": met, "on_the_detour": rose}
        raise Unproven("Envoy counts no request on the detour")

    def undo(self, target: Target, state: Mapping[str, Any]) -> None:
        with contextlib.suppress(ConnectionRefusedError):  # no Envoy, no values; another one begins without them
            envoy.modify(state["admin"], dict.fromkeys(DETOUR, ""))
            for _ in ticks(self._drain_s()):
                if not envoy.counter(state["admin"], "cluster.detour.upstream_rq_active"):
                    break
        permit.revoke(Path(state["permit"]))

    def undone(self, target: Target, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Envoy has no such value, the proxy is gone, and a request of our own is answered."""
        if Path(state["permit"]).exists():
            raise Unproven(f"the proxy still has its permit {state['permit']}")
        stack, seen = Stack(Path(state["stack"])), "nothing"
        for _ in ticks(UNDONE_LIMIT_S):
            try:
                keys = envoy.values(state["admin"], PREFIX)
                status, _ = envoy.exchange(f"{target.url}/v1/models", "GET", target.sent_headers())
                if not keys and status < 500:
                    return {"keys": [], "status": status}
                seen = f"values {keys}, status {status}"
            except OSError as error:
                seen = str(error)
                if not stack.is_up():
                    return {"keys": [], "gone": "the stack is down, and its gateway's values with it"}
        raise Unproven(f"the gateway has {seen}")

    def _drain_s(self) -> float:
        """How long requests on the detour may take to end by themselves."""
        return DRAIN_LIMIT_S

    @abstractmethod
    def _model(self) -> str:
        """What exactly becomes of a connection, for the report."""

    @abstractmethod
    def _words(self) -> list[str]:
        """What the proxy is told."""

    @abstractmethod
    def _met(self, port: int) -> dict[str, Any] | None:
        """What a request of our own through this port met; None when nothing."""


@spec
class SlowLink(_Link):
    """Round trips take `delay` longer, give or take `jitter`: chunks are late both ways, streams as fast as ever."""

    delay_s: Annotated[Period, Field(le=60)] = 0.1
    jitter_s: Duration = 0.0

    def _model(self) -> str:
        jitter = f", {self.jitter_s * 500:g} ms more or less" if self.jitter_s else ""
        return f"every chunk delayed by {self.delay_s * 500:g} ms each way{jitter}"

    def _words(self) -> list[str]:
        return ["--delay", f"{self.delay_s}s", "--jitter", f"{self.jitter_s}s"]

    def _met(self, port: int) -> dict[str, Any] | None:
        took_s, _ = _fetched(port)
        return {"took_s": took_s} if took_s >= max(0.0, self.delay_s - self.jitter_s) else None


@spec
class Bandwidth(_Link):
    """The answers of each connection come at `rate` a second at most; text is no faster than the greatest rate."""

    rate_bytes: Annotated[Size, Field(ge=1_000, le=100_000)] = 10_000

    def _model(self) -> str:
        return f"the answers of each connection limited to {self.rate_bytes} bytes a second"

    def _words(self) -> list[str]:
        return ["--rate", f"{self.rate_bytes}B"]

    def _met(self, port: int) -> dict[str, Any] | None:
        """How fast a page comes, from the question to its last byte, or to more than a second's worth of it."""
        start_s, took_s, size_bytes = time.monotonic(), 0.0, 0
        with contextlib.suppress(TimeoutError), _asked(port, LOOK_S) as connection:
            while size_bytes <= self.rate_bytes and (piece := connection.recv(65_536)):
                took_s, size_bytes = time.monotonic() - start_s, size_bytes + len(piece)
        return {"took_s": took_s, "bytes": size_bytes} if 0 < size_bytes <= took_s * self.rate_bytes else None


@spec
class ConnectionReset(_Link):
    """Every connection is reset `after` that long from its first bytes on, whatever it is in the middle of."""

    after_s: Duration = 1.0

    def _model(self) -> str:
        return f"each connection reset {self.after_s:g} s after its first bytes"

    def _words(self) -> list[str]:
        return ["--reset", f"{self.after_s}s"]

    def _met(self, port: int) -> dict[str, Any] | None:
        """The reset of a connection that is kept open."""
        start_s = time.monotonic()
        try:
            with _asked(port, self.after_s + APPLIED_LIMIT_S) as connection:
                while connection.recv(65_536):
                    pass
        except ConnectionResetError:
            return {"reset_after_s": time.monotonic() - start_s}
        except TimeoutError:
            return None
        return None


@spec
class Blackhole(_Link):
    """Connections are taken, and nothing ever comes back."""

    def _model(self) -> str:
        return "connections accepted and never answered"

    def _words(self) -> list[str]:
        return ["--blackhole"]

    def _drain_s(self) -> float:
        return 0.0  # what is in there never ends

    def _met(self, port: int) -> dict[str, Any] | None:
        try:
            _fetched(port, DEAD_S)
        except TimeoutError:
            return {"silent_s": DEAD_S}
        return None


# What it takes ----------------------------------------------------------------------------------------------------


def _taken(admin: str) -> int:
    return envoy.counter(admin, "cluster.detour.upstream_rq_total")


def _port(url: str) -> int:
    return urlsplit(url).port or 80


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), START_LIMIT_S):
        return True
    return False


def _fetched(port: int, limit_s: float = START_LIMIT_S) -> tuple[float, int]:
    """Seconds and bytes of an engine's page through this port. Raises OSError."""
    start_s = time.monotonic()
    _, page = envoy.exchange(f"http://127.0.0.1:{port}{_PAGE}", "GET", {}, limit_s=limit_s)
    return time.monotonic() - start_s, len(page)


def _asked(port: int, limit_s: float) -> socket.socket:
    """A connection that has asked for an engine's page and is not closed after it."""
    connection = socket.create_connection(("127.0.0.1", port), limit_s)
    connection.sendall(f"GET {_PAGE} HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".encode())
    return connection
