"""The dashboards' files: what they show first, and that Grafana can lay them out (MON-1)."""

import json
import re

import pytest

from reference_stack.monitoring import dashboards
from reference_stack.monitoring.rules import ALERTS, RECORDED


@pytest.mark.parametrize("name", dashboards.files())
def test_file_is_as_rendered(name: str) -> None:
    """`python -m reference_stack.monitoring` would change nothing, and there is no file that it would not write."""
    assert (dashboards.FOLDER / name).read_text() == dashboards.files()[name]
    assert {path.name for path in dashboards.FOLDER.iterdir()} == set(dashboards.files())


def test_first_page() -> None:
    """Three panels, no more: latency, GPU memory, what is refused, each with the line of its alert (MON-1)."""
    first = json.loads(dashboards.files()["serving.json"])
    assert [panel["gridPos"]["y"] for panel in first["panels"]] == [0, 0, 0]
    lines = [panel["fieldConfig"]["defaults"]["thresholds"]["steps"][1]["value"] for panel in first["panels"]]
    conditions = {alert.name: alert.condition for alert in ALERTS}
    for line, alert in zip(lines, ("HighLatencyP95", "GpuMemoryHigh", "RejectShareUnusual"), strict=True):
        assert re.search(rf"> {line}$", conditions[alert]), (line, alert)


@pytest.mark.parametrize("name", dashboards.files())
def test_layout(name: str) -> None:
    """No panel lies on another or off the page, no two have one number, and every line has a name."""
    panels = json.loads(dashboards.files()[name])["panels"]
    cells = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in panels]
    assert len(set(cells)) == len(panels) == len({p["id"] for p in panels})
    assert all(p["gridPos"]["x"] + p["gridPos"]["w"] <= dashboards.WIDTH for p in panels)
    for panel in panels:
        assert panel["title"] and panel["targets"]
        assert all(target["legendFormat"] and target["expr"] for target in panel["targets"])


def test_what_is_recorded_is_shown() -> None:
    """A series is recorded because a panel draws it."""
    shown = " ".join(query for page in dashboards.DASHBOARDS for one in page.panels for query in one.queries.values())
    assert all(name in shown for name in RECORDED)
