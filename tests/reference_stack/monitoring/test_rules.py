"""The alert rules, each played to Prometheus's own rule tests: when it fires, when it does not, when it is over."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from reference_stack.gateway.envoy import LATENCY_BUCKETS_MS
from reference_stack.monitoring import rules
from reference_stack.monitoring.rules import ALERTS, document

pytestmark = pytest.mark.e2e  # promtool

ROOT = Path(__file__).parents[3]
NAMES = [alert.name for alert in ALERTS]


def promtool(*words: str) -> subprocess.CompletedProcess[str]:
    binary = shutil.which("promtool")
    assert binary, "promtool is missing: it comes with the Debian package prometheus (apt-get install prometheus)"
    return subprocess.run([binary, *words], capture_output=True, text=True, check=False)


@dataclass
class Case:
    """Series (Prometheus's notation, a value a second), and for each moment, "20s", how many alerts fire."""

    alert: str
    series: dict[str, str]
    firing: dict[str, int]

    def test(self) -> dict[str, object]:
        return {
            "interval": "1s",
            "input_series": [{"series": name, "values": values} for name, values in self.series.items()],
            "promql_expr_test": [
                {
                    "expr": f'count(ALERTS{{alertname="{self.alert}",alertstate="firing"}}) or vector(0)',
                    "eval_time": moment,
                    "exp_samples": [{"labels": "{}", "value": count}],
                }
                for moment, count in self.firing.items()
            ],
        }

    def play(self, directory: Path, scale: float) -> None:
        (directory / "rules.yml").write_text(yaml.safe_dump(document(scale)))
        played = {"rule_files": ["rules.yml"], "evaluation_interval": "1s", "tests": [self.test()]}
        (directory / "test.yml").write_text(yaml.safe_dump(played))
        done = promtool("test", "rules", str(directory / "test.yml"))
        assert done.returncode == 0, done.stdout + done.stderr


def healthy(values: str) -> dict[str, str]:
    """Two replicas, as many in service as these values say."""
    return {
        'envoy_cluster_membership_healthy{envoy_cluster_name="engines"}': values,
        'envoy_cluster_membership_healthy{envoy_cluster_name="guard"}': "0x400",
        'envoy_cluster_membership_total{envoy_cluster_name="engines"}': "2x400",
        'envoy_cluster_membership_total{envoy_cluster_name="guard"}': "1x400",
    }


def latency(below: str, total: str) -> dict[str, str]:
    """The gateway's histogram: so many requests below 1.2 s, so many below 1.5 s and at all."""
    name = 'envoy_http_downstream_rq_time_bucket{envoy_http_conn_manager_prefix="%s",le="%s"}'
    return {
        name % ("gateway", "1000"): "0+0x1000",
        name % ("gateway", "1200"): below,
        name % ("gateway", "1500"): total,
        name % ("gateway", "+Inf"): total,
        name % ("admin", "1200"): "0+0x1000",
        name % ("admin", "+Inf"): "0+1000x1000",
    }


def memory(free_mib: str, used_mib: str, reserved_mib: str = "") -> dict[str, str]:
    fields = {"FREE": free_mib, "USED": used_mib} | ({"RESERVED": reserved_mib} if reserved_mib else {})
    return {f'DCGM_FI_DEV_FB_{field}{{gpu="0",UUID="GPU-0"}}': values for field, values in fields.items()}


def refused(rejected: str, allowed: str, engines: str) -> dict[str, str]:
    """What the gateway refused and let pass, and how many of these the engines answered with 4xx."""
    series = {
        'gateway_requests_total{decision="rejected",reason="bad_json"}': rejected,
        'gateway_requests_total{decision="allowed",reason="ok"}': allowed,
        'envoy_cluster_upstream_rq_xx{envoy_cluster_name="engines",envoy_response_code_class="4"}': engines,
        'envoy_cluster_upstream_rq_xx{envoy_cluster_name="guard",envoy_response_code_class="4"}': "0+1000x1000",
    }
    return {name: values for name, values in series.items() if values}


CASES = {
    # As in production: a `for` of minutes.
    "a replica that is not scraped": (
        Case("ReplicaDown", {'up{job="engine",instance="a"}': "1x9 0x40 1x60"}, {"39s": 0, "41s": 1, "52s": 0}),
        1.0,
    ),
    "a replica out of service": (Case("ReplicaDown", healthy("2x9 1x40 2x60"), {"39s": 0, "41s": 1, "52s": 0}), 1.0),
    "both are one replica each way": (
        Case("ReplicaDown", {'up{job="engine",instance="a"}': "0x60", **healthy("1x60")}, {"31s": 2}),
        1.0,
    ),
    "a scrape that was missed": (
        Case("ReplicaDown", {'up{job="engine",instance="a"}': "1x9 0x5 1x60"}, {"12s": 0, "16s": 0, "60s": 0}),
        1.0,
    ),
    "others that are not scraped": (Case("ReplicaDown", {'up{job="gpu"}': "0x99", **healthy("2x99")}, {"90s": 0}), 1.0),
    "six of a hundred are slow": (
        Case("HighLatencyP95", latency("0+94x900", "0+100x900"), {"290s": 0, "310s": 1}),
        1.0,
    ),
    "four of a hundred are slow": (Case("HighLatencyP95", latency("0+96x900", "0+100x900"), {"800s": 0}), 1.0),
    "nobody asks": (Case("HighLatencyP95", latency("7x900", "9x900"), {"800s": 0}), 1.0),
    "latency over again": (
        Case("HighLatencyP95", latency("0+0x60 0+100x200", "0+100x60 6100+100x200"), {"50s": 1, "90s": 0}),
        0.033,
    ),
    "memory over 85 %": (
        Case("GpuMemoryHigh", memory("40x9 14x130 40x60", "60x9 86x130 60x60"), {"129s": 0, "131s": 1, "145s": 0}),
        1.0,
    ),
    "memory at 84.5 %": (Case("GpuMemoryHigh", memory("155x300", "845x300"), {"290s": 0}), 1.0),
    "reserved memory is part of the total": (
        Case("GpuMemoryHigh", memory("15x300", "80x300", "10x300"), {"290s": 1}),
        1.0,
    ),
    "the gateway stops a third of the bad": (
        Case("RejectShareUnusual", refused("0+1x900", "0+9x900", "0+2x900"), {"175s": 0, "190s": 1}),
        1.0,
    ),
    "the gateway stops two thirds": (
        Case("RejectShareUnusual", refused("0+2x900", "0+8x900", "0+1x900"), {"800s": 0}),
        1.0,
    ),
    "the gateway stops all": (Case("RejectShareUnusual", refused("0+1x900", "0+9x900", "0+0x900"), {"800s": 0}), 1.0),
    "the gateway never stopped any": (
        Case("RejectShareUnusual", refused("", "0+9x900", "0+2x900"), {"175s": 0, "190s": 1}),
        1.0,
    ),
    "one bad request in a thousand": (
        Case("RejectShareUnusual", refused("0+0x900", "0+1000x900", "0+1x900"), {"800s": 0}),
        1.0,
    ),
    "nothing bad": (Case("RejectShareUnusual", refused("", "0+9x900", ""), {"800s": 0}), 1.0),
    "almost all is refused": (
        Case("RejectShareUnusual", refused("0+97x900", "0+3x900", ""), {"175s": 0, "190s": 1}),
        1.0,
    ),
    "a long queue": (
        Case(
            "QueueTooLong",
            {'vllm:num_requests_waiting{instance="a"}': "60x400", 'vllm:num_requests_waiting{instance="b"}': "60x400"},
            {"299s": 0, "301s": 1},
        ),
        1.0,
    ),
    "a queue of a hundred": (Case("QueueTooLong", {"vllm:num_requests_waiting": "100x400"}, {"390s": 0}), 1.0),
    # As in a short run: seconds.
    "a replica killed in a short run": (
        Case("ReplicaDown", healthy("2x9 1x4 2x60"), {"10s": 0, "11s": 1, "15s": 0}),
        0.033,
    ),
    "memory in a short run": (
        Case("GpuMemoryHigh", memory("40x9 14x20 40x60", "60x9 86x20 60x60"), {"13s": 0, "14s": 1, "32s": 0}),
        0.033,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_rule(name: str, tmp_path: Path) -> None:
    """The alert fires as long after its condition as its `for` says, and only then; it clears with the condition."""
    case, scale = CASES[name]
    case.play(tmp_path, scale)


def test_every_alert_is_played() -> None:
    """No alert is without a case in which it fires, and one in which it does not."""
    firing = {case.alert for case, _ in CASES.values() if any(case.firing.values())}
    silent = {case.alert for case, _ in CASES.values() if not any(case.firing.values())}
    assert firing == silent == set(NAMES)


def test_promtool_accepts_them(tmp_path: Path) -> None:
    """The files are good at any scale."""
    for scale in (1.0, 0.033, 1e-6):
        file = tmp_path / "rules.yml"
        file.write_text(yaml.safe_dump(document(scale)))
        done = promtool("check", "rules", str(file))
        assert done.returncode == 0 and f"{len(NAMES)} rules" in done.stdout, done.stdout + done.stderr


def test_scale_multiplies_times() -> None:
    """One setting shortens every `for` and every span, to no less than can be measured."""
    times = {scale: [rule["for"] for rule in document(scale)["groups"][0]["rules"]] for scale in (1.0, 0.033, 1e-6)}
    assert times == {
        1.0: ["30s", "300s", "120s", "180s", "300s"],
        0.033: ["1s", "10s", "4s", "6s", "10s"],
        1e-6: ["1s"] * 5,
    }
    for scale, span in ((1.0, "[300s]"), (0.033, "[10s]"), (1e-6, "[5s]")):
        text = yaml.safe_dump(document(scale))
        assert text.count("[") == text.count(span) > 0


def test_the_promise_is_a_boundary_of_the_histogram() -> None:
    """Whether the P95 is over 1.2 s is counted, not interpolated."""
    assert 1200 in LATENCY_BUCKETS_MS and sorted(LATENCY_BUCKETS_MS) == LATENCY_BUCKETS_MS


@pytest.mark.parametrize("name", NAMES)
def test_runbook(name: str) -> None:
    """Every alert names a runbook that is there: what it means, what first, what then, what after 10 minutes."""
    (rule,) = [rule for rule in document()["groups"][0]["rules"] if rule["alert"] == name]
    text = (ROOT / rule["annotations"]["runbook"]).read_text()
    assert text.startswith(f"# {name}\n")
    for part in ("**Means**", "1. **Look first**", "2. **Then**", "3. **After 10 minutes**"):
        assert part in text
    assert {file.stem for file in (ROOT / rules.RUNBOOKS).iterdir()} == set(NAMES)
