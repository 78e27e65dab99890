"""One client, one load, one measured run: the value that the whole bench is a function of.

A `Client` is a command that plays a `Load` at the timed server and leaves its own account of each request (its claims).
`run` starts it on its core, measures CPU over the steady part, and sets the claims beside the server's log (the truth).
All clients are measured by this one function: no client gets a clock or a count of its own.
"""

import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks.machine import CLIENT_CORE, Meter, Usage, realtime, tree
from benchmarks.server import TimedServer

# What a client says of one request: when it meant to send and did, and the durations it reports. nan: it does not say.
# Its clock may be any: moments are compared within the claims, durations with the truth.
CLAIM = np.dtype([("id", "U48"), ("due_s", "f8"), ("sent_s", "f8"), ("ttft_s", "f8"), ("e2e_s", "f8")])

STEADY = (0.15, 0.85)  # all is measured between these shares of the requests: a Poisson count may fall short
START_LIMIT_S, END_LIMIT_S = 120.0, 120.0


@dataclass(frozen=True)
class Load:
    """Poisson arrivals of short chat requests. `seconds` is how long they go on."""

    rate_per_s: float
    seconds: float
    streamed: bool = True
    seed: int = 1

    @property
    def requests(self) -> int:
        return round(self.rate_per_s * self.seconds)


class Client(Protocol):
    """A load generator, ours or a peer."""

    name: str

    def command(self, url: str, load: Load, folder: Path) -> list[str]:
        """How to start it; it runs with `folder` as its current directory."""

    def environment(self) -> dict[str, str]:
        """What it needs beside our own environment."""

    def claims(self, folder: Path) -> np.ndarray:
        """What it reported (dtype CLAIM). Raises FileNotFoundError when it left nothing."""


@dataclass(frozen=True)
class Trial:
    """A finished run. `steady_s` is the span that is judged, on the server's clock; `truth` and `claims` are whole.

    Times are in seconds; error arrays are empty when the client's claims cannot be matched with the truth.
    """

    client: str
    load: Load
    usage: Usage
    steady_s: tuple[float, float]
    steady_requests: int
    whole_cpu_s: float
    exit_code: int
    truth: np.ndarray
    claims: np.ndarray
    folder: Path
    disturbed: bool

    @property
    def cpu_s_per_1000(self) -> float:
        """User + system of the client's tree in the steady part, per 1000 requests."""
        return 1000 * self.usage.cpu_s / self.steady_requests

    @property
    def cpu_us_per_event(self) -> float:
        """The same per event that the server wrote (content chunks, usage, [DONE]; one for a plain answer)."""
        events = float(self.truth["chunks"].mean()) + 2 if self.load.streamed else 1.0
        return 1000 * self.cpu_s_per_1000 / events

    @property
    def achieved_per_s(self) -> float:
        span = float(self.truth["read_s"][-1] - self.truth["read_s"][0])
        return (len(self.truth) - 1) / span if span > 0 else float("nan")

    @property
    def matched(self) -> tuple[np.ndarray, np.ndarray]:
        """Truth and claims of the same requests, row by row, of the steady part."""
        truth, claims = paired(self.truth, self.claims)
        steady = self._steady(truth)
        return truth[steady], claims[steady]

    @property
    def arrivals_s(self) -> np.ndarray:
        """When the server received the requests of the steady part."""
        moments: np.ndarray = self.truth["read_s"][self._steady(self.truth)]
        return moments

    @property
    def send_lag_s(self) -> np.ndarray:
        """Sent minus due, by the client's own records."""
        _, claims = self.matched
        return _known(claims["sent_s"] - claims["due_s"])

    @property
    def ttft_error_s(self) -> np.ndarray:
        """Reported TTFT minus (first chunk written - request received)."""
        truth, claims = self.matched
        return _known(claims["ttft_s"] - (truth["first_s"] - truth["read_s"]))

    @property
    def e2e_error_s(self) -> np.ndarray:
        """Reported end-to-end latency minus (last chunk written - request received)."""
        truth, claims = self.matched
        return _known(claims["e2e_s"] - (truth["last_s"] - truth["read_s"]))

    def _steady(self, truth: np.ndarray) -> np.ndarray:
        start, end = self.steady_s
        mask: np.ndarray = (truth["read_s"] >= start) & (truth["read_s"] < end)
        return mask

    def summary(self) -> dict[str, Any]:
        """The figures alone, for the results file."""
        return {
            "client": self.client,
            "rate_per_s": self.load.rate_per_s,
            "streamed": self.load.streamed,
            "requests": len(self.truth),
            "achieved_per_s": self.achieved_per_s,
            "cpu_s_per_1000": self.cpu_s_per_1000,
            "cpu_us_per_event": self.cpu_us_per_event,
            "whole_cpu_s": self.whole_cpu_s,
            "busy": self.usage.cpu_s / self.usage.wall_s,
            "send_lag_s": spread(self.send_lag_s),
            "ttft_error_s": spread(self.ttft_error_s),
            "e2e_error_s": spread(self.e2e_error_s),
            "wall_s": self.usage.wall_s,
            "stolen_s": self.usage.stolen_s,
            "foreign_s": self.usage.foreign_s,
            "run_delay_s": self.usage.run_delay_s,
            "exit_code": self.exit_code,
            "disturbed": self.disturbed,
        }


