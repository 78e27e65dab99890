"""What tests of real processes share: starting things, waiting for them with a limit, ending what was started."""

import contextlib
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import orjson

from tests.support.serving import free_port
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
HARNESS = str(Path(sys.executable).with_name("harness"))


def answers(url: str) -> bool:
    with contextlib.suppress(OSError):
        return urllib.request.urlopen(url, timeout=1).status == 200
    return False


@contextlib.contextmanager
def process(command: list[str], cwd: Path = ROOT, **kinds: object) -> Iterator[subprocess.Popen[str]]:
    """A process in a session of its own, ended with its whole group."""
    started = subprocess.Popen(
        command, cwd=cwd, start_new_session=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **kinds
    )
    try:
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()
        if started.stdout:
            started.stdout.close()


@contextlib.contextmanager
def simulated_engine(work: Path, *arguments: str) -> Iterator[tuple[str, int]]:
    """A simulated engine alone, without a gateway: its URL and pid."""
    port = free_port()
    command = [sys.executable, "-m", "reference_stack.engine.simulated", "--port", str(port), "--model", "tiny"]
    command += ["--tokenizer", str(ROOT / ".cache/tiny"), "--profile", "h100-8b", "--device", str(work / "GPU-0.json")]
    with open(work / "engine.log", "w") as log:
        engine = subprocess.Popen(
            [*command, *arguments], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        until(lambda: answers(f"http://127.0.0.1:{port}/health"), "the simulated engine is healthy")
        yield f"http://127.0.0.1:{port}", engine.pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(engine.pid, signal.SIGKILL)
        engine.wait()


def url_target(work: Path, url: str) -> Path:
    """A target file for somebody's endpoint without a GPU."""
    path = work / "target.yaml"
    path.write_text(
        f"kind: url\nurl: {url}\nmodel: tiny\ntokenizer: {ROOT / '.cache/tiny'}\ngpu: none\nprompt_limit: 16384\n"
    )
    return path


def harness(*arguments: str, cwd: Path = ROOT, limit_s: float = 240) -> subprocess.CompletedProcess[str]:
    """Run the command and give back what it said."""
    return subprocess.run([HARNESS, *arguments], cwd=cwd, capture_output=True, text=True, timeout=limit_s, check=False)


def run_dir_of(said: str, cwd: Path = ROOT) -> Path:
    """The run directory that a finished command names."""
    return cwd / next(line for line in said.splitlines() if line.endswith("and every record")).split("/ holds")[0]


def origin_is_set(run_dir: Path) -> bool:
    log = run_dir / "log.conductor.jsonl"
    return log.exists() and b'"origin"' in log.read_bytes()


def verdict(run_dir: Path) -> dict[str, object]:
    value: dict[str, object] = orjson.loads((run_dir / "verdict.json").read_bytes())
    return value


def processes_of(marker: str) -> list[int]:
    """Living processes whose command line or environment holds the marker."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                told = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
                if state != "Z" and marker.encode() in told:
                    found.append(int(entry.name))
    return found
