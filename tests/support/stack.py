"""The local stack, as its own command line runs it in a directory of a test, on ports of the test's own."""

import os
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
LIMIT_S = 120


def stack(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """One command of the stack that lives in `home`, to its end."""
    return subprocess.run(
        [sys.executable, "-m", "reference_stack.local", *words],
        cwd=home,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )


def write_target(home: Path, port: int, **changes: object) -> Path:
    """`target.yaml` of a gateway on this port, with two simulated engines on the next ones."""
    target = {
        "kind": "local",
        "engine": "sim",
        "url": f"http://127.0.0.1:{port}",
        "engines": [f"http://127.0.0.1:{port + 1}", f"http://127.0.0.1:{port + 2}"],
        "model": "tiny",
        "tokenizer": str(ROOT / ".cache/tiny"),
        "profile": "h100-8b",
        "gpu": "simulated",
        "prompt_limit": 16384,
    }
    file = home / "target.yaml"
    file.write_text(yaml.safe_dump(target | changes))
    return file
