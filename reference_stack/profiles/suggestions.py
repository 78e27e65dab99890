"""What would fit: the same model on each card, with as few GPUs and as many bits as possible.

Every proposal is a profile that breaks no rule, with the highest utilization that the memory gate allows and as many
sequences as the cache holds. It proposes sizes, not speed: the decode time beside each one says what to expect.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from reference_stack.profiles import memory, rules
from reference_stack.profiles import profile as profiles
from reference_stack.profiles.memory import GIB
from reference_stack.profiles.profile import Profile, Stated

GROUPS = (1, 2, 4, 8)
BITS = ("none", "fp8", "int4")
MOST_SEQUENCES = 256  # vLLM's own number for most cards
FULL_LENGTH = 4  # sequences of the full length that must fit before a proposal is any use


@dataclass(frozen=True)
class Suggestion:
    """A card by the name that users give it, and the profile on it."""

    card: str
    profile: Profile

    @property
    def gpus(self) -> int:
        return self.profile.vllm.tensor_parallel_size


def suggestions(wanted: Profile, cards: list[str] | None = None) -> list[Suggestion]:
    """For each card the fewest GPUs that serve the wanted profile's model, at its length or the model's own if shorter.

    Where several quantisations fit on as few, the one with the most bits. The fewest GPUs come first, then the least
    memory: the cheapest that will do.
    """
    found = [best for card in cards or profiles.cards() if (best := next(_fitting(wanted, card), None))]
    return sorted(found, key=lambda one: (one.gpus, one.profile.card.memory_bytes))


def _fitting(wanted: Profile, name: str) -> Iterator[Suggestion]:
    card = profiles.read_card(name)
    if card.compute_capability is None:
        return
    for gpus in GROUPS:
        for quantization in BITS:
            tried = _tried(wanted, card, quantization, gpus)
            enough = tried.kv_tokens >= FULL_LENGTH * tried.vllm.max_model_len
            if enough and not rules.refused(tried):
                yield Suggestion(name, tried)


def _tried(wanted: Profile, card: profiles.Card, quantization: str, gpus: int) -> Profile:
    share = rules.rounded_down(memory.highest_utilization(card.memory_bytes))
    settings = replace(
        wanted.vllm,
        dtype="bfloat16",
        tensor_parallel_size=gpus,
        max_model_len=min(wanted.vllm.max_model_len, wanted.model.max_positions),
        max_num_seqs=MOST_SEQUENCES,
        max_num_batched_tokens=max(wanted.vllm.max_num_batched_tokens, MOST_SEQUENCES),
        gpu_memory_utilization=share,
        kv_cache_memory_bytes=None,
        kv_cache_dtype="auto",
        enforce_eager=False,
        distributed_executor_backend=None,
    )
    tried = replace(wanted, card=card, quantization=quantization, vllm=settings, stated=Stated())
    fit = min(MOST_SEQUENCES, max(1, tried.kv_tokens // tried.typical_tokens))
    return replace(tried, vllm=replace(settings, max_num_seqs=fit))


def table(found: list[Suggestion]) -> list[tuple[str, ...]]:
    """The suggestions as rows of words, the first one the heads of the columns."""
    rows = [("card", "GPUs", "weights in", "GiB a GPU", "KV GiB", "tokens", "sequences", "utilization", "ms a token")]
    for one in found:
        chosen = one.profile
        bits = {"none": "16 bits", "fp8": "FP8", "int4": "INT4"}[chosen.quantization]
        rows.append(
            (
                one.card,
                str(one.gpus),
                bits,
                f"{chosen.weights_bytes / GIB:.1f}",
                f"{chosen.kv_pool_bytes / GIB:.1f}",
                f"{chosen.kv_tokens:,}",
                str(chosen.vllm.max_num_seqs),
                f"{chosen.vllm.gpu_memory_utilization:.2f}",
                f"{chosen.cost(1, 0, 0).step_s * 1000:.0f}",
            )
        )
    return rows