class FailedError(Exception):
    """A client that did not play its load; says why in one sentence. The bench reports it and goes on."""


def run(
    client: Client,
    load: Load,
    server: TimedServer,
    folder: Path,
    *,
    at_realtime: bool = False,
    disturb: Callable[[int], AbstractContextManager[None]] | None = None,
) -> Trial:
    """Play `load` with `client`; `disturb` gets its pid and acts while traffic flows. Raises FailedError."""
    folder.mkdir(parents=True)
    server.reset()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with open(folder / "client.log", "wb") as log:
        process = subprocess.Popen(
            ["taskset", "-c", str(CLIENT_CORE), *client.command(server.url, load, folder.resolve())],
            cwd=folder,
            env=os.environ | client.environment(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _await_begun(1, START_LIMIT_S, process, server, client, folder)
        pids = [server.process.pid, *tree(process.pid)]
        with realtime(pids) if at_realtime else nullcontext(), disturb(process.pid) if disturb else nullcontext():
            usage, steady_s, count = _measure(process, load, server, client, folder)
        exit_code = process.wait(load.seconds + END_LIMIT_S)
    except subprocess.TimeoutExpired:
        raise FailedError(f"{client.name} did not end; see {folder}/client.log") from None
    finally:
        _end(process)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    whole_cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    try:
        claims = client.claims(folder)
    except FileNotFoundError as missing:
        raise FailedError(f"{client.name} left no records ({missing.filename}); see {folder}/client.log") from None
    return Trial(
        client=client.name,
        load=load,
        usage=usage,
        steady_s=steady_s,
        steady_requests=count,
        whole_cpu_s=whole_cpu_s,
        exit_code=exit_code,
        truth=server.log(),
        claims=claims,
        folder=folder,
        disturbed=disturb is not None,
    )


def paired(truth: np.ndarray, claims: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows of the same request: by id where the client sends one, else by order of sending when all are there."""
    if len(claims) and claims["id"].any():
        _, at_truth, at_claims = np.intersect1d(truth["id"], claims["id"], return_indices=True)
        return truth[at_truth], claims[at_claims]
    if len(truth) != len(claims):
        return truth[:0], claims[:0]
    return truth, claims[np.argsort(claims["sent_s"], kind="stable")]


def spread(values: np.ndarray) -> list[float] | None:
    """P50, P99 and maximum; None of nothing."""
    if not len(values):
        return None
    return [*(float(q) for q in np.percentile(values, [50, 99], method="inverted_cdf")), float(values.max())]


def _measure(
    process: subprocess.Popen[bytes], load: Load, server: TimedServer, client: Client, folder: Path
) -> tuple[Usage, tuple[float, float], int]:
    """Usage over the steady part, the part itself, and the requests begun in it."""
    meter = Meter(process.pid, [server.process.pid])
    _await_begun(STEADY[0] * load.requests, 3 * load.seconds + 30, process, server, client, folder)
    start, first = meter.read(), server.stats()["begun"]
    _await_begun(STEADY[1] * load.requests, 3 * load.seconds + 30, process, server, client, folder)
    end, last = meter.read(), server.stats()["begun"]
    return meter.between(start, end), (start[0], end[0]), last - first


def _await_begun(
    count: float, limit_s: float, process: subprocess.Popen[bytes], server: TimedServer, client: Client, folder: Path
) -> None:
    """Wait until the server has begun so many requests; looks ten times a second, so as to disturb nobody."""
    end = time.monotonic() + limit_s
    while server.stats()["begun"] < count:
        if process.poll() is not None:
            raise FailedError(f"{client.name} ended early with code {process.returncode}; see {folder}/client.log")
        if time.monotonic() > end:
            raise FailedError(f"{client.name} had not sent {count:.0f} requests after {limit_s:.0f} s")
        time.sleep(0.1)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Leave nothing of a client behind, whatever became of it."""
    for pid in tree(process.pid):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _known(values: np.ndarray) -> np.ndarray:
    known: np.ndarray = values[~np.isnan(values)]
    return known
