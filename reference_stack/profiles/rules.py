"""What makes a profile impossible, or a bad choice: each rule a function, each breach a sentence with its figures.

A breach that `refuses` is one with which vLLM does not start, starts as something else, or cannot pass the memory gate.
The others are things to know. It refuses to mend anything: `suggestions` proposes.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from reference_stack.profiles import memory
from reference_stack.profiles.memory import GATE, GIB
from reference_stack.profiles.profile import Profile

FP8_CAPABILITY = 8.9
INT4_GROUP = 128


@dataclass(frozen=True)
class Breach:
    """One rule that a profile breaks: the key that is to blame, and why."""

    key: str
    sentence: str
    refuses: bool = True


def breaches(profile: Profile) -> list[Breach]:
    """Every rule that the profile breaks."""
    rules = (_eight_bits, _tensor_parallel, _length, _batch, _window, _memory, _sequences, _gate)
    return [breach for rule in rules for breach in rule(profile)]


def refused(profile: Profile) -> list[Breach]:
    """Only the breaches with which the profile cannot be used."""
    return [breach for breach in breaches(profile) if breach.refuses]


def _eight_bits(profile: Profile) -> Iterator[Breach]:
    """FP8 needs hardware. vLLM takes FP8 weights without it, but unpacks them first: another thing than was asked."""
    capability = profile.card.compute_capability
    if capability is not None and capability >= FP8_CAPABILITY:
        return
    has = "is no GPU" if capability is None else f"has compute capability {capability}"
    if profile.vllm.kv_cache_dtype.startswith("fp8"):
        yield Breach("vllm.kv_cache_dtype", f"an FP8 cache needs compute capability 8.9, and {profile.card.name} {has}")
    if profile.quantization == "fp8":
        yield Breach(
            "quantization",
            f"FP8 arithmetic needs compute capability 8.9, and {profile.card.name} {has}: it would store 8 bits and "
            "compute in 16; INT4 is the choice for such cards",
        )


def _tensor_parallel(profile: Profile) -> Iterator[Breach]:
    model, gpus = profile.model, profile.vllm.tensor_parallel_size
    key = "vllm.tensor_parallel_size"
    if model.query_heads % gpus:
        yield Breach(key, f"{model.query_heads} query heads cannot be shared by {gpus} GPUs")
    elif model.kv_heads % gpus and gpus % model.kv_heads:
        yield Breach(key, f"{model.kv_heads} KV heads cannot be shared by {gpus} GPUs, nor copied evenly to them")
    elif gpus > model.kv_heads:
        copies = gpus // model.kv_heads
        yield Breach(key, f"{model.kv_heads} KV heads on {gpus} GPUs: each is kept {copies} times", refuses=False)
    if model.intermediate % gpus:
        yield Breach(key, f"an inner width of {model.intermediate:,} cannot be shared by {gpus} GPUs")
    elif profile.quantization == "int4" and model.intermediate // gpus % INT4_GROUP:
        part = model.intermediate // gpus
        yield Breach(key, f"{part:,} inner columns on each of {gpus} GPUs are no whole number of INT4 groups of 128")


def _length(profile: Profile) -> Iterator[Breach]:
    asked, most = profile.vllm.max_model_len, profile.model.max_positions
    if asked > most:
        yield Breach("vllm.max_model_len", f"{profile.model.name} knows {most:,} positions, fewer than {asked:,}")


def _batch(profile: Profile) -> Iterator[Breach]:
    tokens, sequences = profile.vllm.max_num_batched_tokens, profile.vllm.max_num_seqs
    if tokens < sequences:
        yield Breach(
            "vllm.max_num_batched_tokens", f"a batch of {tokens:,} tokens has no place for {sequences} sequences"
        )


def _window(profile: Profile) -> Iterator[Breach]:
    window = profile.model.window
    if window and window < profile.vllm.max_model_len:
        yield Breach(
            "model",
            f"layers of {profile.model.name} look back {window:,} tokens and keep no more: what is said of its "
            "cache is the most that it takes",
            refuses=False,
        )


def _memory(profile: Profile) -> Iterator[Breach]:
    held, may = profile.weights_bytes + profile.overhead_bytes, profile.budget_bytes
    if held >= may:
        weights, rest, over = profile.weights_bytes / GIB, profile.overhead_bytes / GIB, (held - may) / GIB
        yield Breach(
            "model",
            f"it does not fit: weights ({weights:.1f} GiB) and what runs beside them ({rest:.1f} GiB) are {over:.1f} "
            f"GiB more than the {may / GIB:.1f} GiB that vLLM may take",
        )
    elif profile.kv_tokens < profile.vllm.max_model_len:
        yield Breach(
            "vllm.max_model_len",
            f"the KV cache ({profile.kv_pool_bytes / GIB:.1f} GiB) holds {profile.kv_tokens:,} tokens, fewer than one "
            f"sequence of {profile.vllm.max_model_len:,}: vLLM refuses to start",
        )
    elif may > profile.card.memory_bytes:
        yield Breach(
            "vllm.kv_cache_memory_bytes",
            f"a replica takes {may / GIB:.1f} GiB of {profile.card.memory_gib:.1f} GiB",
        )


def _sequences(profile: Profile) -> Iterator[Breach]:
    fit = profile.kv_tokens // profile.typical_tokens
    if 0 < fit < profile.vllm.max_num_seqs:
        yield Breach(
            "vllm.max_num_seqs",
            f"{profile.vllm.max_num_seqs} sequences of {profile.typical_tokens:,} tokens are more than the cache's "
            f"{profile.kv_tokens:,}: some would be preempted and computed again; {fit} fit",
        )


def _gate(profile: Profile) -> Iterator[Breach]:
    share = profile.vllm.gpu_memory_utilization
    most = memory.highest_utilization(profile.card.memory_bytes)
    if share is not None and share > most:
        stands = 100 * (share + memory.UNSEEN_BYTES / profile.card.memory_bytes)
        yield Breach(
            "vllm.gpu_memory_utilization",
            f"with {share:.2f} GPU memory stands at {stands:.1f} % from the start, and the gate of {GATE * 100:.0f} % "
            f"cannot pass with any margin; {rounded_down(most):.2f} is the most",
        )


def rounded_down(share: float) -> float:
    """To whole hundredths, as people write it."""
    return math.floor(share * 100 + 1e-9) / 100
