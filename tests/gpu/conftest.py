"""Stub driver libraries, built here, that every process under test loads as the real ones."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from stub_card import Card

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def libraries(tmp_path_factory):
    """The folder of libcuda.so.1 and libnvidia-ml.so.1."""
    if not shutil.which("gcc"):
        pytest.fail("there is no gcc to build the stub libraries with: install the package gcc")
    folder = tmp_path_factory.mktemp("lib")
    for name in ("libcuda", "libnvidia-ml"):
        command = ["gcc", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", str(folder / f"{name}.so.1")]
        subprocess.run([*command, str(HERE / f"{name}.c")], check=True)
    return folder


@pytest.fixture
def card(libraries, tmp_path):
    return Card(libraries, tmp_path / "card")
