"""Faults between gateway and engines, on a real local stack with the simulated engine."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import psutil
import pytest

from harness.chaos.fault import Refused, Unproven
from harness.chaos.faults import network
from harness.chaos.faults.link import Bandwidth, Blackhole, ConnectionReset, SlowLink
from harness.chaos.faults.network import Aborts, Latency
from harness.chaos.faults.process import GatewayRestarted, ReplicaKilled
from harness.targets import base, envoy
from harness.targets.base import Target
from harness.targets.local import admin_url
from tests.chaos.faults.steps import broken, mended
from tests.support.stack import stack, write_target
from tests.support.waiting import until

pytestmark = pytest.mark.e2e

PORT = 21180


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A local stack on ports of its own."""
    home = tmp_path_factory.mktemp("stack")
    write_target(home, PORT)
    up = stack(home, "up", "--target", "target.yaml")
    assert up.returncode == 0, up.stdout + up.stderr
    yield home
    stack(home, "down")


@pytest.fixture
def target(home: Path, monkeypatch: pytest.MonkeyPatch) -> Target:
    monkeypatch.chdir(home)
    return base.load("target.yaml")


def completion(target: Target) -> tuple[int, float]:
    """Status and seconds of one completion."""
    body = json.dumps({"model": "tiny", "prompt": "hello", "max_tokens": 1})
    start_s = time.monotonic()
    status, _ = envoy.exchange(f"{target.url}/v1/completions", "POST", {"content-type": "application/json"}, body)
    return status, time.monotonic() - start_s


def usual_s(target: Target) -> float:
    return median(took_s for status, took_s in (completion(target) for _ in range(11)) if status == 200)


def test_latency(target: Target) -> None:
    """Every completion takes that much longer, Envoy counts each, and none does after the undo."""
    fault = Latency(delay_s=0.25)
    before_s = usual_s(target)
    state, evidence = broken(fault, target)
    try:
        assert "start delayed by 250 ms" in evidence["model"]
        assert evidence["delays_injected"] >= 1
        assert all(completion(target)[1] >= 0.25 for _ in range(5))
        with pytest.raises(Refused, match="a fault already"):
            Aborts().resolve(target)
    finally:
        healed = mended(fault, target, state)
    assert healed["keys"] == []
    assert usual_s(target) < before_s + 0.125


def test_share_of_latency(target: Target) -> None:
    """A share of the requests waits, the others do not."""
    fault = Latency(delay_s=0.25, share=0.3)
    assert fault.resolve(target).radius == "30.0% of all requests start 250 ms later"
    assert Latency().resolve(target).radius == "all requests start 100 ms later"
    state, _ = broken(fault, target)
    try:
        late = sum(completion(target)[1] >= 0.25 for _ in range(60))
    finally:
        mended(fault, target, state)
    assert 3 <= late <= 40  # of 60; outside once in ten thousand runs


def test_aborts(target: Target) -> None:
    """A share of the requests is answered by the gateway with the status, the others are served."""
    fault = Aborts(share=0.3, status=502)
    state, evidence = broken(fault, target)
    try:
        said = [completion(target)[0] for _ in range(60)]
    finally:
        mended(fault, target, state)
    assert evidence["probe"] == {"status": 502}
    assert set(said) == {200, 502}
    assert 3 <= said.count(502) <= 40
    assert {completion(target)[0] for _ in range(20)} == {200}


