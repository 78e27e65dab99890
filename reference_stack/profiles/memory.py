"""What a model takes of a card's memory, term by term, in bytes: pure arithmetic.

    gpu_memory_utilization x memory = weights + activations + CUDA graphs + outside torch + KV cache

Weights and cache follow from the model's config.json. The other three terms are planning values: vLLM measures them on
the card when it starts, and a profile can then state what it said. It refuses to know what fits: that is `rules`.
"""

import math
from dataclasses import dataclass

from reference_stack.profiles.model import Model

GIB = 2**30
BLOCK_TOKENS = 16

# Bits of a weight in the layers. INT4: groups of 128 that share a scale of 16 bits and a zero point of 4.
WEIGHT_BITS = {"fp8": 8.0, "int4": 4 + 20 / 128}
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
KV_BYTES = {"bfloat16": 2, "float16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}

GRAPH_BYTES_PER_LAYER = 16 * 2**20
OUTSIDE_BYTES = round(0.8 * GIB)  # the CUDA context, the kernels' own buffers, what the allocator cannot use
COLLECTIVE_BYTES = round(1.0 * GIB)  # NCCL and the all-reduce's buffers, where GPUs work together
SAMPLING_BYTES = 20  # of one logit while a token is drawn: 32 bits, its probability, a sorted copy and its index

# What vLLM cannot see or foretell: other processes' contexts, the error of its own estimate.
UNSEEN_BYTES = 700 * 2**20
GATE_MARGIN = 0.015
GATE = 0.85


@dataclass(frozen=True)
class Need:
    """What one GPU of the group must hold beside the KV cache, in bytes, and what a token of cache takes there."""

    weights: int
    forward: int
    sampling: int
    graphs: int
    outside: int
    kv_per_token: int

    @property
    def activations(self) -> int:
        """The peak: a batch passes the layers first and is sampled then, in the same memory."""
        return max(self.forward, self.sampling)

    @property
    def overhead(self) -> int:
        return self.activations + self.graphs + self.outside


def need(
    model: Model,
    *,
    quantization: str,
    dtype: str,
    kv_cache_dtype: str,
    gpus: int,
    batch_tokens: int,
    sequences: int,
    eager: bool = False,
) -> Need:
    """The need of one of `gpus` GPUs that share the model by tensor parallelism."""
    kv_bytes = DTYPE_BYTES[dtype] if kv_cache_dtype == "auto" else KV_BYTES[kv_cache_dtype]
    return Need(
        weights=math.ceil(weights_bytes(model, quantization, dtype) / gpus),
        forward=forward_bytes(model, batch_tokens, gpus) * DTYPE_BYTES[dtype] // 2,
        sampling=sequences * model.vocabulary * SAMPLING_BYTES,
        graphs=0 if eager else model.layers * GRAPH_BYTES_PER_LAYER,
        outside=OUTSIDE_BYTES + (COLLECTIVE_BYTES if gpus > 1 else 0),
        kv_per_token=kv_bytes_per_token(model, kv_bytes, gpus),
    )


def weights_bytes(model: Model, quantization: str, dtype: str) -> int:
    """All weights of the model. Embedding and head keep their 16 bits whatever happens to the layers."""
    plain = DTYPE_BYTES[dtype]
    layers = (model.params - model.embedding_params) * WEIGHT_BITS.get(quantization, 8 * plain) / 8
    return math.ceil(layers) + model.embedding_params * plain


def kv_bytes_per_token(model: Model, kv_bytes: int, gpus: int = 1) -> int:
    """The cache of one token on one GPU: K and V of its share of the heads in every layer. Linear in length.

    More GPUs than KV heads each keep a copy of one head.
    """
    heads = max(1, math.ceil(model.kv_heads / gpus))
    return 2 * model.layers * heads * model.head_dim * kv_bytes


def forward_values(model: Model, gpus: int = 1) -> int:
    """The values of one token that live at once in a layer: four of the model's width, and this GPU's share of others.

    Those are: gate, up and their product in the MLP (of every expert that it is routed to), and query, key and value.
    """
    inner = 3 * model.intermediate * model.experts_per_token
    inner += (model.query_heads + 2 * model.kv_heads) * model.head_dim
    return 4 * model.hidden + math.ceil(inner / gpus)


def forward_bytes(model: Model, batch_tokens: int, gpus: int = 1) -> int:
    """Activations of one batch in 16 bits."""
    return 2 * batch_tokens * forward_values(model, gpus)


def highest_utilization(memory_bytes: int) -> float:
    """The largest gpu_memory_utilization with which the card stays under the gate, whatever vLLM does not see."""
    return GATE - UNSEEN_BYTES / memory_bytes - GATE_MARGIN
