"""Where a run came from: enough to know it again, and to do it again. Facts only; no judgement, no secrets."""

import hashlib
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_NAMED = ("llm-release-harness", "locust", "gevent", "httptools", "numpy", "orjson", "pydantic", "tokenizers")


def facts(cwd: Path) -> dict[str, Any]:
    """Commit, command, versions, machine and GPU driver at this moment."""
    return {
        "command": ["harness", *sys.argv[1:]],
        **_commit(cwd),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _NAMED}},
        "machine": {"system": platform.platform(), "processor": platform.machine(), "cores": _cores()},
        "gpu_driver": _gpu_driver(),
    }


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _commit(cwd: Path) -> dict[str, Any]:
    head = _said(["git", "rev-parse", "HEAD"], cwd)
    return {"commit": head or "unknown", "dirty": bool(head and _said(["git", "status", "--porcelain"], cwd))}


def _gpu_driver() -> str:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return _said(query, Path.cwd()) or "none"


def _said(command: list[str], cwd: Path) -> str:
    try:
        return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _cores() -> int:
    with open("/proc/cpuinfo") as file:
        return sum(line.startswith("processor") for line in file)
