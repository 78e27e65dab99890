"""Profiles: their arithmetic, and the files that must be refused."""

from pathlib import Path

import pytest
import yaml

from reference_stack.engine import profile


@pytest.mark.parametrize("name", ["h100-8b", "a10-8b"])
def test_memory_adds_up_to_the_utilization(name: str) -> None:
    """Weights, KV pool and activations together are gpu_memory_utilization of the card within 1 %, under 85 %."""
    p = profile.load(name)
    used = (p.weights_bytes + p.kv_pool_bytes + p.overhead_bytes) / p.memory_bytes
    assert used == pytest.approx(p.vllm.gpu_memory_utilization, rel=0.01)
    assert used < 0.85


@pytest.mark.parametrize("name", ["h100-8b", "a10-8b"])
def test_kv_cache_is_linear_in_length(name: str) -> None:
    """Llama-3.1-8B keeps 128 KiB of BF16 cache per token."""
    assert profile.load(name).model.kv_bytes_per_token == 128 * 1024


@pytest.mark.parametrize("name", ["h100-8b", "a10-8b"])
def test_weights_agree_with_the_parameter_count(name: str) -> None:
    """The stated weights are those of the parameters at 8 or at 4.16 bits, with 16-bit embeddings and head."""
    p = profile.load(name)
    bytes_per_param = 1 if name == "h100-8b" else (4 + 20 / 128) / 8
    embeddings = 2 * 128_256 * 4096
    weights = (p.model.params - embeddings) * bytes_per_param + embeddings * 2
    assert p.model.weights_gib == pytest.approx(weights / profile.GIB, rel=0.01)


def edited(monkeypatch: pytest.MonkeyPatch, directory: Path, section: str, key: str, value: object) -> None:
    """Make `load("edited")` read the h100-8b profile with one key set, or removed when value is None."""
    document = yaml.safe_load((profile.PROFILES / "h100-8b.yaml").read_text())
    if value is None:
        del document[section][key]
    else:
        document[section][key] = value
    (directory / "edited.yaml").write_text(yaml.safe_dump(document))
    monkeypatch.setattr(profile, "PROFILES", directory)


@pytest.mark.parametrize(
    ("section", "key", "value", "sentence"),
    [
        ("gpu", "memory_gb", 80, "unknown key 'memory_gb'"),
        ("model", "layers", None, "missing key 'layers'"),
        ("vllm", "max_num_seqs", "many", "'many' is not a number"),
        ("gpu", "peak_tflops", 0, "greater than zero"),
        ("model", "weights_gib", 131.4, "the KV cache holds 0 tokens"),
    ],
)
def test_bad_profile_is_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: str, key: str, value: object, sentence: str
) -> None:
    """A profile with an unknown, missing, mistyped or impossible value is refused, and the message names it."""
    edited(monkeypatch, tmp_path, section, key, value)
    with pytest.raises(profile.ProfileError, match=sentence):
        profile.load("edited")


def test_unknown_profile_lists_the_known_ones() -> None:
    """An unknown name is answered with the names there are."""
    with pytest.raises(profile.ProfileError, match=r"a10-8b, h100-8b"):
        profile.load("h100")
