"""A profile: one GPU, one model and the vLLM settings that fit them, from `reference_stack/profiles/NAME.yaml`.

Everything the simulation knows of hardware is here, with the arithmetic that follows from it alone: memory, KV cache
and the time that a batch takes. It refuses unknown keys, missing keys and a model that does not fit its card.
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import yaml

GIB = 2**30
BLOCK_TOKENS = 16
PROFILES = Path(__file__).parent.parent / "profiles"


class ProfileError(Exception):
    """A profile that cannot be used; the message is one sentence for the user."""


@dataclass(frozen=True)
class Gpu:
    """A card: what its data sheet says, and the share of it that a serving engine gets."""

    name: str
    memory_gib: float
    bandwidth_gb_per_s: float
    peak_tflops: float
    attention_tflops: float
    decode_efficiency: float
    prefill_efficiency: float
    step_overhead_s: float


@dataclass(frozen=True)
class Model:
    """A dense decoder with grouped-query attention, as its model card gives it."""

    checkpoint: str
    params: int
    weights_gib: float
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    kv_bytes: int

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV cache for one token: linear in length, K and V in every layer."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.kv_bytes

    @property
    def attention_flops_per_pair(self) -> int:
        """Floating-point operations for one query token to attend to one token of context, over all layers."""
        return 4 * self.layers * self.query_heads * self.head_dim


@dataclass(frozen=True)
class Settings:
    """The vLLM arguments of a profile (vLLM's own names), and the memory that vLLM needs beside weights and cache."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float
    overhead_gib: float


@dataclass(frozen=True)
class Cost:
    """What one batch asks of the card: all of it in seconds."""

    step_s: float
    kernels_s: float  # the part of step_s in which kernels run
    tensor_s: float  # at the card's full arithmetic peak
    dram_s: float  # at the card's full bandwidth


@dataclass(frozen=True)
class Profile:
    """A model on a card under given settings."""

    gpu: Gpu
    model: Model
    vllm: Settings

    @property
    def memory_bytes(self) -> int:
        """The memory of the card that an application can see."""
        return round(self.gpu.memory_gib * GIB)

    @property
    def weights_bytes(self) -> int:
        """Weights as they lie on the card."""
        return round(self.model.weights_gib * GIB)

    @property
    def overhead_bytes(self) -> int:
        """Activations and CUDA graphs."""
        return round(self.vllm.overhead_gib * GIB)

    @property
    def kv_blocks(self) -> int:
        """Blocks of the KV cache: what gpu_memory_utilization leaves, as vLLM takes it at start."""
        budget = self.memory_bytes * self.vllm.gpu_memory_utilization - self.weights_bytes - self.overhead_bytes
        return int(budget // (BLOCK_TOKENS * self.model.kv_bytes_per_token))

    @property
    def kv_pool_bytes(self) -> int:
        """The KV cache as it lies on the card."""
        return self.kv_blocks * BLOCK_TOKENS * self.model.kv_bytes_per_token

    def cost(self, batch_tokens: int, context_tokens: int, attended_pairs: float) -> Cost:
        """The cost of one forward pass: the slower of arithmetic and memory traffic (a roofline), plus the overhead.

        batch_tokens are computed, context_tokens of KV cache are read, attended_pairs counts query-context pairs.
        """
        gpu, model = self.gpu, self.model
        attention_flops = model.attention_flops_per_pair * attended_pairs
        tensor_s = 2 * model.params * batch_tokens / (gpu.peak_tflops * 1e12)
        tensor_s += attention_flops / (gpu.attention_tflops * 1e12)
        dram_bytes = self.weights_bytes + context_tokens * model.kv_bytes_per_token
        dram_s = dram_bytes / (gpu.bandwidth_gb_per_s * 1e9)
        kernels_s = max(tensor_s / gpu.prefill_efficiency, dram_s / gpu.decode_efficiency)
        return Cost(gpu.step_overhead_s + kernels_s, kernels_s, tensor_s, dram_s)


def load(name: str, max_model_len: int | None = None) -> Profile:
    """Read the profile NAME; max_model_len replaces the profile's own.

    Raises ProfileError when there is none of that name, a key is unknown, missing or of the wrong type, or the KV
    cache cannot hold one sequence of max_model_len tokens (vLLM refuses to start then, too).
    """
    path = PROFILES / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in PROFILES.glob("*.yaml")))
        raise ProfileError(f"There is no profile {name!r}; there are: {known}.")
    document = yaml.safe_load(path.read_text())
    if not isinstance(document, dict) or set(document) != {"gpu", "model", "vllm"}:
        raise ProfileError(f"{path.name}: a profile has the keys gpu, model and vllm, no more and no less.")
    if max_model_len is not None:
        document["vllm"]["max_model_len"] = max_model_len
    profile = Profile(
        gpu=_section(Gpu, document["gpu"], f"{path.name}: gpu"),
        model=_section(Model, document["model"], f"{path.name}: model"),
        vllm=_section(Settings, document["vllm"], f"{path.name}: vllm"),
    )
    tokens = profile.kv_blocks * BLOCK_TOKENS
    if tokens < profile.vllm.max_model_len:
        raise ProfileError(
            f"{path.name}: the KV cache holds {max(tokens, 0)} tokens, fewer than max_model_len "
            f"({profile.vllm.max_model_len})."
        )
    return profile


_S = TypeVar("_S", Gpu, Model, Settings)


def _section(kind: type[_S], values: Any, where: str) -> _S:
    """One section of the file as its dataclass; every key must be there, known and of its type."""
    if not isinstance(values, dict):
        raise ProfileError(f"{where}: must be a mapping.")
    wanted = {field.name: field.type for field in fields(kind)}
    for key in values:
        if key not in wanted:
            raise ProfileError(f"{where}: unknown key {key!r}.")
    for key, type_ in wanted.items():
        if key not in values:
            raise ProfileError(f"{where}: missing key {key!r}.")
        accepted = (int, float) if type_ is float else type_
        if isinstance(values[key], bool) or not isinstance(values[key], accepted):  # type: ignore[arg-type]
            raise ProfileError(f"{where}.{key}: {values[key]!r} is not {'text' if type_ is str else 'a number'}.")
        if type_ is not str and values[key] <= 0:
            raise ProfileError(f"{where}.{key}: must be greater than zero.")
    return kind(**values)
