"""Does the next release get the users? A rehearsal with traffic of our own, then a share of theirs, then a decision.

    python -m reference_stack.kubernetes.promotion --scenario FILE --share 1 --gateway URL --prometheus URL ...

1. The candidate is started and serves nobody.
2. `harness run` sends it the scenario, by header, and `harness judge` decides: anything but PASS ends here.
3. It gets `--share` percent of the users for `--watch` seconds. The alert CandidateWorse compares it with the release
   that serves, by errors, latency and tokens an answer; when it fires, or had too few requests to say, that is the end.
4. The release that serves becomes the candidate, and the share goes back to nothing.

However it ends, the candidate is left without users and without a card. Exit: 0 promoted, 1 worse, 4 too few users to
say, else the code of `harness judge`; 2 for mistakes, 3 when the cluster or Prometheus did not answer.
"""

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import yaml

from reference_stack.kubernetes.cluster import Cluster, Document

STABLE, CANDIDATE, WEIGHTS = "engine", "engine-candidate", "weights"
PODS = "app.kubernetes.io/component=engine,harness/release=candidate"
WORSE, USAGE, UNKNOWN, TOO_FEW = 1, 2, 3, 4
READY_LIMIT_S = 1800.0  # weights from a cold volume
ROLLOUT_LIMIT_S = 3600.0
SETTLED_S = 150.0  # for kubelet to bring a ConfigMap to every gateway: its period and its cache, a minute each
POLL_S = 15.0
LEAST_REQUESTS = 598  # clean ones, for 99.5 % at 95 % confidence
FIRING = 'ALERTS{alertname="CandidateWorse",alertstate="firing"}'
SERVED = 'sum(increase(envoy_cluster_upstream_rq_completed{envoy_cluster_name="candidate"}[SPANs]))'


class Refused(Exception):  # noqa: N818 -- a decision, not an error
    """The candidate is not promoted; `code` is the exit status, the message says why."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


class Api(Protocol):
    """What is asked of a cluster."""

    def deployment(self, name: str) -> Document: ...
    def patch_deployment(self, name: str, patch: Document) -> None: ...
    def patch_config(self, name: str, data: dict[str, str]) -> None: ...
    def pods(self, selector: str) -> list[Document]: ...


Ask = Callable[[str], float | None]  # a query to its first value; None when it has none


@dataclass(frozen=True)
class Promotion:
    """One promotion. `rehearse` sends traffic to the candidate's pods, judges it, and returns harness's exit code."""

    api: Api
    ask: Ask
    rehearse: Callable[[list[Document]], int]
    share_percent: int
    watch_s: float
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def run(self) -> None:
        """Promote the candidate. Raises Refused when it is not to be, OSError when the cluster does not answer."""
        try:
            self.api.patch_deployment(CANDIDATE, {"spec": {"replicas": 1}})
            self._wait_for(CANDIDATE, READY_LIMIT_S)
            if code := self.rehearse(self.api.pods(PODS)):
                raise Refused(code, f"the rehearsal ended with exit code {code} of harness judge")
            try:
                self._expose()
                self._promote()
            finally:
                self._share(0)
                self.sleep(SETTLED_S)  # until then users are still sent to it, so it has to be there
        finally:
            self.api.patch_deployment(CANDIDATE, {"spec": {"replicas": 0}})

    def _expose(self) -> None:
        """A share of the users, watched."""
        self._share(self.share_percent)
        began_s = self.clock()
        while (passed_s := self.clock() - began_s) < self.watch_s:
            if self.ask(FIRING):
                raise Refused(WORSE, f"CandidateWorse fired after {passed_s:.0f} s: see its runbook")
            self.sleep(POLL_S)
        served = self.ask(SERVED.replace("SPAN", f"{self.watch_s:.0f}")) or 0.0
        if served < LEAST_REQUESTS:
            raise Refused(TOO_FEW, f"{served:.0f} requests of users say too little: {LEAST_REQUESTS} are needed")

    def _promote(self) -> None:
        """The release that serves gets the candidate's image and arguments; the candidate goes on meanwhile."""
        container = self.api.deployment(CANDIDATE)["spec"]["template"]["spec"]["containers"][0]
        next_one = {"name": container["name"], "image": container["image"], "args": container["args"]}
        self.api.patch_deployment(STABLE, {"spec": {"template": {"spec": {"containers": [next_one]}}}})
        self._wait_for(STABLE, ROLLOUT_LIMIT_S)

    def _wait_for(self, name: str, limit_s: float) -> None:
        """Until every replica is of the newest template and available."""
        end_s = self.clock() + limit_s
        while not rolled_out(self.api.deployment(name)):
            if self.clock() > end_s:
                raise Refused(WORSE, f"deployment {name} was not available after {limit_s:.0f} s")
            self.sleep(POLL_S)

    def _share(self, percent: int) -> None:
        shares = {"routing.engines": str(100 - percent), "routing.candidate": str(percent)}
        self.api.patch_config(WEIGHTS, shares)


