"""A card without a card, as the processes under test see it, and what tests ask of it."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager

MIB, GIB = 2**20, 2**30
CONTEXT_BYTES = 256 * MIB


class Card:
    """The stub's card of 16 GiB, whose UUID is GPU-stub."""

    total_bytes = 16 * GIB

    def __init__(self, libraries, folder):
        folder.mkdir()
        self.folder = folder
        self.environment = os.environ | {"CARD": str(folder), "LD_LIBRARY_PATH": str(libraries)}

    def set(self, name, value=""):
        """`others`: bytes that somebody else holds; `refuse_above`, `hang`: see libcuda.c."""
        (self.folder / name).write_text(str(value))

    @contextmanager
    def python(self, *arguments):
        """A Python that has this card, killed at the end."""
        with subprocess.Popen(
            [sys.executable, *arguments], env=self.environment, stdout=subprocess.PIPE, text=True
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    def leak(self, *options):
        return self.python("-m", "harness.chaos.leak", "--device", "GPU-stub", *options)

    def free_bytes(self):
        """As NVML's own Python binding reads it, through what the harness reads with."""
        script = "from harness.sources import Nvml\nfor seen in Nvml({}).sample(): print(seen.name, seen.value)"
        done = subprocess.run(
            [sys.executable, "-c", script], env=self.environment, capture_output=True, text=True, check=True
        )
        values = dict(line.split() for line in done.stdout.splitlines())
        assert float(values["gpu.total_bytes"]) == self.total_bytes
        return int(float(values["gpu.free_bytes"]))


def until_said(process, word):
    """The lines of a leak up to the one that has a word among its keys."""
    said = []
    for line in process.stdout:
        said.append(json.loads(line))
        if word in said[-1]:
            return said
    raise AssertionError(f"it ended before it said {word}: {said}")
