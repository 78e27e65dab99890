"""A local stack of a test's own: beside any other, with its Prometheus, in a directory of its own."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]


def command(directory: Path, *words: str) -> str:
    """What one command of the stack in `directory` says."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = (sys.executable, "-m", "reference_stack.local", *words)
    done = subprocess.run(
        words, cwd=directory, env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def own_stack(directory: Path, port: int) -> Iterator[None]:
    """Two simulated engines behind a gateway at `port`; what stands beside it has the ports after it, Prometheus +6."""
    assert shutil.which("prometheus"), "prometheus is missing: it is the Debian package prometheus"
    target = yaml.safe_load((ROOT / "reference_stack/local/target.yaml").read_text())
    target |= {
        "url": f"http://127.0.0.1:{port}",
        "engines": [f"http://127.0.0.1:{port + 1}", f"http://127.0.0.1:{port + 2}"],
        "prometheus": f"http://127.0.0.1:{port + 6}",
        "gpu_metrics": f"http://127.0.0.1:{port + 5}/metrics",
        "tokenizer": str(ROOT / ".cache/tiny"),
    }
    (directory / "target.yaml").write_text(yaml.safe_dump(target))
    command(directory, "up", "--target", "target.yaml")
    try:
        yield
    finally:
        command(directory, "down")
