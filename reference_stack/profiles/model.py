"""A model, from its config.json: the numbers that memory follows from.

It knows decoders with grouped-query attention, dense or with experts, by `model_type`. It refuses every other type: the
cache of latent attention, of state-space layers, or of layers that alternate between windows is another arithmetic, and
a wrong number is worse than none.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reference_stack.profiles.document import ProfileError

MODELS = Path(__file__).parent.parent / "models"

_BIASED = ("qwen2",)  # query, key and value have a bias, without a key that says so
_NORMED = ("qwen3", "qwen3_moe")  # queries and keys pass a norm of head_dim weights each
_EXPERTS = {
    "mixtral": ("num_local_experts", "intermediate_size"),
    "qwen3_moe": ("num_experts", "moe_intermediate_size"),
}
_KNOWN = ("llama", "mistral", "qwen2", "qwen3", *_EXPERTS)


@dataclass(frozen=True)
class Model:
    """A decoder. `intermediate` is the inner width of one expert, or of the one MLP where `experts` is 1."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    query_heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    max_positions: int
    tied: bool = False  # one matrix is both embedding and head
    experts: int = 1
    experts_per_token: int = 1
    biased: bool = False
    normed: bool = False
    window: int | None = None  # tokens that a layer looks back, where that is fewer than all

    @property
    def params(self) -> int:
        """Every weight, counted: 8,030,261,248 for Llama-3.1-8B."""
        return self._params(self.experts)

    @property
    def active_params(self) -> int:
        """The weights that one token passes: with experts, only those that it is routed to."""
        return self._params(self.experts_per_token)

    @property
    def embedding_params(self) -> int:
        """Embedding and head, which quantisation leaves alone; one matrix where they are tied."""
        return (1 if self.tied else 2) * self.vocabulary * self.hidden

    @property
    def attention_flops_per_pair(self) -> int:
        """Floating-point operations for one query token to attend to one token of context, over all layers."""
        return 4 * self.layers * self.query_heads * self.head_dim

    def _params(self, experts: int) -> int:
        heads = self.query_heads + 2 * self.kv_heads
        attention = self.hidden * heads * self.head_dim + self.query_heads * self.head_dim * self.hidden
        attention += heads * self.head_dim * self.biased + 2 * self.head_dim * self.normed
        router = self.hidden * self.experts if self.experts > 1 else 0
        layer = attention + 3 * self.hidden * self.intermediate * experts + router + 2 * self.hidden
        return self.layers * layer + self.embedding_params + self.hidden


def read(name: str) -> Model:
    """The model of `models/NAME.json`, or of a config.json, or of the directory that one lies in.

    Raises ProfileError when there is none, or its arithmetic is not known here.
    """
    path = Path(name) if name.endswith(".json") else MODELS / f"{name}.json"
    if "/" in name and not name.endswith(".json"):
        path = Path(name) / "config.json"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in MODELS.glob("*.json")))
        raise ProfileError(f"There is no model {name!r}; there are: {known}; or name a config.json.")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ProfileError(f"{path}: not JSON: {error}.") from None
    if not isinstance(config, dict):
        raise ProfileError(f"{path}: a config.json holds keys with values.")
    return _model(path, config)


def _model(path: Path, config: Mapping[str, Any]) -> Model:
    kind = config.get("model_type")
    if kind not in _KNOWN:
        raise ProfileError(f"{path}: the memory of model type {kind!r} is not known here; known: {', '.join(_KNOWN)}.")

    def number(key: str, otherwise: int | None = None) -> int:
        value = config.get(key, otherwise)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ProfileError(f"{path}: {key} must be a whole number above zero, not {value!r}.")
        return value

    experts, inner = _EXPERTS.get(kind, ("", "intermediate_size"))
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise ProfileError(f"{path}: layers with experts and layers without are not known here.")
    windowed = config.get("use_sliding_window", True) and config.get("sliding_window")
    heads = number("num_attention_heads")
    return Model(
        name=path.parent.name if path.name == "config.json" else path.stem,
        layers=number("num_hidden_layers"),
        hidden=number("hidden_size"),
        intermediate=number(inner),
        query_heads=heads,
        kv_heads=number("num_key_value_heads", heads),
        head_dim=number("head_dim", number("hidden_size") // heads),
        vocabulary=number("vocab_size"),
        max_positions=number("max_position_embeddings"),
        tied=bool(config.get("tie_word_embeddings", False)),
        experts=number(experts) if experts else 1,
        experts_per_token=number("num_experts_per_tok") if experts else 1,
        biased=kind in _BIASED or bool(config.get("attention_bias", False)),
        normed=kind in _NORMED,
        window=number("sliding_window") if windowed else None,
    )
