"""A profile: one card, one model and the vLLM settings that fit them, from `reference_stack/profiles/NAME.yaml`.

Everything that this stack knows of a card under a model is here: what lies in its memory, and the time that a batch
takes. The same file starts real vLLM, sizes the simulation, and is what `harness profile` checks. It refuses unknown
keys, missing keys and, when it is to serve, a model that does not fit its card.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal, TypeVar

from reference_stack.profiles import document, memory
from reference_stack.profiles import model as models
from reference_stack.profiles.document import Lines, ProfileError
from reference_stack.profiles.memory import BLOCK_TOKENS, GIB, Need
from reference_stack.profiles.model import Model

_T = TypeVar("_T")
PROFILES = Path(__file__).parent
CARDS = Path(__file__).parent.parent / "cards"


@dataclass(frozen=True)
class Speed:
    """What a card's data sheet says, and the share of it that a serving engine gets."""

    bandwidth_gb_per_s: float
    fp16_tflops: float
    decode_efficiency: float
    prefill_efficiency: float
    step_overhead_s: float
    fp8_tflops: float | None = None


@dataclass(frozen=True)
class Card:
    """A GPU; or a share of a machine without one, which has no compute capability, and no speed to calculate with."""

    name: str
    memory_gib: float
    compute_capability: float | None = None
    speed: Speed | None = None

    @property
    def memory_bytes(self) -> int:
        """The memory that an application can see."""
        return round(self.memory_gib * GIB)


@dataclass(frozen=True)
class Settings:
    """The vLLM arguments of a profile, by vLLM's own names: a share of a GPU, or bytes of cache where there is none."""

    dtype: Literal["bfloat16", "float16", "float32"]
    tensor_parallel_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_dtype: Literal["auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"]
    enable_prefix_caching: bool
    gpu_memory_utilization: float | None = None
    kv_cache_memory_bytes: int | None = None
    enforce_eager: bool = False
    distributed_executor_backend: Literal["uni", "mp"] | None = None


@dataclass(frozen=True)
class Stated:
    """Figures that take the place of the arithmetic's: what vLLM said when it started on the card, or what a
    simulation has always rested on."""

    weights_gib: float | None = None
    overhead_gib: float | None = None


@dataclass(frozen=True)
class _File:
    """The keys of a profile. `typical_tokens` is a request of the expected traffic, prompt and answer together."""

    card: str
    model: str
    checkpoint: str
    quantization: Literal["none", "fp8", "int4"]
    typical_tokens: int
    vllm: Settings
    memory: Stated = Stated()


@dataclass(frozen=True)
class Cost:
    """What one batch asks of the card: all of it in seconds."""

    step_s: float
    kernels_s: float  # the part of step_s in which kernels run
    tensor_s: float  # at the card's full arithmetic peak
    dram_s: float  # at the card's full bandwidth


