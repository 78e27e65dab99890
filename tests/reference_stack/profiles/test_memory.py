"""What lies in a card's memory: known models, and what must hold for every model (ENG-2)."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_stack.engine import tiny
from reference_stack.profiles import memory, model, profile
from reference_stack.profiles.document import ProfileError
from reference_stack.profiles.memory import GIB
from reference_stack.profiles.model import Model

NAMES = sorted(path.stem for path in model.MODELS.glob("*.json"))

# As published with each model.
PARAMETERS = {
    "llama-3-8b": 8_030_261_248,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.3-70b": 70_553_706_496,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-4b": 4_022_468_096,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "mixtral-8x7b": 46_702_792_704,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_counted_to_the_last_one(name: str) -> None:
    """The configuration alone gives the published number of parameters: heads, biases, norms, experts and ties."""
    assert model.read(name).params == PARAMETERS[name]


def test_a_token_passes_only_its_experts() -> None:
    """Mixtral has 46.7 G parameters, and a token meets 12.9 G of them; of a dense model it meets all."""
    assert model.read("mixtral-8x7b").active_params == pytest.approx(12.9e9, rel=0.005)
    assert model.read("qwen3-30b-a3b").active_params == pytest.approx(3.3e9, rel=0.02)
    assert model.read("llama-3-8b").active_params == model.read("llama-3-8b").params


@pytest.mark.parametrize(
    ("name", "quantization", "gib"),
    [
        ("llama-3-8b", "none", 14.96),  # vLLM says 14.96 to 14.99
        ("llama-3-8b", "int4", 5.33),
        ("llama-3-70b", "none", 131.4),
        ("llama-3-70b", "fp8", 67.7),
        ("llama-3-70b", "int4", 37.0),
        ("qwen3-4b", "int4", 2.48),  # one matrix for both embeddings: 0.72 GiB of it
        ("mixtral-8x7b", "none", 87.0),
    ],
)
def test_weights(name: str, quantization: str, gib: float) -> None:
    """Weights of known models in GiB; embedding and head keep their 16 bits."""
    assert memory.weights_bytes(model.read(name), quantization, "bfloat16") / GIB == pytest.approx(gib, rel=0.005)


@pytest.mark.parametrize(
    ("name", "kib"),
    [("llama-3-8b", 128), ("llama-3-70b", 320), ("qwen2.5-7b", 56), ("qwen3-14b", 160), ("mixtral-8x7b", 128)],
)
def test_cache_of_a_token(name: str, kib: int) -> None:
    """KV cache for one token in 16 bits: of the KV heads, which are fewer than the query heads."""
    assert memory.kv_bytes_per_token(model.read(name), 2) == kib * 1024


def test_cache_is_linear_in_length_and_not_what_the_documents_say() -> None:
    """8,192 tokens of Llama-3-70B are 2.5 GiB, not 28.7, and 32k tokens are 32 times 1k."""
    each = memory.kv_bytes_per_token(model.read("llama-3-70b"), 2)
    assert 8192 * each / GIB == 2.5
    assert 512 * each / GIB == pytest.approx(0.16, abs=0.005)
    assert 32_768 * each == 32 * (1024 * each)


@pytest.mark.parametrize(("batch_tokens", "seen_gib"), [(2048, 0.22), (8192, 1.10)])
def test_activations_are_near_what_vllm_measured(batch_tokens: int, seen_gib: float) -> None:
    """A batch of Llama-3-8B took 0.22 GiB with 2,048 tokens on an A10 and 1.10 GiB with 8,192 on an H100."""
    assert memory.forward_bytes(model.read("llama-3-8b"), batch_tokens) / GIB == pytest.approx(seen_gib, rel=0.2)


def test_the_tiny_model_is_the_one_that_is_built(tmp_path: Path) -> None:
    """models/tiny.json says what tiny.py writes into its config.json."""
    tiny.build(tmp_path / "tiny", ["alpha", "beta", "gamma"] * 50)
    built, known = model.read(str(tmp_path / "tiny")), model.read("tiny")
    assert replace(built, vocabulary=known.vocabulary) == known


@pytest.mark.parametrize("share", [0.5, 0.9])
@pytest.mark.parametrize("name", NAMES)
def test_gpus_split_weights_and_cache(name: str, share: float) -> None:
    """More GPUs never hold more each, and together never hold less than one."""
    read = model.read(name)
    for gpus in (2, 4, 8):
        one, part = (need(read, gpus=number, batch_tokens=round(4096 * share)) for number in (1, gpus))
        assert part.weights < one.weights <= gpus * part.weights
        assert part.kv_per_token <= one.kv_per_token <= gpus * part.kv_per_token
        assert part.forward <= one.forward


def need(read: Model, *, gpus: int = 1, batch_tokens: int = 2048, sequences: int = 64) -> memory.Need:
    return memory.need(
        read,
        quantization="none",
        dtype="bfloat16",
        kv_cache_dtype="auto",
        gpus=gpus,
        batch_tokens=batch_tokens,
        sequences=sequences,
    )


@given(
    name=st.sampled_from(NAMES),
    tokens=st.tuples(st.integers(1, 1 << 17), st.integers(1, 1 << 17)).map(sorted),
    sequences=st.tuples(st.integers(1, 2048), st.integers(1, 2048)).map(sorted),
)
def test_more_never_needs_less(name: str, tokens: list[int], sequences: list[int]) -> None:
    """A larger batch and more sequences need as much memory or more, and fewer bits as much or less."""
    read = model.read(name)
    small, large = (
        need(read, batch_tokens=batch, sequences=many).overhead for batch, many in zip(tokens, sequences, strict=True)
    )
    assert small <= large
    int4, fp8, plain = (
        memory.weights_bytes(read, quantization, "bfloat16") for quantization in ("int4", "fp8", "none")
    )
    assert int4 < fp8 < plain


@given(
    name=st.sampled_from([name for name in profile.names() if name != "cpu"]),
    shares=st.tuples(st.floats(0.5, 1), st.floats(0.5, 1)).map(sorted),
)
def test_more_utilization_never_leaves_less_cache(name: str, shares: list[float]) -> None:
    """The KV cache grows with gpu_memory_utilization, and never beyond what it leaves."""
    chosen = profile.read(name)
    low, high = (replace(chosen, vllm=replace(chosen.vllm, gpu_memory_utilization=share)) for share in shares)
    assert low.kv_tokens <= high.kv_tokens
    assert high.kv_pool_bytes <= max(0.0, high.budget_bytes - high.weights_bytes - high.overhead_bytes)


@given(small=st.floats(8, 200), more=st.floats(0, 200))
def test_a_larger_card_may_be_used_further(small: float, more: float) -> None:
    """The utilization that the gate allows rises with the card and stays under the gate."""
    low, high = (memory.highest_utilization(round(gib * GIB)) for gib in (small, small + more))
    assert low <= high < memory.GATE - memory.GATE_MARGIN


@pytest.mark.parametrize(
    ("card", "most"), [("a10", 0.80), ("l4", 0.80), ("a100-40", 0.81), ("l40s", 0.81), ("h100", 0.82), ("h200", 0.83)]
)
def test_the_utilization_that_the_gate_allows(card: str, most: float) -> None:
    """Rounded down: 0.80 on 24 GB, 0.81 on 40 and 48, 0.82 on 80, 0.83 on 141."""
    assert int(memory.highest_utilization(profile.read_card(card).memory_bytes) * 100) / 100 == most


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"model_type": "deepseek_v3"}', "the memory of model type 'deepseek_v3' is not known here"),
        ('{"model_type": "llama"}', "num_attention_heads must be a whole number above zero, not None"),
        ('{"model_type": "llama", "num_attention_heads": -1}', "num_attention_heads must be .* not -1"),
        ('{"model_type": "qwen3_moe", "mlp_only_layers": [0]}', "layers with experts and layers without"),
        ("[]", "a config.json holds keys with values"),
        ("{", "not JSON"),
    ],
)
def test_a_model_that_is_not_understood_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    """A configuration whose memory follows another arithmetic, or that lacks a field, is refused by name."""
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ProfileError, match=f"config.json: {sentence}"):
        model.read(str(tmp_path))


def test_a_window_counts_only_where_it_is_used(tmp_path: Path) -> None:
    """A sliding window is kept where the model looks through it, and ignored where its configuration turns it off."""
    assert model.read("qwen2.5-7b").window is None
    mistral = (
        model.MODELS.joinpath("llama-3-8b.json").read_text().replace('"llama"', '"mistral", "sliding_window": 4096')
    )
    (tmp_path / "mistral.json").write_text(mistral)
    assert model.read(str(tmp_path / "mistral.json")).window == 4096
