"""The full local stack: the orchestrator before the gateway, with Redis and Qdrant, up, asked, and down."""

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reference_stack.local import processes
from tests.support.stack import stack, write_target

pytestmark = pytest.mark.e2e

GATEWAY, ORCHESTRATOR = 21200, 21207


def ask(port: int, key: str, question: str) -> http.client.HTTPResponse:
    """A chat, with its answer unread."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    document = {"model": "tiny", "messages": [{"role": "user", "content": question}], "max_tokens": 4}
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    connection.request("POST", "/v1/chat/completions", json.dumps(document), headers)
    return connection.getresponse()


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    write_target(tmp_path, GATEWAY)
    yield tmp_path
    stack(tmp_path, "down")


def programs(home: Path) -> dict[str, Any]:
    return {row["program"]: row for row in json.loads(stack(home, "status", "--json").stdout)["programs"]}


def test_full_stack(home: Path) -> None:
    """Up with --full every component serves and is shown; down leaves no process (ORC-1)."""
    up = stack(home, "up", "--full", "--target", "target.yaml")
    assert up.returncode == 0, up.stderr
    shown = programs(home)
    assert {"engine-0", "engine-1", "guard", "gateway", "redis", "orchestrator"} <= shown.keys()
    assert all(row["state"] in ("STARTING", "RUNNING") and row["url"] for row in shown.values())
    answer = ask(ORCHESTRATOR, "user", "when are refunds paid?")
    assert (answer.status, answer.headers["x-pool"], answer.headers["x-degraded"]) == (200, "small", None)
    prompt_tokens = json.loads(answer.read())["usage"]["prompt_tokens"]
    assert (
        prompt_tokens > 3 * json.loads(ask(GATEWAY, "user", "when are refunds paid?").read())["usage"]["prompt_tokens"]
    )
    assert ask(ORCHESTRATOR, "nobody", "hello").status == 401
    assert stack(home, "up", "--target", "target.yaml").returncode == 0  # the core is there already
    assert stack(home, "down").returncode == 0
    assert processes.of_stack(home.resolve() / ".stack") == []


def test_full_beside_the_core(home: Path) -> None:
    """A core stack is not turned into a full one under whoever uses it."""
    assert stack(home, "up", "--target", "target.yaml").returncode == 0
    refused = stack(home, "up", "--full", "--target", "target.yaml")
    assert refused.returncode == 2
    assert "without --full" in refused.stderr
    assert "orchestrator" not in programs(home)
