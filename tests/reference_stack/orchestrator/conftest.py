import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from reference_stack.orchestrator import config as configuration
from reference_stack.orchestrator.config import Config

TOKENIZER = Path(__file__).parents[3] / ".cache" / "tiny"

Written = Callable[..., Path]


def document(folder: Path, **changed: Any) -> dict[str, Any]:
    """A whole configuration, with sections replaced; Redis and the gateway are at ports where nobody listens."""
    nobody = {"url": "http://127.0.0.1:9", "model": "tiny"}
    return {
        "port": 18999,
        "keys": str(folder / "keys.yaml"),
        "tokenizer": str(TOKENIZER),
        "pools": {"small": nobody, "large": nobody, "long": nobody},
        "routing": {
            "small_talk": "small",
            "expert": "large",
            "long_session": "long",
            "over_budget": "small",
            "expert_words": ["kernel"],
        },
        "tiers": {"standard": {}, "packed": {"stream": "packed"}},
        "redis": {"url": "redis://127.0.0.1:9", "when_down": "open"},
        "cors_origins": ["https://app.example.com"],
    } | changed


def key(name: str, tier: str = "standard", **more: Any) -> dict[str, Any]:
    """One line of a key file; the key's text is its name."""
    return {
        "name": name,
        "user": name,
        "tier": tier,
        "sha256": hashlib.sha256(name.encode()).hexdigest(),
    } | more


@pytest.fixture
def written(tmp_path: Path) -> Written:
    """Write a configuration, with sections replaced, and its keys; the path."""

    def write(**changed: Any) -> Path:
        keys = [key("alice"), key("bob", "packed")]
        (tmp_path / "keys.yaml").write_text(yaml.safe_dump({"keys": keys}))
        path = tmp_path / "orchestrator.yaml"
        path.write_text(yaml.safe_dump(document(tmp_path, **changed), sort_keys=False))
        return path

    return write


@pytest.fixture
def config(written: Written) -> Config:
    return configuration.read(written())
