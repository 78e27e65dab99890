"""Target files."""

from pathlib import Path

import pytest

from harness.model import UsageError
from harness.targets import base

URL_TARGET = """\
kind: url
url: https://serving.example:8443/
model: llama
tokenizer: tokenizers/llama
gpu: none
headers: {Authorization: "Bearer ${SERVING_KEY}"}
"""


def written(tmp_path: Path, text: str = URL_TARGET) -> str:
    path = tmp_path / "target.yaml"
    path.write_text(text)
    return str(path)


def test_a_target_has_defaults(tmp_path: Path) -> None:
    """Somebody's endpoint needs five keys; the rest is off or neutral."""
    target = base.load(written(tmp_path))
    assert (target.url, target.host) == ("https://serving.example:8443", "serving.example:8443")
    assert (target.load_factor, target.prompt_limit, target.engines, target.prometheus) == (1.0, 16_384, [], None)
    assert target.path == tmp_path / "target.yaml"


@pytest.mark.parametrize("engine", ["sim", "vllm"])
def test_local_stands_for_the_stacks_own_file(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`local` with an engine is the file shipped for it."""
    monkeypatch.chdir(Path(__file__).parents[2])
    target = base.load("local", engine)
    assert (target.kind, target.engine) == ("local", engine)
    assert len(target.engines) == 2
    assert base.load(str(target.path), engine) == target


def test_a_secret_stays_in_the_environment(tmp_path: Path) -> None:
    """A header names a variable; its value is read when it is needed, and its absence is told."""
    target = base.load(written(tmp_path))
    assert target.sent_headers({"SERVING_KEY": "s3cret"}) == {"Authorization": "Bearer s3cret"}
    assert "s3cret" not in repr(target)
    with pytest.raises(UsageError, match=r"target\.yaml:6: the header Authorization names \$\{SERVING_KEY\}, which"):
        target.sent_headers({})


@pytest.mark.parametrize("secret", ["s3cret\n", "s3cret\r\nx-evil: 1", "s3cret\u00e9"])
def test_a_secret_that_no_header_may_hold_is_refused_untold(tmp_path: Path, secret: str) -> None:
    """A line break at a secret's end would break the head of every request: refused, without showing the secret."""
    with pytest.raises(UsageError, match=r"target\.yaml:6: the header Authorization cannot be sent") as caught:
        base.load(written(tmp_path)).sent_headers({"SERVING_KEY": secret})
    assert "3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("kind: url", "kind: cloud", r":1: `kind`: input should be 'local', 'kubernetes' or 'url', not 'cloud'"),
        ("8443/", "8443/v1", r":2: `url`: .* is not scheme, host and port"),
        ("https://", "", r":2: `url`: .* is not scheme, host and port"),
        ("model: llama\n", "", r":1: `model` is missing"),
        ("model:", "modle:", r":3: unknown key `modle`; did you mean `model`"),
        ("gpu: none", "gpu: none\nload_factor: 0", r":6: `load_factor`: input should be greater than 0, not '0'"),
        ("Authorization:", "Authorization :x:", r":6: `headers\."),
        ("gpu: none", "gpu: none\nload_factor: 1e999", r":6: `load_factor`: input should be a finite number"),
        ("gpu: none", "gpu: dcgm\nprometheus: http://p:9090", r":6: `gpus` is missing: a Prometheus may know the GPUs"),
        ("gpu: none", "gpu: none\ngpus: {UUID: []}", r":6: `gpus\.UUID`: "),
        ("gpu: none", "gpu: none\nprometheus: localhost", r":6: `prometheus`: 'localhost' is not a URL"),
    ],
)
def test_a_mistake_is_one_sentence_with_its_line(tmp_path: Path, old: str, new: str, words: str) -> None:
    """What is wrong with the file, and where."""
    with pytest.raises(UsageError, match=words):
        base.load(written(tmp_path, URL_TARGET.replace(old, new)))


def test_the_gpus_that_serve_are_named_by_their_labels(tmp_path: Path) -> None:
    """One value or several for each label; a key knows its line for what turns out later."""
    text = URL_TARGET.replace("gpu: none", "gpu: dcgm\nprometheus: http://p:9090\ngpus: {Hostname: n1, UUID: [a, b]}")
    target = base.load(written(tmp_path, text))
    assert target.gpus == {"Hostname": ["n1"], "UUID": ["a", "b"]}
    assert target.where("model").endswith("target.yaml:3")
    assert target.where("profile").endswith("target.yaml")


def test_an_engine_that_the_file_has_not_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A local file serves with its own engine; one that nobody knows is named; a URL serves with what it has."""
    monkeypatch.chdir(Path(__file__).parents[2])
    with pytest.raises(UsageError, match="serves with engine sim, not vllm"):
        base.load("reference_stack/local/target.yaml", "vllm")
    with pytest.raises(UsageError, match="there is no engine fast"):
        base.load("local", "fast")
    assert base.load(written(tmp_path), "sim").engine == ""
