"""Target files: what is read, and how each mistake is told."""

from pathlib import Path

import pytest

from reference_stack.local import target
from reference_stack.local.target import UsageError

GOOD = """\
kind: local
engine: sim
url: http://127.0.0.1:8080
engines: [http://127.0.0.1:8081, http://127.0.0.1:8082]
model: tiny
tokenizer: .cache/tiny
profile: h100-8b
gpu: simulated
prompt_limit: 16384
"""


def read(tmp_path: Path, text: str) -> target.Target:
    file = tmp_path / "target.yaml"
    file.write_text(text)
    return target.read(file)


@pytest.mark.parametrize("name", ["target.yaml", "target_vllm.yaml"])
def test_shipped_targets_are_read(name: str) -> None:
    """The targets in the repository are good ones, and their ports do not overlap."""
    shipped = target.read(Path(target.__file__).with_name(name))
    taken = [shipped.port, *map(target.port_of, shipped.engines), *range(shipped.port + 3, shipped.port + 7)]
    assert len(taken) == len(set(taken))


def test_defaults_and_derived(tmp_path: Path) -> None:
    """What is not given is none; the model's length is the prompt limit and an eighth."""
    found = read(tmp_path, GOOD)
    assert (found.prometheus, found.gpu_metrics, found.load_factor) == (None, None, 1.0)
    assert (found.port, found.max_model_len) == (8080, 18432)
    assert found.engines == ("http://127.0.0.1:8081", "http://127.0.0.1:8082")
    assert (found.where("engines"), found.where("profit")) == (f"{found.path}:4", f"{found.path}:1")
    assert read(tmp_path, GOOD + "gpus: {UUID: [GPU-0]}\n").engines == found.engines, "which GPUs is the harness's"


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("model: tiny", "modle: tiny", "target.yaml:1: model is missing: it must be a name."),
        ("model: tiny", "model: tiny\nspeed: 3", "target.yaml:6: unknown key speed."),
        ("model: tiny", "model: tiny\nurl: x", "target.yaml:6: url is given twice, first in line 3."),
        ("model: tiny", "model:", "target.yaml:5: model must be a name, not None."),
        ("engine: sim", "engine: tgi", "target.yaml:2: engine must be one of sim, vllm, not 'tgi'."),
        ("kind: local", "kind: url", "target.yaml:1: this stack runs on this machine: kind must be local."),
        ("http://127.0.0.1:8080", "https://example.org", "target.yaml:3: url must be http://127.0.0.1:PORT, not"),
        ("http://127.0.0.1:8080", "http://127.0.0.1:80800", "target.yaml:3: url must be"),
        ("[http://127.0.0.1:8081, http://127.0.0.1:8082]", "[]", "target.yaml:4: engines must be a list of"),
        ("prompt_limit: 16384", "prompt_limit: 16k", "target.yaml:9: prompt_limit must be a whole number of tokens"),
        ("prompt_limit: 16384", "prompt_limit: yes", "target.yaml:9: prompt_limit must be"),
        ("prompt_limit: 16384", "prompt_limit: 9\nload_factor: 0", "target.yaml:10: load_factor must be a number"),
        ("profile: h100-8b\n", "", "target.yaml:1: profile is missing"),
        ("kind: local", "kind: [", "not YAML"),
    ],
)
def test_mistakes_are_told_with_their_line(tmp_path: Path, old: str, new: str, sentence: str) -> None:
    """Each mistake is one sentence with file and line."""
    with pytest.raises(UsageError) as told:
        read(tmp_path, GOOD.replace(old, new))
    assert sentence in str(told.value)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("text", ["", "- a\n", "just words\n"])
def test_no_mapping(tmp_path: Path, text: str) -> None:
    """A file that holds no keys is not a target."""
    with pytest.raises(UsageError, match="a target is a mapping"):
        read(tmp_path, text)


def test_no_file(tmp_path: Path) -> None:
    """A file that is not there is said to be so."""
    with pytest.raises(UsageError, match="cannot be read"):
        target.read(tmp_path / "none.yaml")
