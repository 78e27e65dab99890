"""Dashboards and rules against a real stack and a real Prometheus: every query has an answer, every name is one that
something exposes (MON-1, MON-2, MON-4)."""

import http.client
import json
import re
import shutil
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from reference_stack.kubernetes import rendering
from reference_stack.monitoring import dashboards, gpu_rules
from reference_stack.monitoring.rules import RECORDED, in_cluster
from tests.support import stack as local
from tests.support.waiting import until

pytestmark = pytest.mark.e2e

PORT = 21240
PROMETHEUS = f"http://127.0.0.1:{PORT + 6}"
PANELS = [(page.uid, panel.title) for page in dashboards.DASHBOARDS for panel in page.panels]
LOOK_BACK = "10s"  # what Grafana would put in place of $__rate_interval


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A stack that has served a few: whole and streamed answers, bad requests, one for a model that is not there."""
    assert shutil.which("prometheus"), "prometheus is missing: it is the Debian package prometheus"
    home = tmp_path_factory.mktemp("dashboards")
    local.write_target(home, PORT, prometheus=PROMETHEUS, alert_scale=0.033)
    up = local.stack(home, "up", "--target", "target.yaml")
    assert up.returncode == 0, up.stderr
    yield
    local.stack(home, "down")


def complete(**fields: Any) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=20)
    try:
        body = json.dumps({"model": "tiny", "prompt": "hello", "max_tokens": 8} | fields)
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        return answer.status
    finally:
        connection.close()


def traffic() -> None:
    assert complete() == complete(stream=True) == 200
    assert complete(prompt="") == 400 and complete(model="another") == 404


def asked(path: str, **query: str) -> Any:
    with urllib.request.urlopen(f"{PROMETHEUS}/api/v1/{path}?{urllib.parse.urlencode(query)}", timeout=5) as answer:
        return json.load(answer)["data"]


def has_numbers(query: str) -> bool:
    """Whether every series of the answer is a number now; a quantile of nothing is none."""
    traffic()
    values = [one["value"][1] for one in asked("query", query=query)["result"]]
    return bool(values) and "NaN" not in values


@pytest.mark.usefixtures("stack")
@pytest.mark.parametrize("page", dashboards.files())
def test_every_query_has_an_answer(page: str) -> None:
    """What Grafana asks for each line of each panel, as its file says it, gives numbers while there is traffic."""
    document = json.loads((dashboards.FOLDER / page).read_text())
    queries = [target["expr"] for panel in document["panels"] for target in panel["targets"]]
    assert queries
    for query in queries:
        asks = query.replace("$__rate_interval", LOOK_BACK)
        until(lambda asks=asks: has_numbers(asks), f"{page} gets numbers for {query}")


@pytest.mark.usefixtures("stack")
def test_every_name_is_exposed() -> None:
    """Each metric of every rule and panel comes from engine, gateway, guard or exporter, or from DCGM by our list."""
    of_gpus = gpu_rules.document(gpu_rules.read("NVIDIA A10"))
    groups = in_cluster()["groups"] + of_gpus["groups"]
    alerts = [rule["expr"] for group in groups for rule in group["rules"]]
    panels = [query for page in dashboards.DASHBOARDS for panel in page.panels for query in panel.queries.values()]
    named = set[str]().union(*map(names, [*alerts, *panels]))
    assert len(named) > 30 and {"up", "gateway_requests_total", "DCGM_FI_PROF_SM_ACTIVE"} <= named
    fields = {line.partition(",")[0] for line in (rendering.HERE / "dcgm-fields.csv").read_text().splitlines()}

    def unknown() -> set[str]:
        traffic()
        return named - set(asked("label/__name__/values")) - fields - RECORDED.keys()

    until(lambda: not unknown(), lambda: f"these are exposed: {unknown()}")


FUNCTIONS = {"on", "by", "and", "or", "unless", "bool", "offset", "ignoring", "group_left"}


def names(expression: str) -> set[str]:
    """The metrics that a PromQL expression selects."""
    bare = re.sub(r'"[^"]*"|\{[^}]*\}|\[[^\]]*\]', "", expression)
    bare = re.sub(r"\b(by|on|without|ignoring)\s*\([^)]*\)", " ", bare)
    return set(re.findall(r"\b[a-zA-Z_:][\w:]*\b(?!\s*\()", bare)) - FUNCTIONS - {"e"}


def test_names() -> None:
    """The test's own reader of expressions."""
    assert names('histogram_quantile(0.95, sum by (le) (rate(a_bucket{b="c d"}[5m]))) / 1e3 > up') == {"a_bucket", "up"}
    assert names('x:y:z and on (gpu, Hostname) q unless absent(w{e="f"})') == {"x:y:z", "q", "w"}
