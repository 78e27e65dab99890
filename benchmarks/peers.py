"""The peers: how each is installed (pinned, in an environment of its own), started at our load, and read.

A peer is played as its own documents say, with one worker: it has one core here, as we have. What a peer does not
report stays `nan`. A peer that cannot be had says why; no figure is ever put in its place.
"""

import json
import os
import shutil
import subprocess
from dataclasses import asdict
from functools import cache
from pathlib import Path

import numpy as np
import yaml

from benchmarks.trial import CLAIM, Client, FailedError, Load

HERE = Path(__file__).parent.resolve()
ROOT = HERE.parent
CACHE = ROOT / ".cache" / "peers"
TOKENIZER = ROOT / ".cache" / "tiny"
NOT_GIVEN = float("nan")


class FastHttp:
    """locust's FastHttpUser reading streams line by line (`fast_http.py`), in our own environment."""

    name = "locust FastHttpUser"

    def __init__(self) -> None:
        self._load = ""

    def command(self, url: str, load: Load, folder: Path) -> list[str]:
        self._load = json.dumps(asdict(load) | {"requests": load.requests})
        locust = str(ROOT / ".venv" / "bin" / "locust")
        return [
            locust,
            "-f",
            str(HERE / "fast_http.py"),
            "--headless",
            "-u",
            "1",
            "-r",
            "1",
            "-H",
            url,
            "--only-summary",
        ]

    def environment(self) -> dict[str, str]:
        return {"BENCH_LOAD": self._load}

    def claims(self, folder: Path) -> np.ndarray:
        rows = [line.split(",") for line in (folder / "claims.csv").read_text().splitlines()]
        return np.array([(row[0], *map(float, row[1:])) for row in rows], dtype=CLAIM)


class Aiperf:
    """NVIDIA aiperf. Its due moment is the credit: the schedule behind the credits is in no record."""

    name = "aiperf"

    def command(self, url: str, load: Load, folder: Path) -> list[str]:
        return [
            *("env", "-u", "HF_HUB_OFFLINE"),  # with it set, a folder is no tokenizer to aiperf
            *(str(_bin("aiperf") / "aiperf"), "profile", "-m", "sim", "--url", url, "--endpoint-type", "chat"),
            *(["--streaming"] if load.streamed else []),
            *("--request-rate", str(load.rate_per_s), "--request-rate-mode", "poisson"),
            *("--request-count", str(load.requests), "--random-seed", str(load.seed)),
            *("--tokenizer", str(TOKENIZER), "--synthetic-input-tokens-mean", "64", "--output-tokens-mean", "32"),
            *("--workers-max", "1", "--record-processors", "1", "--ui", "none"),
            *("--export-level", "records", "--artifact-dir", str(folder / "out")),
        ]

    def environment(self) -> dict[str, str]:
        return {}

    def claims(self, folder: Path) -> np.ndarray:
        rows = []
        for line in (folder / "out" / "profile_export.jsonl").read_text().splitlines():
            record = json.loads(line)
            meta, metrics = record["metadata"], record["metrics"]
            if record.get("error"):
                continue
            rows.append(
                (
                    meta.get("x_request_id") or "",
                    meta["credit_issued_ns"] / 1e9 if meta.get("credit_issued_ns") else NOT_GIVEN,
                    meta["request_start_ns"] / 1e9,
                    metrics["time_to_first_token"]["value"] / 1e3 if "time_to_first_token" in metrics else NOT_GIVEN,
                    metrics["request_latency"]["value"] / 1e3,
                )
            )
        return np.array(rows, dtype=CLAIM)


class Guidellm:
    """guidellm, one worker process."""

    name = "guidellm"

    def command(self, url: str, load: Load, folder: Path) -> list[str]:
        return [
            *(str(_bin("guidellm") / "guidellm"), "run", "--backend", f"kind=openai_http,target={url},model=sim"),
            *("--profile", f"kind=poisson,rate={load.rate_per_s}"),
            *("--constraint", f"kind=max_requests,count={load.requests}"),
            *("--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}"),
            *("--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=32"),
            *("--output", f"kind=json,path={folder / 'out.json'}", "--disable-console"),
        ]

    def environment(self) -> dict[str, str]:
        return {"GUIDELLM__MP_CONTEXT_TYPE": "forkserver", "GUIDELLM__MAX_WORKER_PROCESSES": "1"}

    def claims(self, folder: Path) -> np.ndarray:
        report = json.loads((folder / "out.json").read_bytes())
        rows = []
        for request in report["benchmarks"][0]["requests"]["successful"]:
            at = request["info"]["timings"]
            sent, first, end = at["request_start"], at["first_token_iteration"] or NOT_GIVEN, at["request_end"]
            rows.append(("", at["targeted_start"], sent, first - sent, end - sent))
        return np.array(rows, dtype=CLAIM)