def test_values_that_are_not_taken(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Latency that delays nothing is no fault; latency that is left is not undone."""
    monkeypatch.setattr(network, "APPLIED_LIMIT_S", 0.3)
    monkeypatch.setattr(network, "UNDONE_LIMIT_S", 0.3)
    fault = Latency()
    state = fault.resolve(target).state
    with pytest.raises(Unproven, match="did not meet it"):
        fault.applied(target, state)
    fault.inject(target, state)
    with pytest.raises(Unproven, match="still has values"):
        fault.undone(target, state)
    mended(fault, target, state)


def test_gateway_restarts_meanwhile(target: Target) -> None:
    """An Envoy that ended took the fault along: there is nothing to undo, and that is proven."""
    fault, restart = Latency(), GatewayRestarted()
    state, _ = broken(fault, target)
    other, _ = broken(restart, target)
    fault.undo(target, state)
    assert restart.undone(target, other)["ready"][0]["pid"] != other["pid"]
    assert mended(fault, target, state)["keys"] == []
    assert envoy.values(admin_url(target), "fault.") == {}


def test_replica_killed(target: Target) -> None:
    """A simulated engine dies; users are served, and another process serves in its place."""
    fault = ReplicaKilled()
    state, _ = broken(fault, target)
    assert [completion(target)[0] for _ in range(10)] == [200] * 10
    (back,) = mended(fault, target, state)["ready"]
    assert back["pid"] != state["pid"]


def test_slow_link(target: Target, home: Path) -> None:
    """Every completion takes at least that much longer, and none does after the undo; no proxy is left."""
    fault = SlowLink(delay_s=0.3, jitter_s=0.05)
    before_s = usual_s(target)
    state, evidence = broken(fault, target)
    try:
        assert "150 ms each way" in evidence["model"]
        assert evidence["on_the_detour"] >= 1
        assert all(completion(target)[1] >= 0.25 for _ in range(5))
        with pytest.raises(Refused, match="on a detour already"):
            Blackhole().resolve(target)
    finally:
        healed = mended(fault, target, state)
    assert healed["keys"] == []
    assert usual_s(target) < before_s + 0.125
    assert proxies(home) == []


def test_slow_link_to_one(target: Target, home: Path) -> None:
    """Only what goes to the named engine is late."""
    fault = SlowLink(upstream="engine-1", delay_s=0.3)
    state, evidence = broken(fault, target)
    try:
        assert len(evidence["probes"]) == 1
        late = [completion(target)[1] >= 0.3 for _ in range(40)]
    finally:
        mended(fault, target, state)
    assert {True, False} == set(late)


def test_slow_link_is_good_after_its_time(target: Target) -> None:
    """Without an undo the way is as good as ever when its time is over, and serves."""
    fault = SlowLink(delay_s=0.3, for_s=5.0)
    state, _ = broken(fault, target)
    try:
        until(lambda: completion(target)[1] < 0.15, "the way is good again")
        assert {completion(target)[0] for _ in range(10)} == {200}
    finally:
        mended(fault, target, state)


def test_bandwidth(target: Target, home: Path) -> None:
    """A page comes no faster than the rate, and users are served all the same."""
    fault = Bandwidth(rate_bytes=5000)
    state, evidence = broken(fault, target)
    try:
        assert all(probe["bytes"] <= 5000 * probe["took_s"] for probe in evidence["probes"].values())
        assert completion(target)[0] == 200
    finally:
        mended(fault, target, state)


def test_connection_reset(target: Target, home: Path) -> None:
    """Connections are reset after their time; a request within it is served."""
    fault = ConnectionReset(after_s=0.5)
    state, evidence = broken(fault, target)
    try:
        assert all(probe["reset_after_s"] >= 0.5 for probe in evidence["probes"].values())
    finally:
        mended(fault, target, state)
    assert completion(target)[0] == 200


def test_blackhole(target: Target, home: Path) -> None:
    """One of two engines swallows what it gets: some requests wait in vain, and none after the undo."""
    fault = Blackhole(upstream="engine-0")
    state, evidence = broken(fault, target)
    try:
        assert list(evidence["probes"].values()) == [{"silent_s": 1.0}]
    finally:
        mended(fault, target, state)
    assert {completion(target)[0] for _ in range(10)} == {200}
    assert proxies(home) == []


def proxies(home: Path) -> list[int]:
    """Living processes with a permit of this directory."""
    return [
        one.pid
        for one in psutil.process_iter(["cmdline", "status"])
        if one.info["status"] != psutil.STATUS_ZOMBIE
        and any(str(home / ".harness") in word for word in one.info["cmdline"] or [])
    ]


def test_out_of_reach(target: Target, home: Path) -> None:
    """The gateway of somebody's endpoint is not set by us."""
    path = home / "other.yaml"
    path.write_text(f"kind: url\nurl: {target.url}\nmodel: tiny\ntokenizer: tiny\ngpu: none\n")
    for fault in (Latency(), Aborts(), Blackhole(), ReplicaKilled(), GatewayRestarted()):
        with pytest.raises(Refused, match="of kind url"):
            fault.resolve(base.load(str(path)))
