"""The alerts of a real stack and a real Prometheus: quiet while all is well, told when it is not, cleared after it."""

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from running import ROOT

from harness.alerts import Alerts
from harness.model import Event
from reference_stack.gpu.device import Device
from reference_stack.monitoring import rules
from tests.support.waiting import until

pytestmark = pytest.mark.e2e

PORT = 21220
ADMIN, PROMETHEUS = f"http://127.0.0.1:{PORT + 4}", f"http://127.0.0.1:{PORT + 6}"
FIRES_S, CLEARS_S = 40.0, 60.0


def stack(directory: Path, *words: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "reference_stack.local", *words]
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A stack with its Prometheus, in a directory of its own."""
    assert shutil.which("prometheus"), "prometheus is missing: it is the Debian package prometheus"
    directory = tmp_path_factory.mktemp("alerts")
    target = yaml.safe_load((ROOT / "reference_stack/local/target.yaml").read_text())
    target |= {
        "url": f"http://127.0.0.1:{PORT}",
        "engines": [f"http://127.0.0.1:{PORT + 1}", f"http://127.0.0.1:{PORT + 2}"],
        "prometheus": PROMETHEUS,
        "gpu_metrics": f"http://127.0.0.1:{PORT + 5}/metrics",
        "tokenizer": str(ROOT / ".cache/tiny"),
    }
    (directory / "target.yaml").write_text(yaml.safe_dump(target))
    stack(directory, "up", "--target", "target.yaml")
    yield directory
    stack(directory, "down")


def complete(prompt: str = "hello") -> int:
    """The status of one short completion through the gateway."""
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=5)
    body = json.dumps({"model": "tiny", "prompt": prompt, "max_tokens": 2})
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        return connection.getresponse().status


class Watched:
    """What the alerts did so far, while a request goes through the gateway at each look."""

    def __init__(self) -> None:
        self.alerts, self.seen, self.prompt = Alerts(PROMETHEUS), list[Event](), "hello"

    def look(self) -> None:
        with contextlib.suppress(OSError):  # who is served by a frozen replica gives up
            complete(self.prompt)
        self.seen += [seen for seen in self.alerts.sample() if isinstance(seen, Event)]

    def has(self, kind: str, name: str) -> bool:
        self.look()
        return any((event.kind, event.name) == (kind, name) for event in self.seen)

    def fires(self, name: str) -> None:
        until(lambda: self.has("alert_fired", name), f"{name} fires", FIRES_S)

    def clears(self, name: str) -> None:
        until(lambda: self.has("alert_cleared", name), f"{name} clears", CLEARS_S)


@pytest.fixture
def watched(home: Path) -> Watched:
    """All is well at first: once the test before is forgotten, nothing fires in a few evaluations."""
    until(lambda: complete() == 200 and not asked("ALERTS"), "no alert is left", CLEARS_S)
    watched = Watched()
    end_s = time.monotonic() + 5
    until(lambda: watched.look() or time.monotonic() > end_s, "a few evaluations", FIRES_S)
    assert watched.seen == []
    return watched


def asked(query: str) -> list[dict[str, object]]:
    url = f"{PROMETHEUS}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    with urllib.request.urlopen(url, timeout=5) as answer:
        return json.load(answer)["data"]["result"]


def test_what_rules_ask_for_is_scraped(home: Path) -> None:
    """Every series that a rule selects is there once requests went through, good ones, bad ones, and unknown models."""
    selectors = {
        re.sub(r"\[\w+\]", "", found)
        for alert in rules.ALERTS
        for found in re.findall(r"\b(?:[a-zA-Z_]+_(?:[a-zA-Z_]*)|vllm:\w+|up)\b(?:\{[^}]*\})?", alert.condition)
        if not found.startswith(("histogram_quantile", "DCGM_FI_DEV_FB_RESERVED"))
    }
    assert len(selectors) == 15, selectors
    assert complete() == 200 and complete("") == 400
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=20)
    body = json.dumps({"model": "another", "prompt": "hello"})
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    assert connection.getresponse().status == 404
    for selector in sorted(selectors):
        until(lambda selector=selector: asked(selector), f"Prometheus has {selector}", FIRES_S)


def test_replica_frozen(home: Path, watched: Watched) -> None:
    """A replica that is frozen fires ReplicaDown, whatever its /health would say, until it is thawed."""
    listed = json.loads(stack(home, "status", "--json"))["programs"]
    frozen = next(row["pid"] for row in listed if row["program"] == "engine-0")
    os.killpg(frozen, signal.SIGSTOP)
    try:
        watched.fires("ReplicaDown")
    finally:
        os.killpg(frozen, signal.SIGCONT)
    watched.clears("ReplicaDown")


def test_memory_leak(home: Path, watched: Watched) -> None:
    """Memory that somebody takes over 85 % fires GpuMemoryHigh, with the GPU's name, until it is given back."""
    device = Device(home / ".stack/gpu/GPU-0.json")
    leak = subprocess.Popen(["sleep", "120"])
    try:
        device.allocate("leak", device.read().free_bytes // 2, leak.pid)
        watched.fires("GpuMemoryHigh")
    finally:
        leak.kill()
        leak.wait()
    watched.clears("GpuMemoryHigh")
    fired = next(event for event in watched.seen if event.kind == "alert_fired")
    assert fired.detail["labels"]["UUID"] == "GPU-0" and fired.detail["value"] > 0.85


def test_latency(home: Path, watched: Watched) -> None:
    """A delay in the gateway fires HighLatencyP95 and nothing about replicas; it clears when the delay is gone."""
    keys = {"fault.engines.delay_percent": "100", "fault.engines.delay_ms": "1500"}

    def modify(values: dict[str, str]) -> None:
        request = urllib.request.Request(f"{ADMIN}/runtime_modify?{urllib.parse.urlencode(values)}", method="POST")
        urllib.request.urlopen(request, timeout=5).close()

    try:
        modify(keys)
        watched.fires("HighLatencyP95")
    finally:
        modify(dict.fromkeys(keys, ""))
    watched.clears("HighLatencyP95")
    assert {event.name for event in watched.seen} == {"HighLatencyP95"}


def test_everything_is_refused(home: Path, watched: Watched) -> None:
    """Nothing but bad requests fires RejectShareUnusual, and good ones clear it."""
    watched.prompt = ""
    watched.fires("RejectShareUnusual")
    watched.prompt = "hello"
    watched.clears("RejectShareUnusual")
