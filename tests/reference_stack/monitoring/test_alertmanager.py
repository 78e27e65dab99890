"""Who hears of an alert, by the example configuration, as Alertmanager's own tool reads it (MON-2)."""

import shutil
import subprocess
from pathlib import Path

import pytest

from reference_stack.monitoring import gpu_rules
from reference_stack.monitoring.rules import ALERTS, CANDIDATE, Alert

pytestmark = pytest.mark.e2e  # amtool

EXAMPLE = Path(__file__).parents[3] / "reference_stack/monitoring/alertmanager.yml"
RECEIVERS = {"critical": "page", "warning": "tickets", "info": "nobody"}


def amtool(*words: str) -> str:
    assert shutil.which("amtool"), "amtool is missing: it comes with the Debian package prometheus-alertmanager"
    done = subprocess.run(["amtool", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_is_one() -> None:
    """Alertmanager would take the file."""
    assert "SUCCESS" in amtool("check-config", str(EXAMPLE))


ALL = (*ALERTS, *CANDIDATE, *gpu_rules.alerts(gpu_rules.read("NVIDIA A10")))


@pytest.mark.parametrize("alert", ALL, ids=lambda alert: alert.name)
def test_routes(alert: Alert) -> None:
    """What is critical pages somebody, a warning is a ticket, and the rest is for those who look."""
    told = amtool(
        "config", "routes", "test", f"--config.file={EXAMPLE}", f"alertname={alert.name}", f"severity={alert.severity}"
    )
    assert told.split() == [RECEIVERS[alert.severity]]
