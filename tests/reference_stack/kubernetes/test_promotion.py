"""A promotion on a cluster that is a few dictionaries: what the candidate gets, and when it gets nothing (K8S-2)."""

import copy
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.targets.base import load
from reference_stack.kubernetes import promotion
from reference_stack.kubernetes.promotion import CANDIDATE, FIRING, STABLE, Promotion, Refused, rolled_out

Document = dict[str, Any]
POD = {"metadata": {"name": "engine-candidate-1"}, "status": {"podIP": "10.0.0.9"}}


class Time:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def clock(self) -> float:
        return self.now_s

    def sleep(self, span_s: float) -> None:
        self.now_s += span_s


class FakeCluster:
    """Two Deployments that become available as soon as they are asked to, and the weights; `done` is what was asked."""

    def __init__(self, available: bool = True) -> None:
        self.available = available
        self.time = Time()
        self.done: list[str] = []
        self.moved = [(float("-inf"), {"routing.engines": "100", "routing.candidate": "0"})]
        self.deployments = {STABLE: deployment(2, "old"), CANDIDATE: deployment(0, "new")}

    def deployment(self, name: str) -> Document:
        return copy.deepcopy(self.deployments[name])

    def patch_deployment(self, name: str, patch: Document) -> None:
        one, spec = self.deployments[name], patch["spec"]
        one["metadata"]["generation"] += 1
        if "replicas" in spec:
            self.done.append(f"{name} x{spec['replicas']}")
            assert self.reached()["routing.candidate"] == "0", "users are sent to what is going away"
            one["spec"]["replicas"] = spec["replicas"]
        if "template" in spec:
            (container,) = spec["template"]["spec"]["containers"]
            self.done.append(f"{name} runs {container['image']}")
            one["spec"]["template"]["spec"]["containers"][0] |= container
        if self.available:
            one["status"] = status(one)

    def patch_config(self, name: str, data: dict[str, str]) -> None:
        assert name == "weights"
        self.moved.append((self.time.now_s, dict(data)))
        self.done.append(f"candidate {data['routing.candidate']} %")

    def reached(self) -> dict[str, str]:
        """The weights as gateways have them: two minutes late."""
        return next(weights for at_s, weights in reversed(self.moved) if at_s <= self.time.now_s - 120)

    def pods(self, selector: str) -> list[Document]:
        assert selector == "app.kubernetes.io/component=engine,harness/release=candidate"
        return [POD]


def status(of: Document) -> Document:
    count = of["spec"]["replicas"]
    numbers = {"replicas": count, "updatedReplicas": count, "availableReplicas": count}
    return {"observedGeneration": of["metadata"]["generation"], **numbers}


def deployment(replicas: int, image: str) -> Document:
    container = {"name": "engine", "image": image, "args": ["--release", image]}
    one = {
        "metadata": {"generation": 1},
        "spec": {"replicas": replicas, "template": {"spec": {"containers": [container]}}},
    }
    return {**one, "status": status(one)}


def promote(
    cluster: FakeCluster, ask: Callable[[str, float], float | None], rehearsal: Callable[[list[Document]], int]
) -> None:
    time = cluster.time
    Promotion(
        cluster, lambda query: ask(query, time.now_s), rehearsal, 1, 7200, clock=time.clock, sleep=time.sleep
    ).run()


def quiet(query: str, _: float) -> float | None:
    """No alert, and enough requests of users."""
    return None if query == FIRING else 2000.0


GONE = f"{CANDIDATE} x0"
WITHDRAWN = ["candidate 0 %", GONE]


def test_promoted() -> None:
    """Rehearsed without users, shown to one in a hundred, then the release that serves becomes it."""
    cluster = FakeCluster()
    promote(cluster, quiet, lambda pods: cluster.done.append(f"rehearsed {pods[0]['metadata']['name']}") or 0)
    assert cluster.done == [
        f"{CANDIDATE} x1",
        "rehearsed engine-candidate-1",
        "candidate 1 %",
        f"{STABLE} runs new",
        *WITHDRAWN,
    ]
    assert cluster.deployments[STABLE]["spec"]["template"]["spec"]["containers"][0]["args"] == ["--release", "new"]


