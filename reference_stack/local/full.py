"""What `up --full` adds to a local stack: Redis, and the orchestrator with Qdrant inside. Pure functions of the target.

Users then speak to the orchestrator, which asks the gateway; whoever speaks to the gateway itself meets the same stack
as without it. The two API keys are no secrets: they open this machine's loopback and nothing else.
"""

import hashlib
import sys
from pathlib import Path
from typing import Any

from reference_stack.local.programs import Program
from reference_stack.local.target import HOST, Target

ORCHESTRATOR_DISTANCE = 7  # from the gateway's port
REDIS_DISTANCE = 8
DOCUMENTS = Path(__file__).with_name("documents.jsonl")


def programs(target: Target, state: Path, redis_binary: str) -> list[Program]:
    """The processes, in the order of starting."""
    redis = target.port + REDIS_DISTANCE
    command = (redis_binary, "--port", str(redis), "--bind", HOST, "--save", "", "--dir", str(state))
    port = target.port + ORCHESTRATOR_DISTANCE
    url = f"http://{HOST}:{port}"
    own = (sys.executable, "-m", "reference_stack.orchestrator", str(state / "orchestrator.yaml"))
    return [
        Program("redis", command, f"redis://{HOST}:{redis}", None, (redis,)),
        Program("orchestrator", own, url, f"{url}/health", (port,)),
    ]


def scraped(target: Target) -> dict[str, list[str]]:
    """What Prometheus asks besides, as jobs of addresses."""
    return {"orchestrator": [f"{HOST}:{target.port + ORCHESTRATOR_DISTANCE}/metrics"]}


def documents(target: Target, state: Path) -> dict[str, dict[str, Any]]:
    """Their configuration files, by name."""
    pool = {"url": target.url, "model": target.model}
    orchestrator = {
        "port": target.port + ORCHESTRATOR_DISTANCE,
        "keys": str(state / "keys.yaml"),
        "tokenizer": str(target.tokenizer),
        "model": target.model,  # whoever asks for the model has the pool chosen
        "pools": {"small": pool, "large": pool, "long": pool},
        "routing": {"small_talk": "small", "expert": "large", "long_session": "long", "over_budget": "small"},
        "tiers": {"standard": {"stream": "packed"}, "load": _WITHOUT_LIMITS},
        "redis": {"url": f"redis://{HOST}:{target.port + REDIS_DISTANCE}", "when_down": "open"},
        "retrieval": {"documents": str(DOCUMENTS)},
        "sanitizer": {},
        "guardrail": {"phrases": ["BEGIN PRIVATE KEY"]},
    }
    keys = [_key("user", "standard"), _key("load", "load")]
    return {"orchestrator.yaml": orchestrator, "keys.yaml": {"keys": keys}}


_WITHOUT_LIMITS = {"requests_per_min": 10**6, "tokens_per_min": 10**9, "tokens_per_h": 10**11}


def _key(name: str, tier: str) -> dict[str, str]:
    """A key whose text is its name: what a user sends is `Authorization: Bearer NAME`."""
    return {"name": name, "user": name, "tier": tier, "sha256": hashlib.sha256(name.encode()).hexdigest()}
