"""Which programs a target needs, and what supervisord and Prometheus are told of them."""

import configparser
import dataclasses
import shlex
from pathlib import Path

import pytest
import yaml

from reference_stack.local import full, supervisor, target
from reference_stack.local.programs import documents, programs
from reference_stack.local.target import Target
from reference_stack.monitoring import prometheus
from reference_stack.orchestrator.__main__ import check

STATE = Path("/somewhere/50%/.stack")


@pytest.fixture
def sim() -> Target:
    return target.read(Path(target.__file__).with_name("target.yaml"))


@pytest.fixture
def vllm() -> Target:
    return target.read(Path(target.__file__).with_name("target_vllm.yaml"))


def names(wanted: Target, prometheus_binary: str | None = None) -> list[str]:
    return [program.name for program in programs(wanted, STATE, prometheus_binary)]


def test_simulated_stack(sim: Target) -> None:
    """The simulated engine brings a simulated GPU's exporter; Prometheus runs where it is installed."""
    assert names(sim) == ["engine-0", "engine-1", "guard", "gateway", "gpu-exporter"]
    assert names(sim, "/usr/bin/prometheus")[-1] == "prometheus"


def test_real_stack(vllm: Target) -> None:
    """Real vLLM starts with the process its replicas are forked from, and has no simulated GPU."""
    assert names(vllm) == ["zygote", "engine-0", "engine-1", "guard", "gateway"]


def test_each_port_once(sim: Target) -> None:
    """No two programs are told to take the same port."""
    taken = [port for program in programs(sim, STATE, "/usr/bin/prometheus") for port in program.ports]
    assert len(taken) == len(set(taken)) == 7


def test_full_stack(sim: Target, vllm: Target, tmp_path: Path) -> None:
    """Full adds Redis and the orchestrator, on ports of their own, told what it can read (ORC-1)."""
    for wanted in (sim, vllm):
        core = programs(wanted, STATE, "/usr/bin/prometheus")
        more = full.programs(wanted, STATE, "/usr/bin/redis-server")
        assert [program.name for program in more] == ["redis", "orchestrator"]
        taken = [port for program in core + more for port in program.ports]
        assert len(taken) == len(set(taken))
    for name, document in full.documents(sim, tmp_path).items():
        (tmp_path / name).write_text(yaml.safe_dump(document))
    told = check(tmp_path / "orchestrator.yaml")
    assert told.port in more[1].ports
    assert told.redis.url == more[0].url
    scraped = documents(sim, full.scraped(sim))["prometheus.yml"]["scrape_configs"]
    assert {"targets": [f"127.0.0.1:{told.port}"]} in scraped[-2]["static_configs"] + scraped[-1]["static_configs"]


def test_replicas_differ_by_port_device_and_seed(sim: Target) -> None:
    """Each replica has a port, a GPU and a seed of its own, and everything else in common."""
    first, second = (set(program.command) for program in programs(sim, STATE, None)[:2])
    assert first - second == {"8081", str(STATE / "gpu/GPU-0.json"), "0"}
    assert second - first == {"8082", str(STATE / "gpu/GPU-1.json"), "1"}


def test_supervisor_reads_the_commands_back(sim: Target) -> None:
    """Commands survive supervisord's own quoting and percent signs."""
    started = programs(sim, STATE, None)
    started[0] = dataclasses.replace(started[0], command=("run", "with space", "100%", "it's"))
    parsed = configparser.RawConfigParser()
    parsed.read_string(supervisor.config(started, STATE, Path("/somewhere")))
    for program in started:
        command = parsed[f"program:{program.name}"]["command"].replace("%%", "%")
        assert tuple(shlex.split(command)) == program.command
    priorities = [int(parsed[f"program:{program.name}"]["priority"]) for program in started]
    assert priorities == sorted(priorities)


def test_prometheus_scrapes_every_exporter(sim: Target, vllm: Target) -> None:
    """Engines, guard, Envoy and the GPU, each at its own path."""
    jobs = {job["job_name"]: job for job in documents(sim, {})["prometheus.yml"]["scrape_configs"]}
    assert jobs.keys() == {"engine", "guard", "gateway", "gpu"}
    assert jobs["engine"]["static_configs"] == [{"targets": ["127.0.0.1:8081", "127.0.0.1:8082"]}]
    assert jobs["gateway"]["metrics_path"] == "/stats/prometheus"
    assert "gpu" not in {job["job_name"] for job in documents(vllm, {})["prometheus.yml"]["scrape_configs"]}


def test_a_job_has_one_path() -> None:
    """Two paths in one job cannot be written down, so they are an error of ours."""
    with pytest.raises(ValueError, match="one path"):
        prometheus.config({"x": ["h:1/a", "h:2/b"]})
