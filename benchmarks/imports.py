"""What it costs to import a capture: `harness import` beside what others read packets with.

    python -m benchmarks.imports [--mb 200] [--rounds 3]

Captures are made up (tests/traffic/capture/material.py): Ethernet, whole segments, most answers streamed. Ours reads
`--mb`, and half of it to show that memory does not grow with the file; a peer reads as much as it can in bearable
time. All take turns. A figure is CPU per MB, net of the start: what the same command takes for a capture of ten
requests is subtracted. Peers that only take packets apart, or only join streams, do less than ours, and are named so.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from benchmarks.goals import MET, NOT_MET, NOT_RUN, Goal
from benchmarks.peers import CACHE, HERE, ROOT, why_absent
from benchmarks.tables import table
from harness.traffic import recording
from tests.traffic.capture import links
from tests.traffic.capture.links import SERVER_PORT
from tests.traffic.capture.material import base, write_pcap

FOLDER = ROOT / ".cache" / "bench" / "imports"
RESULTS = ROOT / "benchmarks" / "results"
LIMIT_S = 900
OURS, OURS_HALF = "harness import", "harness import, half the file"
RSS_LIMIT_MB, RSS_GROWTH_LIMIT = 100, 1.1


@dataclass(frozen=True)
class Reader:
    """`share` of the capture it reads; `command` is made of the capture and a folder to write in."""

    name: str
    share: float
    does: str
    command: Callable[[Path, Path], list[str]]
    absent: Callable[[], str] = lambda: ""


@dataclass(frozen=True)
class Cost:
    """One run of a reader: its CPU and that of its children, the largest of them in memory, and the capture's size."""

    reader: str
    round: int
    mb: float
    cpu_s: float
    peak_mb: float
    start_cpu_s: float
    start_mb: float

    @property
    def cpu_s_per_mb(self) -> float:
        return (self.cpu_s - self.start_cpu_s) / (self.mb - self.start_mb)


def _harness(capture: Path, folder: Path) -> list[str]:
    harness = str(ROOT / ".venv" / "bin" / "harness")
    return [harness, "import", str(capture), "-o", str(folder / "out.jsonl"), "--port", str(SERVER_PORT)]


def _library(environment: str, name: str) -> Callable[[Path, Path], list[str]]:
    python = str(CACHE / environment / "bin" / "python")
    return lambda capture, folder: [python, str(HERE / "packet_readers.py"), name, str(capture)]


def _tshark(capture: Path, folder: Path) -> list[str]:
    fields = [part for name in ("frame.time_epoch", "http.request.method", "http.request.uri") for part in ("-e", name)]
    decode = ["-d", f"tcp.port=={SERVER_PORT},http"]
    return ["tshark", "-n", "-r", str(capture), *decode, "-Y", "http.request", "-T", "fields", *fields]


def _tcpflow(capture: Path, folder: Path) -> list[str]:
    return ["tcpflow", "-r", str(capture), "-o", str(folder / "streams")]


def _debian(name: str) -> Callable[[], str]:
    return lambda: "" if shutil.which(name) else f"not installed: needs the package {name}"


READERS = (
    Reader(OURS, 1.0, "exchanges, with all times", _harness),
    Reader("tcpflow", 1.0, "streams to files, no HTTP", _tcpflow, _debian("tcpflow")),
    Reader("dpkt dissect", 0.25, "headers, no streams", _library("dpkt", "dpkt-dissect"), lambda: why_absent("dpkt")),
    Reader("tshark", 0.25, "requests, heads only", _tshark, _debian("tshark")),
    Reader(
        "scapy dissect", 0.02, "headers, no streams", _library("scapy", "scapy-dissect"), lambda: why_absent("scapy")
    ),
    Reader(
        "scapy TCPSession",
        0.02,
        "requests and answers",
        _library("scapy", "scapy-session"),
        lambda: why_absent("scapy"),
    ),
    Reader(OURS_HALF, 0.5, "exchanges, with all times", _harness),
)
LEAST = {"tshark": 10, "scapy TCPSession": 80, "dpkt dissect": 4, "tcpflow": 1 / 3}


