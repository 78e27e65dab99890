"""Somebody's endpoint: what it says of itself before anything is sent to it.

It asks for models and metrics only, each with a time limit. Traffic is the player's, faults are other targets' powers.
"""

import re
from typing import Any

import requests

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
            str(target.path),
        )
    served = {model["id"]: model for model in _models(target)}
    if target.model not in served:
        raise UsageError(
            f"{target.url} does not serve a model {target.model}; it serves: {', '.join(sorted(served)) or 'none'}",
            str(target.path),
        )
    return {
        "models": sorted(served),
        "max_model_len": served[target.model].get("max_model_len"),
        "gpu_memory_utilization": {
            engine: share for engine in target.engines if (share := _utilisation(engine)) is not None
        },
    }


def _models(target: Target) -> list[dict[str, Any]]:
    asked = f"{target.url}/v1/models"
    try:
        answer = requests.get(asked, headers=target.sent_headers(), timeout=LIMIT_S)
    except requests.exceptions.SSLError as error:
        raise UsageError(f"{asked} has no certificate that can be trusted: {error}", str(target.path)) from None
    except requests.exceptions.RequestException as error:
        told = "no answer in time" if isinstance(error, requests.exceptions.Timeout) else "no connection"
        raise UsageError(f"{target.url} cannot be reached: {told}", str(target.path)) from None
    if answer.status_code != requests.codes.ok:
        raise UsageError(f"{asked} answers {answer.status_code}: {answer.text[:100]!r}", str(target.path))
    try:
        models: list[dict[str, Any]] = [model for model in answer.json()["data"] if "id" in model]
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"{asked} answers something that is no list of models", str(target.path)) from None
    return models


def _utilisation(engine: str) -> float | None:
    """The share of each GPU that an engine took at its start, if it tells."""
    try:
        page = requests.get(f"{engine}/metrics", timeout=LIMIT_S).text
    except requests.exceptions.RequestException:
        return None
    found = _UTILISATION.search(page)
    return float(found[1]) if found else None
