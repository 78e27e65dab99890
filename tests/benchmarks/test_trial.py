"""One measured run: claims meet the truth, CPU is the client's, and nothing is left running."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest

from benchmarks.server import TRUTH, TimedServer, Timing
from benchmarks.trial import CLAIM, FailedError, Load, paired, run, spread

pytestmark = pytest.mark.e2e  # starts real processes


SCRIPT = """
import http.client, sys, time
port, count = int(sys.argv[1].rsplit(":", 1)[1]), int(sys.argv[2])
rows = []
for index in range(count):
    connection = http.client.HTTPConnection("127.0.0.1", port)
    sent = time.monotonic()
    connection.request("POST", "/v1/completions", "{}", {"x-request-id": str(index)})
    connection.getresponse().read()
    rows.append(f"{index},{sent},{sent},nan,{time.monotonic() - sent}")
open("claims.csv", "w").write("\\n".join(rows))
"""


@dataclass
class Script:
    """The least client there is: one request after the other."""

    text: str = SCRIPT
    name: str = "script"

    def command(self, url: str, load: Load, folder: Path) -> list[str]:
        return [sys.executable, "-c", self.text, url, str(load.requests)]

    def environment(self) -> dict[str, str]:
        return {}

    def claims(self, folder: Path) -> np.ndarray:
        rows = [line.split(",") for line in (folder / "claims.csv").read_text().splitlines()]
        return np.array([(row[0], *map(float, row[1:])) for row in rows], dtype=CLAIM)


@pytest.fixture
def server() -> Iterator[TimedServer]:
    with TimedServer(Timing(plain_s=0.010), life_s=60) as running:
        yield running


LOAD = Load(50, 1.2, streamed=False)


@pytest.mark.usefixtures("two_cores")
def test_run_measures(server: TimedServer, tmp_path: Path) -> None:
    """A run has its CPU, every request in truth and claims, and an error of E2E that is not negative."""
    trial = run(Script(), LOAD, server, tmp_path / "trial")
    assert len(trial.truth) == len(trial.claims) == LOAD.requests
    assert trial.exit_code == 0
    assert trial.steady_requests > 0
    assert trial.whole_cpu_s > 0
    assert 0 < len(trial.e2e_error_s) <= trial.steady_requests + 1
    assert trial.e2e_error_s.min() >= 0
    assert len(trial.ttft_error_s) == 0, "a client that gives no TTFT has no error of it"


@pytest.mark.usefixtures("two_cores")
def test_client_that_dies_is_told(server: TimedServer, tmp_path: Path) -> None:
    """A client that leaves before it sends is a FailedError with its code, not a figure."""
    with pytest.raises(FailedError, match="ended early with code 3"):
        run(Script("import sys; sys.exit(3)"), LOAD, server, tmp_path / "trial")


@pytest.mark.usefixtures("two_cores")
def test_client_without_records_is_told(server: TimedServer, tmp_path: Path) -> None:
    """A client that played and wrote nothing gives no trial."""
    with pytest.raises(FailedError, match="left no records"):
        run(Script(SCRIPT.replace("claims.csv", "other.csv")), LOAD, server, tmp_path / "trial")


@pytest.mark.usefixtures("two_cores")
def test_nothing_is_left_behind(server: TimedServer, tmp_path: Path) -> None:
    """The children of a client that dies early are ended with it."""
    code = (
        "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); open('pid', 'w').write(str(p.pid)); sys.exit(1)"
    )
    with pytest.raises(FailedError):
        run(Script(code), LOAD, server, tmp_path / "trial")
    child = int((tmp_path / "trial" / "pid").read_text())
    _gone, alive = psutil.wait_procs([psutil.Process(child)] if psutil.pid_exists(child) else [], timeout=5)
    assert not alive


def test_pairs_by_id() -> None:
    """Claims with ids meet the truth of the same id, whatever their order and whatever is missing."""
    truth = np.array([("a", 1, 2, 3, 1, 1), ("b", 4, 5, 6, 1, 1)], dtype=TRUTH)
    claims = np.array([("b", 0, 0, 0, 9)], dtype=CLAIM)
    found, said = paired(truth, claims)
    assert found["id"].tolist() == said["id"].tolist() == ["b"]


def test_pairs_by_order_only_when_all_are_there() -> None:
    """Claims without ids are matched in order of sending; when one is missing none is matched."""
    truth = np.array([("", 1, 2, 3, 1, 1), ("", 4, 5, 6, 1, 1)], dtype=TRUTH)
    claims = np.array([("", 0, 8, 0, 2), ("", 0, 7, 0, 1)], dtype=CLAIM)
    assert paired(truth, claims)[1]["e2e_s"].tolist() == [1, 2]
    assert len(paired(truth, claims[:1])[1]) == 0


def test_spread_is_nearest_rank() -> None:
    """P50, P99 and maximum are values that were seen; of nothing there is none."""
    assert spread(np.arange(1.0, 101.0)) == [50, 99, 100]
    assert spread(np.array([])) is None
