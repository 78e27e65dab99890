"""The profiles that must be refused, and those that must not (ENG-2)."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reference_stack.profiles import model, profile, rules, suggestions
from reference_stack.profiles.profile import Profile, Stated


def changed(name: str, *, card: str = "", to: str = "", quantization: str = "", **settings: Any) -> Profile:
    """A shipped profile with another card, model, quantisation or settings."""
    chosen = profile.read(name)
    return replace(
        chosen,
        card=profile.read_card(card) if card else chosen.card,
        model=model.read(to) if to else chosen.model,
        quantization=quantization or chosen.quantization,
        vllm=replace(chosen.vllm, **settings),
        stated=Stated(),
    )


@pytest.mark.parametrize("name", profile.names())
def test_what_ships_holds(name: str) -> None:
    """No shipped profile breaks a rule, nor calls for a note (ENG-1)."""
    assert rules.breaches(profile.read(name)) == []


@pytest.mark.parametrize(
    ("bad", "key", "sentence"),
    [
        (
            changed("a10", quantization="none"),
            "vllm.max_model_len",
            "holds [0-9],[0-9]{3} tokens, fewer than one sequence",
        ),
        (
            changed("a10", to="llama-3.3-70b"),
            "model",
            "does not fit: weights .37.0 GiB. .* 21.9 GiB more than the 17.6",
        ),
        (changed("h100", to="llama-3.3-70b"), "model", "does not fit: weights .67.7 GiB. .* 6.7 GiB more"),
        (changed("a10", kv_cache_dtype="fp8"), "vllm.kv_cache_dtype", "compute capability 8.9, and NVIDIA A10 has"),
        (changed("a100-40", quantization="fp8"), "quantization", "would store 8 bits and compute in 16"),
        (changed("a10", max_num_seqs=200), "vllm.max_num_seqs", "200 sequences .* would be preempted .*; 6[0-9] fit"),
        (changed("a10", max_num_batched_tokens=32), "vllm.max_num_batched_tokens", "no place for 48 sequences"),
        (changed("h100", max_model_len=65536), "vllm.max_model_len", "knows 40,960 positions, fewer than 65,536"),
        (changed("h100", gpu_memory_utilization=0.92), "vllm.gpu_memory_utilization", "92.9 % .* 0.82 is the most"),
        (changed("h100", gpu_memory_utilization=0.83), "vllm.gpu_memory_utilization", "cannot pass with any margin"),
        (changed("h100", tensor_parallel_size=3), "vllm.tensor_parallel_size", "64 query heads .* by 3 GPUs"),
        (changed("l40s", tensor_parallel_size=5), "vllm.tensor_parallel_size", "8 KV heads cannot be shared by 5 GPUs"),
        (
            changed("a10", to="qwen3-4b", tensor_parallel_size=8),
            "vllm.tensor_parallel_size",
            "1,216 inner columns on each of 8 GPUs are no whole number",
        ),
        (changed("cpu", kv_cache_memory_bytes=4 << 30), "vllm.kv_cache_memory_bytes", "takes 4.8 GiB of 2.0 GiB"),
        (changed("cpu", kv_cache_dtype="fp8"), "vllm.kv_cache_dtype", "CPU is no GPU"),
    ],
)
def test_what_must_be_refused(bad: Profile, key: str, sentence: str) -> None:
    """Each impossible profile is refused for the key that is to blame, with the figures that show it."""
    found = [breach.sentence for breach in rules.refused(bad) if breach.key == key]
    assert any(re.search(sentence, told) for told in found), found


def test_the_default_of_vllm_cannot_pass_the_memory_gate() -> None:
    """0.92, vLLM's own utilization, is refused on every card: an idle healthy server would fail."""
    for name in profile.cards():
        if name != "cpu":
            found = rules.refused(changed("h100-8b", card=name, gpu_memory_utilization=0.92))
            assert "vllm.gpu_memory_utilization" in {breach.key for breach in found}


def test_copies_of_kv_heads_and_windows_are_noted_not_refused(tmp_path: Path) -> None:
    """More GPUs than KV heads cost memory; a sliding window costs less than is said: both work."""
    copied = changed("h100", to="qwen2.5-7b", quantization="none", tensor_parallel_size=28, max_num_seqs=64)
    assert [(b.key, b.refuses) for b in rules.breaches(copied) if "copied" in b.sentence or "kept" in b.sentence] == [
        ("vllm.tensor_parallel_size", False)
    ]
    windowed = replace(profile.read("a10"), model=replace(model.read("llama-3.1-8b"), window=4096))
    assert [b.key for b in rules.breaches(windowed)] == ["model"]
    assert not rules.refused(windowed)


def test_suggestions_hold_and_are_the_smallest() -> None:
    """Llama-3-70B in 8,192 tokens: four A10, two A100-40, one A100-80 in INT4, and one H200 in FP8."""
    found = suggestions.suggestions(model.read("llama-3-70b"), 18_432, 1400, profile.cards())
    assert not any(rules.breaches(one) for one in found)
    sizes = {one.name: (one.vllm.tensor_parallel_size, one.quantization) for one in found}
    assert sizes["a10"] == (4, "int4")
    assert sizes["a100-40"] == (2, "int4")
    assert sizes["a100-80"] == sizes["h100"] == (1, "int4")
    assert sizes["h200"] == (1, "fp8")
    assert {one.vllm.max_model_len for one in found} == {8192}


def test_nothing_is_suggested_where_nothing_fits() -> None:
    """A model of 2.6 million million parameters fits no eight of any card."""
    giant = replace(model.read("llama-3.3-70b"), layers=3000)
    assert suggestions.suggestions(giant, 18_432, 1400, profile.cards()) == []