def captures(mb: float) -> dict[float, tuple[Path, int]]:
    """A capture for each share, and how many requests it has; share 0 is one connection, to take the start from."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    made = {}
    for share in {reader.share for reader in READERS}:
        path = FOLDER / f"{mb * share:g}.pcap"
        made[share] = (path, write_pcap(path, mb * share))
    one = [packet for packet in base().packets if packet.connection == 19]
    start = FOLDER / "start.pcap"
    start.write_bytes(links.pcap(links.frames(one, links.ethernet), links.ETHERNET))
    return made | {0.0: (start, 10)}


def ran(reader: Reader, capture: Path) -> tuple[float, float]:
    """CPU seconds and peak MB of one run. Raises RuntimeError when it fails."""
    folder, said = FOLDER / "out", FOLDER / "said.txt"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    metered = [sys.executable, "-m", "benchmarks.metered", str(LIMIT_S), str(said), *reader.command(capture, folder)]
    used = json.loads(subprocess.run(metered, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout)
    if used["exit_code"]:
        raise RuntimeError(f"{reader.name} ended with {used['exit_code']}: {said.read_text()[-300:]}")
    return used["cpu_s"], used["peak_mb"]


def measured(made: dict[float, tuple[Path, int]], rounds: int) -> tuple[list[Cost], dict[str, str]]:
    """Every reader in turn, round after round; and why some are absent."""
    absent = {reader.name: reason for reader in READERS if (reason := reader.absent())}
    costs = []
    for number in range(rounds):
        for reader in READERS:
            if reader.name in absent:
                continue
            capture, requests = made[reader.share]
            print(f"round {number + 1}: {reader.name}, {_mb(capture):.1f} MB", file=sys.stderr, flush=True)
            start_cpu_s, _ = ran(reader, made[0.0][0])
            cpu_s, peak_mb = ran(reader, capture)
            if reader.command is _harness:
                _all_there(FOLDER / "out" / "out.jsonl", requests)
            costs.append(Cost(reader.name, number, _mb(capture), cpu_s, peak_mb, start_cpu_s, _mb(made[0.0][0])))
    return costs, absent


def _all_there(out: Path, requests: int) -> None:
    """Speed counts only when nothing is missing."""
    found = recording.read_header(out)
    if (found.requests, found.lost_share) != (requests, 0.0):
        raise RuntimeError(f"{found.requests} of {requests} requests were imported: {dict(found.account)}")


def _mb(path: Path) -> float:
    return path.stat().st_size / 1e6


def ratios(costs: Sequence[Cost], peer: str) -> list[float]:
    """A peer's CPU per MB over ours, in each round."""
    ours = {cost.round: cost for cost in costs if cost.reader == OURS}
    return [cost.cpu_s_per_mb / ours[cost.round].cpu_s_per_mb for cost in costs if cost.reader == peer]


def judged(costs: Sequence[Cost], absent: dict[str, str]) -> list[Goal]:
    """The goals of importing: a ratio to each peer, memory, and memory when the file doubles."""
    goals = []
    for number, (peer, least) in enumerate(LEAST.items(), start=1):
        found = ratios(costs, peer)
        said = f"{median(found):.2f}" if found else absent.get(peer, "")
        outcome = (MET if median(found) >= least else NOT_MET) if found else NOT_RUN
        goals.append(Goal(number, f"{peer}'s CPU per MB / ours >= {least:.2g}", said, outcome))
    peaks = [max((cost.peak_mb for cost in costs if cost.reader == name), default=0.0) for name in (OURS, OURS_HALF)]
    whole_mb, half_mb = peaks
    growth = whole_mb / half_mb if half_mb else 0.0
    for text, value, limit in (
        (f"memory of ours <= {RSS_LIMIT_MB} MB", whole_mb, RSS_LIMIT_MB),
        (f"memory when the file doubles <= {RSS_GROWTH_LIMIT} x", growth, RSS_GROWTH_LIMIT),
    ):
        outcome = (MET if value <= limit else NOT_MET) if value else NOT_RUN
        goals.append(Goal(len(goals) + 1, text, f"{value:.2f}" if value else "", outcome))
    return goals


def told(costs: Sequence[Cost], absent: dict[str, str], goals: Sequence[Goal]) -> str:
    """Everything as Markdown: a row for each reader, with medians over its rounds; the goals."""
    rows = []
    for reader in READERS:
        runs = [cost for cost in costs if cost.reader == reader.name]
        if not runs:
            rows.append((reader.name, reader.does, absent.get(reader.name, NOT_RUN), *("",) * 5))
            continue
        middle = [
            median(getattr(run, each) for run in runs)
            for each in ("mb", "cpu_s", "start_cpu_s", "cpu_s_per_mb", "peak_mb")
        ]
        mb, cpu_s, start_s, per_mb, peak_mb = middle
        found = ratios(costs, reader.name)
        figures = (f"{mb:.1f}", f"{cpu_s:.2f}", f"{start_s:.2f}", f"{1 / per_mb:.1f}", f"{peak_mb:.0f}")
        rows.append((reader.name, reader.does, *figures, f"{median(found):.2f} ({min(found):.2f} .. {max(found):.2f})"))
    head = ("reader", "what it does", "MB", "CPU s", "of it start", "MB / CPU s", "peak MB", "CPU per MB / ours")
    verdicts = [(str(goal.number), goal.text, goal.measured or "-", f"**{goal.outcome}**") for goal in goals]
    return table(head, rows) + "\n" + table(("#", "goal", "measured", ""), verdicts)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.imports", description=__doc__.partition("\n")[0])
    parser.add_argument("--mb", type=float, default=200, help="size of the capture that ours reads")
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    begun = datetime.now(UTC)
    costs, absent = measured(captures(asked.mb), asked.rounds)
    goals = judged(costs, absent)
    print(f"# Imports, {begun:%Y-%m-%d %H:%M} UTC: {asked.rounds} round(s), load {os.getloadavg()[2]:.1f}\n")
    print(told(costs, absent, goals))
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"imports-{begun:%Y%m%dT%H%M%SZ}.json"
    value = {"begun": begun.isoformat(), "absent": absent, "costs": [asdict(cost) for cost in costs]}
    path.write_text(json.dumps(value | {"goals": [asdict(goal) for goal in goals]}, indent=1) + "\n")
    print(f"Results: {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
