"""The tiny model is a function of its words, and counts and speaks as the stack needs."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from reference_stack.engine import tiny

pytestmark = pytest.mark.e2e  # builds a model, in processes of its own

WORDS = Path(__file__).parents[3] / "harness" / "traffic" / "words.txt"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    tiny.build(directory, WORDS.read_text(encoding="utf-8").split())
    return directory


def hashes(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}


def test_two_builds_in_two_processes_are_the_same_bytes(model: Path, tmp_path: Path) -> None:
    """A second process, with its own hash seeds, writes the same files."""
    command = [
        sys.executable,
        "-m",
        "reference_stack.engine.tiny",
        "--out",
        str(tmp_path / "again"),
        "--text",
        str(WORDS),
    ]
    subprocess.run(command, check=True, timeout=60)
    assert hashes(tmp_path / "again") == hashes(model)


def test_a_rebuild_replaces_the_directory_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    """Building over an old model leaves the new one alone."""
    directory = tmp_path / "tiny"
    directory.mkdir()
    (directory / "stale").write_text("old")
    tiny.build(directory, WORDS.read_text(encoding="utf-8").split())
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]
    assert not (directory / "stale").exists()


def test_tokens_are_neither_words_nor_bytes(model: Path) -> None:
    """Some words are one token and some are several, and text comes back as it went in."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    words = WORDS.read_text(encoding="utf-8").split()
    lengths = {len(tokenizer.encode(f" {word}", add_special_tokens=False).ids) for word in words}
    assert {1, 2, 3} <= lengths
    text = "a café in 北京, 123 {\U0001f600}\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_a_prompt_counts_its_opening_token(model: Path) -> None:
    """The tokenizer puts one opening token before a prompt, as the engine will."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    assert len(tokenizer.encode("").ids) == 1
    assert tokenizer.encode("the").tokens[0] == tiny.BOS


def test_the_engine_can_read_every_length_a_scenario_sends(model: Path) -> None:
    """The model's context holds the longest prompt of the business mix."""
    assert json.loads((model / "config.json").read_text())["max_position_embeddings"] >= 32_768


def test_only_whole_characters_can_be_spoken(model: Path) -> None:
    """Every token left to the model is visible text that needs no neighbour; the end of text is not among them."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    unspeakable = set(tiny.unspeakable(tokenizer))
    assert tokenizer.token_to_id(tiny.EOS) in unspeakable
    spoken = [tokenizer.decode([token]) for token in range(tokenizer.get_vocab_size()) if token not in unspeakable]
    assert len(spoken) > 3000
    assert all(piece.strip() and "\ufffd" not in piece for piece in spoken)
