"""Somebody's endpoint: what it says of itself before anything is sent to it.

It asks for models, metrics and a single token only, each with a time limit, and it asks as the player does: directly,
with the system's trust in certificates, following nobody elsewhere. What answers here answers there. Traffic is the
player's, faults are other targets' powers.
"""

import json
import re
import ssl
from collections.abc import Mapping
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from harness.model import UsageError
from harness.targets.base import Target

LIMIT_S = 5.0
_UTILISATION = re.compile(r'^vllm:cache_config_info\{.*\bgpu_memory_utilization="([0-9.]+)"', re.MULTILINE)


def preflight(target: Target) -> dict[str, Any]:
    """What the target serves: `models`, `max_model_len` and, by engine, `gpu_memory_utilization` where they are told.

    Raises UsageError when it cannot be reached, refuses us, does not serve the target's model, or when the model's
    tokenizer is not there.
    """
    if not (target.tokenizer / "tokenizer.json").exists():
        raise UsageError(
            f"there is no {target.tokenizer}/tokenizer.json: lengths are measured with the model's own tokenizer",
            target.where("tokenizer"),
        )
    served = {model["id"]: model for model in _models(target)}
    if target.model not in served:
        raise UsageError(
            f"{target.url} does not serve a model {target.model}; it serves: {', '.join(sorted(served)) or 'none'}",
            target.where("model"),
        )
    return {
        "models": sorted(served),
        "max_model_len": served[target.model].get("max_model_len"),
        "gpu_memory_utilization": {
            engine: share for engine in target.engines if (share := _utilisation(engine)) is not None
        },
    }


def _models(target: Target) -> list[dict[str, Any]]:
    asked, where = f"{target.url}/v1/models", target.where("url")
    try:
        status, page = _ask(asked, target.sent_headers())
    except ssl.SSLError as error:
        raise UsageError(f"{asked} has no certificate that can be trusted: {error}", where) from None
    except (OSError, HTTPException) as error:
        told = "no answer in time" if isinstance(error, TimeoutError) else "no connection"
        raise UsageError(f"{target.url} cannot be reached: {told}", where) from None
    if status != HTTPStatus.OK:
        raise UsageError(f"{asked} answers {status}: {page[:100]!r}", where)
    try:
        models: list[dict[str, Any]] = [model for model in json.loads(page)["data"] if "id" in model]
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"{asked} answers something that is no list of models", where) from None
    return models


def _utilisation(engine: str) -> float | None:
    """The share of each GPU that an engine took at its start, if it tells."""
    try:
        _, page = _ask(f"{engine}/metrics", {})
    except (OSError, HTTPException):
        return None
    found = _UTILISATION.search(page)
    return float(found[1]) if found else None


def serves(target: Target, url: str = "") -> bool:
    """Whether one token is served, by the target or by the replica at `url`: /health may say yes for a dead engine."""
    question = {"model": target.model, "prompt": "canary", "max_tokens": 1, "temperature": 0}
    headers = {**target.sent_headers(), "content-type": "application/json"}
    try:
        status, page = _ask(f"{url or target.url}/v1/completions", headers, json.dumps(question))
        return status == HTTPStatus.OK and bool(json.loads(page)["choices"])
    except (OSError, HTTPException, ValueError, KeyError, TypeError):
        return False


def _ask(url: str, headers: Mapping[str, str], body: str | None = None) -> tuple[int, str]:
    """Status and text of one question, without proxies, redirects or a trust of its own, as `requests` would have."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    connection = HTTPConnection(host, timeout=LIMIT_S)
    if parts.scheme == "https":
        connection = HTTPSConnection(host, timeout=LIMIT_S, context=ssl.create_default_context())
    try:
        connection.request("POST" if body else "GET", parts.path, body=body, headers=dict(headers))
        answer = connection.getresponse()
        return answer.status, answer.read().decode(errors="replace")
    finally:
        connection.close()
