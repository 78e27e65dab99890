"""What would fit: the same model on each card, with as few GPUs and as many bits as possible.

Every proposal is a profile that breaks no rule, with the highest utilization that the memory gate allows and as many
sequences as the cache holds. It proposes sizes, not speed: the decode time beside each one says what to expect.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from reference_stack.profiles import memory, rules
from reference_stack.profiles import profile as profiles
from reference_stack.profiles.model import Model
from reference_stack.profiles.profile import Profile, Settings

GROUPS = (1, 2, 4, 8)
BITS = ("none", "fp8", "int4")
BATCH_TOKENS = 2048
MOST_SEQUENCES = 256  # vLLM's own number for most cards
FULL_LENGTH = 4  # sequences of the full length that must fit before a proposal is any use


def suggestions(model: Model, length: int, typical_tokens: int, cards: list[str]) -> list[Profile]:
    """For each card the fewest GPUs that serve the model at this length, or at the model's own where that is shorter.

    Where several quantisations fit on as few, the one with the most bits. The fewest GPUs come first, then the least
    memory: the cheapest that will do. A card on which nothing fits is left out.

    Raises ProfileError for an unknown card.
    """
    length = min(length, model.max_positions)
    found = [next(_fitting(model, length, typical_tokens, card), None) for card in cards]
    return sorted((one for one in found if one), key=lambda one: (one.vllm.tensor_parallel_size, one.card.memory_bytes))


def _fitting(model: Model, length: int, typical_tokens: int, card: str) -> Iterator[Profile]:
    for gpus in GROUPS:
        for quantization in BITS:
            tried = _tried(model, length, typical_tokens, card, quantization, gpus)
            if tried.kv_tokens >= FULL_LENGTH * length and not rules.refused(tried):
                yield tried


def _tried(model: Model, length: int, typical_tokens: int, card: str, quantization: str, gpus: int) -> Profile:
    """The model on so many of the card, with as many sequences as its cache holds."""
    chosen = profiles.read_card(card)
    settings = Settings(
        dtype="bfloat16",
        tensor_parallel_size=gpus,
        max_model_len=length,
        max_num_seqs=MOST_SEQUENCES,
        max_num_batched_tokens=BATCH_TOKENS,
        kv_cache_dtype="auto",
        enable_prefix_caching=True,
        gpu_memory_utilization=rules.rounded_down(memory.highest_utilization(chosen.memory_bytes)),
    )
    tried = Profile(card, Path(card), chosen, model, model.name, quantization, typical_tokens, settings)
    fit = min(MOST_SEQUENCES, max(1, tried.kv_tokens // typical_tokens))
    return replace(tried, vllm=replace(settings, max_num_seqs=fit))