def rolled_out(deployment: Document) -> bool:
    """Whether all replicas that are wanted run the template as it is now, and are available."""
    wanted, status = deployment["spec"]["replicas"], deployment.get("status", {})
    return bool(
        status.get("observedGeneration", 0) >= deployment["metadata"]["generation"]
        and status.get("updatedReplicas", 0) == wanted
        and status.get("availableReplicas", 0) == wanted
        and status.get("replicas", 0) == wanted
    )


def target(options: argparse.Namespace, pods: list[Document]) -> dict[str, Any]:
    """The target file of the rehearsal: the gateway, with the header that leads to the candidate."""
    return {
        "kind": "url",
        "url": options.gateway,
        "headers": {"x-release": "candidate"},
        "engines": [f"http://{pod['status']['podIP']}:8000" for pod in pods],
        "model": options.model,
        "tokenizer": str(options.tokenizer),
        "prometheus": options.prometheus,
        "gpu": "dcgm",
        "gpus": {"pod": [pod["metadata"]["name"] for pod in pods]},
    }


def rehearse(options: argparse.Namespace, pods: list[Document]) -> int:
    """Run the scenario on the candidate and judge the run; the judge's exit code."""
    Path("target.yaml").write_text(yaml.safe_dump(target(options, pods), sort_keys=False))
    harness = str(Path(sys.executable).with_name("harness"))
    ran = subprocess.run([harness, "run", str(options.scenario), "--target", "target.yaml"], check=False)
    if ran.returncode == USAGE:
        return USAGE
    return subprocess.run([harness, "judge", "runs/latest"], check=False).returncode


def ask(prometheus: str, query: str) -> float | None:
    """The first value of a query's answer. Raises OSError when Prometheus has none to give."""
    url = f"{prometheus}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310 -- the address is the operator's
        result = json.load(answer)["data"]["result"]
    return float(result[0]["value"][1]) if result else None


def main() -> None:
    """The door."""
    parser = argparse.ArgumentParser(prog="promotion", description="Promote the candidate, if it holds.")
    parser.add_argument("--scenario", type=Path, required=True)
    parser.add_argument("--share", type=int, choices=range(1, 51), metavar="1..50", required=True, help="percent")
    parser.add_argument("--watch", type=float, default=7200.0, help="seconds that users have it")
    parser.add_argument("--gateway", required=True, help="URL")
    parser.add_argument("--prometheus", required=True, help="URL")
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _stop)
    promotion = Promotion(
        Cluster(),
        lambda query: ask(options.prometheus, query),
        lambda pods: rehearse(options, pods),
        options.share,
        options.watch,
    )
    try:
        promotion.run()
    except Refused as refused:
        _say(f"not promoted: {refused}.")
        sys.exit(refused.code)
    except OSError as error:
        _say(f"not known to be promoted, and the candidate may still have its share: no answer: {error}.")
        sys.exit(UNKNOWN)
    _say("promoted.")


def _stop(number: int, _frame: FrameType | None) -> None:
    with contextlib.suppress(ValueError):
        signal.signal(number, signal.SIG_IGN)  # once is enough: what follows takes the candidate's share away
    sys.exit(128 + number)


def _say(sentence: str) -> None:
    sys.stdout.write(sentence + "\n")


if __name__ == "__main__":
    main()