@pytest.mark.parametrize("code", [1, 2, 3, 4, 130])
def test_a_rehearsal_that_does_not_pass(code: int) -> None:
    """FAIL, INVALID, INCONCLUSIVE, a mistake: no user ever sees it, and the code is the judge's."""
    cluster = FakeCluster()
    with pytest.raises(Refused, match=str(code)) as refused:
        promote(cluster, quiet, lambda _: code)
    assert refused.value.code == code
    assert cluster.done == [f"{CANDIDATE} x1", GONE]


def test_worse_for_users() -> None:
    """CandidateWorse takes the share away within a poll, hours before the end."""
    cluster, asked = FakeCluster(), []

    def ask(query: str, now_s: float) -> float | None:
        asked.append(now_s)
        return 1.0 if query == FIRING and now_s >= 1500 else None

    with pytest.raises(Refused, match="CandidateWorse") as refused:
        promote(cluster, ask, lambda _: 0)
    assert refused.value.code == promotion.WORSE and max(asked) == 1500
    assert cluster.done == [f"{CANDIDATE} x1", "candidate 1 %", *WITHDRAWN]


@pytest.mark.parametrize("served", [None, 0.0, 597.0])
def test_too_few_users(served: float | None) -> None:
    """Nothing seen is nothing known: that is not a promotion."""
    cluster = FakeCluster()
    with pytest.raises(Refused, match="too little") as refused:
        promote(cluster, lambda query, _: None if query == FIRING else served, lambda _: 0)
    assert refused.value.code == promotion.TOO_FEW and cluster.done[-2:] == WITHDRAWN
    assert cluster.reached() == {"routing.engines": "100", "routing.candidate": "0"}


def test_a_candidate_that_does_not_start() -> None:
    """It is given up after its limit, and its card is free again."""
    cluster = FakeCluster(available=False)
    with pytest.raises(Refused, match="engine-candidate was not available"):
        promote(cluster, quiet, lambda _: 0)
    assert cluster.done == [f"{CANDIDATE} x1", GONE]


@pytest.mark.parametrize("error", [OSError("gone"), SystemExit(143), KeyboardInterrupt()])
def test_interrupted(error: BaseException) -> None:
    """Whatever ends it early, SIGTERM or a Prometheus that is gone, the candidate keeps no share."""
    cluster = FakeCluster()

    def ask(query: str, now_s: float) -> float | None:
        if now_s >= 60:
            raise error
        return None

    with pytest.raises(type(error)):
        promote(cluster, ask, lambda _: 0)
    assert cluster.done[-2:] == WITHDRAWN


def test_rolled_out() -> None:
    """Only when the controller has seen the newest template, and every replica of it is available."""
    good = deployment(2, "new")
    assert rolled_out(good)
    for key, value in (("observedGeneration", 0), ("updatedReplicas", 1), ("availableReplicas", 1), ("replicas", 3)):
        assert not rolled_out({**good, "status": {**good["status"], key: value}})
    assert not rolled_out({**good, "status": {}})


def test_target(tmp_path: Path) -> None:
    """The rehearsal's target is one that the harness takes, and leads to the candidate and its GPUs alone."""
    options = Namespace(
        gateway="http://gateway:8080", prometheus="http://prometheus:9090", model="assistant", tokenizer=Path("/m")
    )
    file = tmp_path / "target.yaml"
    file.write_text(yaml.safe_dump(promotion.target(options, [POD])))
    target = load(str(file))
    assert target.sent_headers() == {"x-release": "candidate"}
    assert target.gpus == {"pod": ["engine-candidate-1"]} and target.engines == ["http://10.0.0.9:8000"]
