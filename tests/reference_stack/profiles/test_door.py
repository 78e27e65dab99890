"""What the door of the profiles says, and with which exit code; `harness profile` opens it (ENG-1, ENG-2)."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from harness import cli
from harness.targets import local
from reference_stack.profiles import __main__ as door
from reference_stack.profiles import arguments, profile

Ask = Callable[..., tuple[int, str]]


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ask:
    """Ask the door something; its exit code and what it said."""

    def asked(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["profile", *words])
        code = door.main()
        said = capsys.readouterr()
        return code, said.out + said.err

    return asked


def test_check_shows_every_profile_and_exits_0(ask: Ask) -> None:
    """Without names all that ship are checked; each has a line that says that it holds."""
    code, said = ask("check")
    assert code == 0
    assert [line.split()[0] for line in said.splitlines()[1:]] == profile.names()
    assert all(line.endswith("yes") for line in said.splitlines()[1:])


def test_check_of_a_bad_profile_exits_1_and_names_the_line(ask: Ask, tmp_path: Path) -> None:
    """A file of one's own that does not hold is told with file and line."""
    path = tmp_path / "mine.yaml"
    path.write_text((profile.PROFILES / "a10.yaml").read_text().replace("utilization: 0.80", "utilization: 0.92"))
    code, said = ask("check", str(path))
    assert code == 1
    line = (
        path.read_text()
        .splitlines()
        .index(next(line for line in path.read_text().splitlines() if "gpu_memory_utilization" in line))
    )
    assert f"{path}:{line + 1}: with 0.92 GPU memory stands at 95.1 % from the start" in said
    assert "0.80 is the most" in said


def test_unknown_key_exits_2_with_file_and_line(ask: Ask, tmp_path: Path) -> None:
    """A key that is not known is a mistake of the user: exit 2, file and line."""
    path = tmp_path / "mine.yaml"
    path.write_text("swap_space: 4\n" + (profile.PROFILES / "a10.yaml").read_text())
    assert ask("check", str(path)) == (
        2,
        f"{path}:1: unknown key 'swap_space'; there are: card, model, checkpoint, quantization, typical_tokens, vllm, "
        "memory.\n",
    )


def test_70b_on_an_a10_does_not_fit_and_what_would(ask: Ask) -> None:
    """`explain a10 --model llama-3-70b` says that it does not fit, by how much, and on which cards it would."""
    code, said = ask("explain", "a10", "--model", "llama-3-70b")
    assert code == 0
    assert "-37.03" in said
    assert "it does not fit: weights (37.0 GiB)" in said
    assert "21.9 GiB more than the 17.6 GiB that vLLM may take" in said
    would = [line.split()[:3] for line in said[said.index("What would") :].splitlines()[2:]]
    assert ["a10", "4", "INT4"] in would
    assert ["h200", "1", "FP8"] in would


def test_explained_terms_add_up(ask: Ask) -> None:
    """The GiB of the lines, as they are printed, come to nothing: budget less weights, overheads and cache."""
    for name in profile.names():
        if name != "cpu":
            _, said = ask("explain", name)
            terms = [float(line.split()[-1]) for line in said.split("\n\n")[1].splitlines()[1:]]
            *parts, cache = terms
            assert sum(parts) == pytest.approx(cache, abs=0.03)


def test_suggest_keeps_to_the_cards_that_are_named(ask: Ask) -> None:
    """With --card only that card is tried; an unknown one is refused."""
    code, said = ask("suggest", "qwen3-32b", "--card", "l40s")
    assert code == 0
    assert [line.split()[0] for line in said.splitlines()[2:]] == ["l40s"]
    assert ask("suggest", "qwen3-32b", "--card", "b200")[0] == 2


def test_arguments_for_a_shell_and_for_kubernetes_are_the_same(ask: Ask) -> None:
    """Both renderings hold the checkpoint and the same arguments in the same order."""
    chosen = profile.read("h100")
    wanted = [chosen.checkpoint, *arguments.settings(chosen)]
    _, said = ask("args", "h100")
    assert said.replace("\\\n", " ").split() == ["vllm", "serve", *wanted]
    _, said = ask("args", "h100", "--format", "yaml")
    assert yaml.safe_load(said) == {"command": ["vllm", "serve"], "args": wanted}
    assert wanted[wanted.index("--kv-cache-dtype") + 1] == "fp8"


def test_arguments_of_what_does_not_hold_are_refused(ask: Ask, tmp_path: Path) -> None:
    """Nobody gets a command line for an engine that cannot start."""
    path = tmp_path / "mine.yaml"
    path.write_text((profile.PROFILES / "a10.yaml").read_text().replace("llama-3.1-8b\n", "llama-3.3-70b\n"))
    code, said = ask("args", str(path))
    assert code == 2
    assert "it does not fit" in said


def test_harness_profile_passes_all_of_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """`harness profile` hands every word to the stack's door, --help too, and exits with its code."""
    calls = []

    def run(command: list[str], check: bool) -> subprocess.CompletedProcess[str]:
        calls.append((command, check))
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(local.subprocess, "run", run)
    words = ["profile", "explain", "a10", "--model", "llama-3-70b", "--help"]
    assert CliRunner().invoke(cli.app, words).exit_code == 1
    assert calls == [([*local.PROFILES, *words[1:]], False)]