@dataclass(frozen=True)
class Profile:
    """A model on a card under given settings; all memory is that of one card, where several share the model."""

    name: str
    path: Path
    card: Card
    model: Model
    checkpoint: str
    quantization: str
    typical_tokens: int
    vllm: Settings
    stated: Stated = Stated()
    lines: Lines = field(default_factory=dict, compare=False, repr=False)

    def where(self, key: str) -> str:
        """`file:line` of a key."""
        return f"{self.path}:{self.lines.get(key, 1)}"

    @cached_property
    def need(self) -> Need:
        """What the arithmetic says."""
        return memory.need(
            self.model,
            quantization=self.quantization,
            dtype=self.vllm.dtype,
            kv_cache_dtype=self.vllm.kv_cache_dtype,
            gpus=self.vllm.tensor_parallel_size,
            batch_tokens=self.vllm.max_num_batched_tokens,
            sequences=self.vllm.max_num_seqs,
            eager=self.vllm.enforce_eager,
        )

    @property
    def budget_bytes(self) -> float:
        """What vLLM may take: gpu_memory_utilization of the card, or without a GPU what it takes anyway."""
        if self.vllm.gpu_memory_utilization is not None:
            return self.card.memory_bytes * self.vllm.gpu_memory_utilization
        return self.weights_bytes + self.overhead_bytes + (self.vllm.kv_cache_memory_bytes or 0)

    @property
    def weights_bytes(self) -> int:
        """Weights as they lie on the card."""
        stated = self.stated.weights_gib
        return self.need.weights if stated is None else round(stated * GIB)

    @property
    def overhead_bytes(self) -> int:
        """Activations, CUDA graphs and what lies outside torch."""
        stated = self.stated.overhead_gib
        return self.need.overhead if stated is None else round(stated * GIB)

    @cached_property
    def kv_blocks(self) -> int:
        """Blocks of the KV cache: what the budget leaves, as vLLM takes it at start; below zero when nothing is."""
        left = self.budget_bytes - self.weights_bytes - self.overhead_bytes
        return int(left // (BLOCK_TOKENS * self.need.kv_per_token))

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return max(0, self.kv_blocks) * BLOCK_TOKENS

    @property
    def kv_pool_bytes(self) -> int:
        """The KV cache as it lies on the card."""
        return self.kv_tokens * self.need.kv_per_token

    def cost(self, batch_tokens: int, context_tokens: int, attended_pairs: float) -> Cost:
        """The cost of one forward pass: the slower of arithmetic and memory traffic (a roofline), plus the overhead.

        batch_tokens are computed, context_tokens of KV cache are read, attended_pairs counts query-context pairs.
        Several cards share the work evenly; what they tell each other costs nothing here.
        """
        speed, model, cards = self.card.speed, self.model, self.vllm.tensor_parallel_size
        if speed is None:
            raise ProfileError(f"{self.card.name} has no speed to calculate with: it is measured, not simulated.")
        tensor_s = 2 * model.active_params * batch_tokens / (self.peak_tflops * 1e12)
        tensor_s += model.attention_flops_per_pair * attended_pairs / (speed.fp16_tflops * 1e12)
        tensor_s /= cards
        dram_s = (self.weights_bytes + context_tokens * self.need.kv_per_token) / (speed.bandwidth_gb_per_s * 1e9)
        kernels_s = max(tensor_s / speed.prefill_efficiency, dram_s / speed.decode_efficiency)
        return Cost(speed.step_overhead_s + kernels_s, kernels_s, tensor_s, dram_s)

    @cached_property
    def peak_tflops(self) -> float:
        """The card's peak for the matrix products: in 8 bits where weights and card have them, else in 16."""
        assert self.card.speed
        fast = self.card.speed.fp8_tflops if self.quantization == "fp8" else None
        return fast or self.card.speed.fp16_tflops


def names() -> list[str]:
    """The profiles that ship."""
    return sorted(path.stem for path in PROFILES.glob("*.yaml"))


def read(name: str) -> Profile:
    """The profile NAME, or of a file NAME.yaml, whether it fits or not.

    Raises ProfileError when there is none of that name, or a key is unknown, missing or of the wrong type.
    """
    path = Path(name) if name.endswith(".yaml") else PROFILES / f"{name}.yaml"
    if not path.is_file():
        raise ProfileError(f"There is no profile {name!r}; there are: {', '.join(names())}; or name a file.")
    file, lines = document.read(path, _File)
    _check_memory_key(path, file.vllm, lines)
    return Profile(
        name=path.stem,
        path=path,
        card=_named(read_card, file.card, f"{path}:{lines['card']}"),
        model=_named(models.read, file.model, f"{path}:{lines['model']}"),
        checkpoint=file.checkpoint,
        quantization=file.quantization,
        typical_tokens=file.typical_tokens,
        vllm=file.vllm,
        stated=file.memory,
        lines=lines,
    )


def _named(reader: Callable[[str], _T], name: str, where: str) -> _T:
    try:
        return reader(name)
    except ProfileError as error:
        raise ProfileError(f"{where}: {error}") from None


def _check_memory_key(path: Path, vllm: Settings, lines: Lines) -> None:
    if (vllm.gpu_memory_utilization is None) == (vllm.kv_cache_memory_bytes is None):
        raise ProfileError(
            f"{path}:{lines['vllm']}: vllm takes one of gpu_memory_utilization and kv_cache_memory_bytes, and only one."
        )
    if vllm.gpu_memory_utilization is not None and vllm.gpu_memory_utilization > 1:
        raise ProfileError(
            f"{path}:{lines['vllm.gpu_memory_utilization']}: gpu_memory_utilization is a share: 0.80, not 80."
        )


def read_card(name: str) -> Card:
    """The card of `cards/NAME.yaml`, or of a file NAME.yaml. Raises ProfileError."""
    path = Path(name) if name.endswith(".yaml") else CARDS / f"{name}.yaml"
    if not path.is_file():
        raise ProfileError(f"There is no card {name!r}; there are: {', '.join(cards())}; or name a file.")
    return document.read(path, Card)[0]


def cards() -> list[str]:
    """The cards that are known."""
    return sorted(path.stem for path in CARDS.glob("*.yaml"))


def load(name: str, max_model_len: int | None = None) -> Profile:
    """The profile NAME, to serve with; max_model_len replaces the profile's own.

    Raises ProfileError as `read` does, and when the KV cache cannot hold one sequence of max_model_len tokens: vLLM
    refuses to start then, too.
    """
    profile = read(name)
    if max_model_len is not None:
        profile = dataclasses.replace(profile, vllm=dataclasses.replace(profile.vllm, max_model_len=max_model_len))
    if profile.kv_tokens < profile.vllm.max_model_len:
        raise ProfileError(
            f"{profile.where('vllm.max_model_len')}: the KV cache holds {profile.kv_tokens} tokens, fewer than "
            f"max_model_len ({profile.vllm.max_model_len})."
        )
    return profile