class InferencePerf:
    """inference-perf, one worker. Its records hold no due moment; it plays whole seconds and text completions."""

    name = "inference-perf"

    def command(self, url: str, load: Load, folder: Path) -> list[str]:
        tokens = {"mean": 64, "min": 64, "max": 64, "std_dev": 0, "total_count": load.requests}
        config = {
            "load": {
                "type": "poisson",
                "stages": [{"rate": load.rate_per_s, "duration": max(1, round(load.seconds))}],
                "num_workers": 1,
                "base_seed": load.seed,
            },
            "api": {"type": "completion", "streaming": load.streamed},
            "server": {"type": "vllm", "model_name": "sim", "base_url": url, "ignore_eos": True},
            "tokenizer": {"pretrained_model_name_or_path": str(TOKENIZER)},
            "data": {
                "type": "random",
                "input_distribution": tokens,
                "output_distribution": tokens | {"mean": 32, "min": 32, "max": 32},
            },
            "report": {"request_lifecycle": {"summary": True, "per_stage": False, "per_request": True}},
            "storage": {"local_storage": {"path": str(folder / "out")}},
        }
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        return [str(_bin("inference-perf") / "inference-perf"), "--config_file", str(folder / "config.yaml")]

    def environment(self) -> dict[str, str]:
        return {}

    def claims(self, folder: Path) -> np.ndarray:
        rows = []
        for record in json.loads((folder / "out" / "per_request_lifecycle_metrics.json").read_bytes()):
            if record["error"]:
                continue
            sent, answer = record["start_time"], record["info"]["response_metrics"]
            first = (answer.get("output_token_times") or [NOT_GIVEN])[0]
            rows.append(("", NOT_GIVEN, sent, first - sent, record["end_time"] - sent))
        return np.array(rows, dtype=CLAIM)


PEERS: tuple[Client, ...] = (FastHttp(), InferencePerf(), Aiperf(), Guidellm())


@cache
def why_absent(name: str) -> str:
    """Install a peer unless it is there; the reason when it cannot be had, empty when it can be run."""
    if name == FastHttp.name:
        return ""
    wanted = HERE / f"requirements-{name}.txt"
    done = CACHE / name / "installed.txt"
    if done.exists() and done.read_text() == wanted.read_text():
        return ""
    python = _python(wanted)
    if python is None:
        return "not installed: needs Python 3.12"
    print(f"installing {name} into {CACHE.relative_to(ROOT) / name} (minutes, once) ...", flush=True)
    shutil.rmtree(CACHE / name, ignore_errors=True)
    for command in (
        [python, "-m", "venv", str(CACHE / name)],
        [str(CACHE / name / "bin" / "pip"), "install", "--quiet", "-r", str(wanted)],
    ):
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            last = (result.stderr.strip().splitlines() or ["no message"])[-1]
            return f"not installed: {last}"
    done.write_text(wanted.read_text())
    return ""


def _python(requirements: Path) -> str | None:
    """The first interpreter there is of those that the requirements name in line 1 (`# python: 3.11 3.12`)."""
    for version in requirements.read_text().splitlines()[0].removeprefix("# python:").split():
        if found := shutil.which(f"python{version}", path=_search_path(version)):
            return found
    return None


def _search_path(version: str) -> str:
    """PATH, then pyenv's versions: its shims answer to every name and fail."""
    folders = [folder for folder in os.environ.get("PATH", "").split(":") if not folder.endswith("/shims")]
    folders += [str(bin_) for bin_ in sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin"))]
    return ":".join(folders)


def _bin(name: str) -> Path:
    if reason := why_absent(name):
        raise FailedError(f"{name} is {reason}")
    return CACHE / name / "bin"
