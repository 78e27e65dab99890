"""Profiles as files: what each one adds up to, and the files that must be refused (ENG-1)."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from reference_stack.profiles import profile
from reference_stack.profiles.document import ProfileError
from reference_stack.profiles.memory import GIB

ROOT = Path(__file__).parents[3]
ON_GPU = [name for name in profile.names() if name != "cpu"]

# The table that the profiles were planned with: weights in GiB, KV cache in GiB, tokens in thousands.
PLANNED = {
    "a10": (5.3, 10.7, 88),
    "l4": (8.5, 7.6, 124),
    "l40s": (15.2, 18.6, 243),
    "a100-40": (15.0, 15.0, 123),
    "a100-80": (37.0, 25.3, 83),
    "h100": (32.0, 29.8, 244),
    "h200": (67.7, 44.4, 291),
}


def test_there_is_a_profile_for_every_card() -> None:
    """Every card that is known has a profile of its own name."""
    assert set(profile.cards()) <= set(profile.names())


@pytest.mark.parametrize("name", ON_GPU)
def test_memory_adds_up_to_the_utilization(name: str) -> None:
    """Weights, KV pool and the rest together are gpu_memory_utilization of the card within 1 %, under 85 %."""
    chosen = profile.load(name)
    used = (chosen.weights_bytes + chosen.kv_pool_bytes + chosen.overhead_bytes) / chosen.card.memory_bytes
    assert used == pytest.approx(chosen.vllm.gpu_memory_utilization, rel=0.01)
    assert used < 0.85


@pytest.mark.parametrize("name", PLANNED)
def test_the_arithmetic_agrees_with_the_plan(name: str) -> None:
    """Weights within 1 %, KV cache within 3 % of the figures that were worked out by hand (ENG-1, ENG-2)."""
    weights_gib, kv_gib, kilo_tokens = PLANNED[name]
    chosen = profile.load(name)
    assert chosen.weights_bytes / GIB == pytest.approx(weights_gib, rel=0.01)
    assert chosen.kv_pool_bytes / GIB == pytest.approx(kv_gib, rel=0.03)
    assert chosen.kv_tokens / 1000 == pytest.approx(kilo_tokens, rel=0.03)


def test_the_simulated_default_keeps_its_times() -> None:
    """What the gates of the stages were set with: 27,056 blocks, and a decode of 8.5 GiB at 70 % of 3,350 GB/s."""
    chosen = profile.load("h100-8b")
    assert chosen.kv_blocks == 27_056
    assert chosen.cost(1, 0, 0).step_s == pytest.approx(0.001 + 8.5 * GIB / 3350e9 / 0.70, rel=1e-6)
    prefill = chosen.cost(8192, 0, 8192 * 4096)
    flops = 2 * 8.03e9 * 8192 / 1979e12 + 4 * 32 * 32 * 128 * 8192 * 4096 / 989e12
    assert prefill.step_s == pytest.approx(0.001 + flops / 0.50, rel=1e-4)


def edited(directory: Path, key: str, value: object) -> str:
    """The h100-8b profile with one key set (`vllm.dtype`), or removed when value is None, as a file; its name."""
    document: dict[str, Any] = yaml.safe_load((profile.PROFILES / "h100-8b.yaml").read_text())
    *sections, last = key.split(".")
    section = document
    for name in sections:
        section = section[name]
    if value is None:
        del section[last]
    else:
        section[last] = value
    path = directory / "edited.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return str(path)


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("vllm.max_num_seq", 80, r"edited\.yaml:\d+: unknown key 'vllm.max_num_seq': did you mean 'max_num_seqs'\?"),
        ("gpu", {"name": "A10"}, r"edited\.yaml:\d+: unknown key 'gpu'"),
        ("model", None, r"edited\.yaml:1: missing key 'model'"),
        ("vllm.kv_cache_dtype", None, r"edited\.yaml:6: missing key 'vllm\.kv_cache_dtype'"),
        ("vllm.max_num_seqs", "many", r"edited\.yaml:\d+: vllm.max_num_seqs: 'many' is not a whole number"),
        ("vllm.max_num_seqs", 2.5, "2.5 is not a whole number"),
        ("vllm.max_num_seqs", True, "True is not a whole number"),
        ("vllm.enable_prefix_caching", 1, "1 is not true or false"),
        ("vllm.max_num_batched_tokens", 0, "must be greater than zero"),
        ("vllm.gpu_memory_utilization", float("inf"), "must be greater than zero, and finite"),
        ("vllm.gpu_memory_utilization", 82, "is a share: 0.80, not 80"),
        ("vllm.gpu_memory_utilization", None, "takes one of gpu_memory_utilization and kv_cache_memory_bytes"),
        ("vllm.kv_cache_memory_bytes", 2**30, "takes one of gpu_memory_utilization and kv_cache_memory_bytes"),
        ("quantization", "awq", "'awq' is none of none, fp8, int4"),
        ("vllm.kv_cache_dtype", "fp16", "'fp16' is none of auto, bfloat16, float16, fp8"),
        ("card", "b200", r"edited\.yaml:1: There is no card 'b200'; there are: a10, a100-40"),
        ("model", "gpt-4", r"edited\.yaml:2: There is no model 'gpt-4'; there are: llama-3-70b"),
        ("memory", "little", "memory must be keys with values"),
        ("memory.weights_gib", 131.4, r"edited\.yaml:\d+: the KV cache holds 0 tokens, fewer than max_model_len"),
    ],
)
def test_bad_profile_is_refused_in_one_sentence(tmp_path: Path, key: str, value: object, sentence: str) -> None:
    """A profile with an unknown, missing, mistyped or impossible value is refused, with file and line (ENG-1)."""
    with pytest.raises(ProfileError, match=sentence):
        profile.load(edited(tmp_path, key, value))


def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    """The second of two values for one key is an error, not the winner."""
    path = tmp_path / "twice.yaml"
    path.write_text((profile.PROFILES / "a10.yaml").read_text() + "card: h100\n")
    with pytest.raises(ProfileError, match=r"twice\.yaml:\d+: 'card' is written twice, first in line 2"):
        profile.read(str(path))


def test_unknown_profile_lists_the_known_ones() -> None:
    """An unknown name is answered with the names there are."""
    with pytest.raises(ProfileError, match=r"There is no profile 'b200'; there are: a10, a100-40, .*h100-8b"):
        profile.load("b200")


def test_what_is_measured_is_not_simulated() -> None:
    """A card without a speed cannot be simulated, and says so."""
    with pytest.raises(ProfileError, match="no speed to calculate with"):
        profile.load("cpu").cost(1, 1, 1)


def test_cards_that_share_a_model_divide_its_time() -> None:
    """Two cards take half the time of one for the arithmetic, and half for the weights."""
    one = profile.load("h100-8b")
    two = replace(
        one,
        vllm=replace(one.vllm, tensor_parallel_size=2),
        stated=profile.Stated(weights_gib=one.weights_bytes / GIB / 2),
    )
    for batch in ((1, 0, 0.0), (8192, 0, 8192 * 4096.0)):
        assert two.cost(*batch).kernels_s == pytest.approx(one.cost(*batch).kernels_s / 2, rel=1e-6)


@pytest.mark.parametrize("name", profile.names())
def test_every_number_has_its_reason(name: str) -> None:
    """Each figure that somebody chose stands beside a comment that says why."""
    for line in (profile.PROFILES / f"{name}.yaml").read_text().splitlines():
        key, _, rest = line.strip().partition(": ")
        if key in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization"):
            assert " # " in rest, line
