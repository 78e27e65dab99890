"""The alert rules, each played to Prometheus's own rule tests: when it fires, when it does not, when it is over."""

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from reference_stack.gateway.envoy import LATENCY_BUCKETS_MS
from reference_stack.monitoring import gpu_rules, rules
from reference_stack.monitoring.rules import ALERTS, document, in_cluster

ROOT = Path(__file__).parents[3]
NAMES = [alert.name for alert in ALERTS]
GPU_RULES = gpu_rules.document(gpu_rules.read("NVIDIA H100 80GB HBM3"))
GROUPS = in_cluster()["groups"] + GPU_RULES["groups"]
IN_CLUSTER = [rule["alert"] for group in GROUPS for rule in group["rules"] if "alert" in rule]


def promtool(*words: str) -> subprocess.CompletedProcess[str]:
    binary = shutil.which("promtool")
    assert binary, "promtool is missing: it comes with the Debian package prometheus (apt-get install prometheus)"
    return subprocess.run([binary, *words], capture_output=True, text=True, check=False)


@dataclass
class Case:
    """Series (Prometheus's notation, a value every `every`), and for each moment, "20s", how many alerts fire."""

    alert: str
    series: dict[str, str]
    firing: dict[str, int]
    every: str = "1s"
    scale: float = 1.0  # of the rules' own times: as in production

    def test(self) -> dict[str, object]:
        return {
            "interval": self.every,
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

    def play(self, directory: Path) -> None:
        groups = document(self.scale)["groups"] if self.alert in NAMES else GROUPS
        own = [group for group in groups if self.alert in [rule.get("alert") for rule in group["rules"]]]
        (directory / "rules.yml").write_text(yaml.safe_dump({"groups": own}))
        played = {"rule_files": ["rules.yml"], "evaluation_interval": self.every, "tests": [self.test()]}
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


def engine(running: str, tokens: str) -> dict[str, str]:
    """A replica that says how many requests run on it, and how many tokens it has made."""
    return {
        'vllm:num_requests_running{instance="a"}': running,
        'vllm:generation_tokens_total{instance="a"}': tokens,
    }


def scraped(**jobs: str) -> dict[str, str]:
    """Who is scraped: each job once, an engine, the gateway and the guard unless said otherwise."""
    everyone = {"engine": "1x400", "gateway": "1x400", "guard": "1x400"} | jobs
    return {f'up{{job="{job}"}}': values for job, values in everyone.items() if values}


def releases(failed: str = "0+0x320", slow: int = 0, tokens: int = 32) -> dict[str, str]:
    """Two releases with ten answers every ten seconds; the candidate's failures, slow answers, and tokens an answer.

    The one that serves fails none, is slow in none, and makes 32 tokens an answer. The canary asks each for ten tokens
    besides, one at a time.
    """
    found = {}
    for cluster, bad, late in (("engines", "0+0x320", 0), ("candidate", failed, slow)):
        of = f'envoy_cluster_name="{cluster}"'
        found[f"envoy_cluster_upstream_rq_completed{{{of}}}"] = "0+10x320"
        found[f'envoy_cluster_upstream_rq_xx{{{of},envoy_response_code_class="5"}}'] = bad
        for below, count in (("800", 10 - late), ("1200", 10), ("+Inf", 10)):
            found[f'envoy_cluster_upstream_rq_time_bucket{{{of},le="{below}"}}'] = f"0+{count}x320"
    for release, made in (("stable", 32), ("candidate", tokens)):
        of = f'release="{release}",instance="{release}"'
        found[f"vllm:request_generation_tokens_sum{{{of}}}"] = f"0+{10 * made + 10}x320"
        found[f"vllm:request_generation_tokens_count{{{of}}}"] = "0+20x320"
        found[f'vllm:request_generation_tokens_bucket{{{of},le="1.0"}}'] = "0+10x320"
    return found


def release_case(series: dict[str, str], firing: dict[str, int]) -> Case:
    return Case("CandidateWorse", series, firing, every="10s")


def card(
    busy: float = 95, tensor: float = 0.6, dram: float = 0.3, copied: float = 1e9, engine: float = 0.9, sm: float = 0.8
) -> dict[str, str]:
    """A card that does the same all the time."""
    fields = {
        "DEV_GPU_UTIL": busy,
        "PROF_PIPE_TENSOR_ACTIVE": tensor,
        "PROF_DRAM_ACTIVE": dram,
        "PROF_PCIE_RX_BYTES": copied,
        "PROF_PCIE_TX_BYTES": copied,
        "PROF_GR_ENGINE_ACTIVE": engine,
        "PROF_SM_ACTIVE": sm,
    }
    return {
        f'DCGM_FI_{name}{{gpu="0",Hostname="n"}}': f"{value:.0f}x900" if value >= 1 else f"{value}x900"
        for name, value in fields.items()
    }


CASES = {
    # As in production: a `for` of minutes.
    "a replica that is not scraped": Case(
        "ReplicaDown", {'up{job="engine",instance="a"}': "1x9 0x40 1x60"}, {"39s": 0, "41s": 1, "52s": 0}
    ),
    "a replica out of service": Case("ReplicaDown", healthy("2x9 1x40 2x60"), {"39s": 0, "41s": 1, "52s": 0}),
    "both are one replica each way": Case(
        "ReplicaDown", {'up{job="engine",instance="a"}': "0x60", **healthy("1x60")}, {"31s": 2}
    ),
    "a scrape that was missed": Case(
        "ReplicaDown", {'up{job="engine",instance="a"}': "1x9 0x5 1x60"}, {"12s": 0, "16s": 0, "60s": 0}
    ),
    "others that are not scraped": Case("ReplicaDown", {'up{job="gpu"}': "0x99", **healthy("2x99")}, {"90s": 0}),
    "six of a hundred are slow": Case("HighLatencyP95", latency("0+94x900", "0+100x900"), {"290s": 0, "310s": 1}),
    "four of a hundred are slow": Case("HighLatencyP95", latency("0+96x900", "0+100x900"), {"800s": 0}),
    "nobody asks": Case("HighLatencyP95", latency("7x900", "9x900"), {"800s": 0}),
    "latency over again": Case(
        "HighLatencyP95", latency("0+0x60 0+100x200", "0+100x60 6100+100x200"), {"50s": 1, "90s": 0}, scale=0.033
    ),
    "memory over 85 %": Case(
        "GpuMemoryHigh", memory("40x9 14x130 40x60", "60x9 86x130 60x60"), {"129s": 0, "131s": 1, "145s": 0}
    ),
    "memory at 84.5 %": Case("GpuMemoryHigh", memory("155x300", "845x300"), {"290s": 0}),
    "reserved memory is part of the total": Case("GpuMemoryHigh", memory("15x300", "80x300", "10x300"), {"290s": 1}),
    "the gateway stops a third of the bad": Case(
        "RejectShareUnusual", refused("0+1x900", "0+9x900", "0+2x900"), {"175s": 0, "190s": 1}
    ),
    "the gateway stops two thirds": Case("RejectShareUnusual", refused("0+2x900", "0+8x900", "0+1x900"), {"800s": 0}),
    "the gateway stops all": Case("RejectShareUnusual", refused("0+1x900", "0+9x900", "0+0x900"), {"800s": 0}),
    "the gateway never stopped any": Case(
        "RejectShareUnusual", refused("", "0+9x900", "0+2x900"), {"175s": 0, "190s": 1}
    ),
    "one bad request in a thousand": Case(
        "RejectShareUnusual", refused("0+0x900", "0+1000x900", "0+1x900"), {"800s": 0}
    ),
    "nothing bad": Case("RejectShareUnusual", refused("", "0+9x900", ""), {"800s": 0}),
    "almost all is refused": Case("RejectShareUnusual", refused("0+97x900", "0+3x900", ""), {"175s": 0, "190s": 1}),
    "a long queue": Case(
        "QueueTooLong",
        {'vllm:num_requests_waiting{instance="a"}': "60x400", 'vllm:num_requests_waiting{instance="b"}': "60x400"},
        {"299s": 0, "301s": 1},
    ),
    "a queue of a hundred": Case("QueueTooLong", {"vllm:num_requests_waiting": "100x400"}, {"390s": 0}),
    "requests that run and make nothing": Case(
        "EngineStalled", engine("4x400", "0+100x60 6000x120 6000+100x100"), {"80s": 0, "125s": 1, "200s": 0}
    ),
    "an engine that has nothing to do": Case("EngineStalled", engine("0x400", "6000x400"), {"300s": 0}),
    "a gateway that is not scraped": Case(
        "MetricsMissing", scraped(gateway="1x9 0x150 1x60"), {"129s": 0, "131s": 1, "165s": 0}
    ),
    "a gateway that nobody knows of": Case("MetricsMissing", scraped(gateway=""), {"119s": 0, "121s": 1}),
    "engines are down": Case("MetricsMissing", scraped(engine="0x400"), {"390s": 0}),
    "no GPU exporter where there are no GPUs": Case("MetricsMissing", scraped(), {"390s": 0}),
    "a GPU exporter that is gone": Case("MetricsMissing", scraped(gpu="0x400"), {"121s": 1}),
    "as good as the other": release_case(releases(), {"1990s": 0}),
    "two answers of a hundred fail": release_case(releases("0+0.2x320"), {"1190s": 0, "1220s": 1}),
    "one answer of two hundred fails": release_case(releases("0+0.05x320"), {"1990s": 0}),
    "three of ten are slower": release_case(releases(slow=3), {"1190s": 0, "1220s": 1}),
    "answers half as long": release_case(releases(tokens=16), {"1190s": 0, "1220s": 1}),
    "answers a fifth longer": release_case(releases(tokens=38), {"1990s": 0}),
    "worse in two ways": release_case(releases("0+1x320", tokens=16), {"1220s": 2}),
    "it failed until it got its share": release_case(releases("0+1x60 60+0x260"), {"1180s": 0, "1990s": 0}),
    "it failed, and does no more": release_case(releases("0+2x125 250+0x190"), {"1190s": 0, "1240s": 1, "2450s": 0}),
    "no candidate": release_case(
        {name: values for name, values in releases().items() if "candidate" not in name}, {"1990s": 0}
    ),
    "a busy card whose tensor cores idle": Case("TensorCoresIdle", card(tensor=0.4), {"599s": 0, "601s": 1}),
    "tensor cores that work": Case("TensorCoresIdle", card(tensor=0.6), {"890s": 0}),
    "decoding is bound by memory": Case("TensorCoresIdle", card(tensor=0.1, dram=0.7), {"890s": 0}),
    "a card with nothing to do": Case("TensorCoresIdle", card(busy=5, tensor=0.0, dram=0.0), {"890s": 0}),
    "copies over the link": Case("HostCopiesHigh", card(copied=15e9), {"599s": 0, "601s": 1}),
    "a few copies": Case("HostCopiesHigh", card(copied=14e9), {"890s": 0}),
    "work that nobody does": Case("GpuStalled", card(engine=0.95, sm=0.65), {"599s": 0, "601s": 1}),
    "work that is done": Case("GpuStalled", card(engine=0.95, sm=0.75), {"890s": 0}),
    # As in a short run: seconds.
    "a replica killed in a short run": Case(
        "ReplicaDown", healthy("2x9 1x4 2x60"), {"10s": 0, "11s": 1, "15s": 0}, scale=0.033
    ),
    "memory in a short run": Case(
        "GpuMemoryHigh", memory("40x9 14x20 40x60", "60x9 86x20 60x60"), {"13s": 0, "14s": 1, "32s": 0}, scale=0.033
    ),
}


@pytest.mark.e2e  # promtool
@pytest.mark.parametrize("name", CASES)
def test_rule(name: str, tmp_path: Path) -> None:
    """The alert fires as long after its condition as its `for` says, and only then; it clears with the condition."""
    CASES[name].play(tmp_path)


def test_every_alert_is_played() -> None:
    """No alert is without a case in which it fires, and one in which it does not."""
    firing = {case.alert for case in CASES.values() if any(case.firing.values())}
    silent = {case.alert for case in CASES.values() if not any(case.firing.values())}
    assert firing == silent == set(IN_CLUSTER)


@pytest.mark.e2e
def test_promtool_accepts_them(tmp_path: Path) -> None:
    """The files are good at any scale."""
    for scale in (1.0, 0.033, 1e-6):
        file = tmp_path / "rules.yml"
        file.write_text(yaml.safe_dump(document(scale)))
        done = promtool("check", "rules", str(file))
        count = len(NAMES) + len(rules.RECORDED)
        assert done.returncode == 0 and f"{count} rules" in done.stdout, done.stdout + done.stderr


def test_scale_multiplies_times() -> None:
    """One setting shortens every `for` and every span, to no less than can be measured."""
    times = {scale: [rule["for"] for rule in document(scale)["groups"][0]["rules"]] for scale in (1.0, 0.033, 1e-6)}
    assert times == {
        1.0: ["30s", "300s", "120s", "180s", "300s", "30s", "120s"],
        0.033: ["1s", "10s", "4s", "6s", "10s", "1s", "4s"],
        1e-6: ["1s"] * 7,
    }
    for scale, spans in ((1.0, {"300s", "60s", "30s"}), (0.033, {"10s", "5s"}), (1e-6, {"5s"})):
        assert set(re.findall(r"\[(\w+)\]", yaml.safe_dump(document(scale)))) == spans


def test_the_promise_is_a_boundary_of_the_histogram() -> None:
    """Whether the P95 is over 1.2 s is counted, not interpolated."""
    assert 1200 in LATENCY_BUCKETS_MS and sorted(LATENCY_BUCKETS_MS) == LATENCY_BUCKETS_MS


@pytest.mark.parametrize("name", IN_CLUSTER)
def test_runbook(name: str) -> None:
    """Every alert names a runbook that is there: what it means, what first, what then, what after 10 minutes."""
    (rule,) = [rule for group in GROUPS for rule in group["rules"] if rule.get("alert") == name]
    text = (ROOT / rule["annotations"]["runbook"]).read_text()
    assert text.startswith(f"# {name}\n")
    for part in ("**Means**", "1. **Look first**", "2. **Then**", "3. **After 10 minutes**"):
        assert part in text
    assert {file.stem for file in (ROOT / rules.RUNBOOKS).iterdir()} == set(IN_CLUSTER)
