"""What the orchestrator refuses to be told."""

from pathlib import Path
from typing import Any

import pytest

from reference_stack.orchestrator import config as configuration
from reference_stack.orchestrator import keys, retrieval
from reference_stack.orchestrator.config import UsageError


def refused(path: Path) -> str:
    with pytest.raises(UsageError) as caught:
        configuration.read(path)
    return str(caught.value)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"prot": 1}, "prot: Extra inputs are not permitted."),
        ({"port": 70000}, "port: Input should be less than 65536."),
        ({"redis": {"url": "redis://x", "when_down": "sometimes"}}, "redis.when_down: Input should be 'open' or"),
        ({"retrieval": {}}, "retrieval: needs either documents or url."),
        ({"answer_tokens": {"default": 9, "at_most": 5}}, "answer_tokens: default is more than at_most."),
        ({"model": "small"}, "model is small, which is a pool: then nothing would be routed."),
        ({"tiers": {"standard": {"guarded": True}}}, "a tier is guarded and there is no guardrail."),
        ({"tokenizer": "nowhere"}, "there is no nowhere/tokenizer.json."),
    ],
)
def test_one_sentence(written: Any, changed: dict[str, Any], sentence: str) -> None:
    """A mistake is told in one sentence (ORC-4)."""
    said = refused(written(**changed))
    assert sentence in said
    assert "\n" not in said


def test_the_line_of_the_mistake(written: Any) -> None:
    """A mistake deep in the file is told with its own line."""
    path = written()
    lines = path.read_text().splitlines()
    wrong = next(number for number, line in enumerate(lines) if "small_talk: small" in line)
    lines.insert(wrong + 1, "  smal_talk_chars: 5")
    path.write_text("\n".join(lines))
    assert refused(path).startswith(f"{path}:{wrong + 2}: routing.smal_talk_chars:")


def test_a_pool_that_is_not_there(written: Any, tmp_path: Path) -> None:
    """Routing names pools that exist (ORC-3)."""
    path = written()
    path.write_text(path.read_text().replace("expert: large", "expert: huge"))
    assert "routing names the pool huge, which is not in pools" in refused(path)


@pytest.mark.parametrize("text", ["a: [", "- 1\n", "", "a: b: c", "\x00"])
def test_no_configuration(tmp_path: Path, text: str) -> None:
    """What is no YAML mapping is refused with a line."""
    path = tmp_path / "c.yaml"
    path.write_text(text)
    assert refused(path).startswith(f"{path}:")


def test_key_file(written: Any, tmp_path: Path) -> None:
    """A key of no tier, twice the same, or with a time of no zone is refused."""
    written()
    path = tmp_path / "keys.yaml"
    good = path.read_text()
    assert len(keys.read(path, ["standard", "packed"])) == 2
    with pytest.raises(UsageError, match="bob is of the tier packed"):
        keys.read(path, ["standard"])
    path.write_text(good.replace("name: bob", "name: alice"))
    with pytest.raises(UsageError, match="same name"):
        keys.read(path, ["standard", "packed"])
    path.write_text(good + "  expires: 2026-12-01T00:00:00\n")
    with pytest.raises(UsageError, match="without a zone"):
        keys.read(path, ["standard", "packed"])


def test_documents_file(tmp_path: Path) -> None:
    """A line that is no document is named."""
    path = tmp_path / "d.jsonl"
    path.write_text('{"text": "one"}\n{"txt": "two"}\n')
    with pytest.raises(UsageError, match=":2: must be a JSON object"):
        retrieval.read_documents(path)


def test_the_example_has_every_key() -> None:
    """The example that ships is a configuration, and no key is missing from it (ORC-4)."""
    path = Path(configuration.__file__).with_name("example.yaml")
    config = configuration.read(path)

    def complete(model: Any, but: set[str]) -> None:
        assert set(type(model).model_fields) - but == model.model_fields_set

    complete(config, set())
    complete(config.routing, set())
    complete(config.tiers["standard"], set())
    complete(config.retrieval, {"documents"})
    for section in (config.redis, config.sanitizer, config.guardrail, config.tracing, config.answer_tokens):
        complete(section, set())
