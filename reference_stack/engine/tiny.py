"""The tiny model: a tokenizer and a random two-layer Llama, made here in seconds so that nothing is downloaded.

    python -m reference_stack.engine.tiny --out .cache/tiny --text harness/traffic/words.txt

The directory is a complete Hugging Face model: real vLLM loads it, and the simulation, the gateway and the harness
count tokens with its tokenizer. It is a function of the word list alone: the same bytes on every machine. It refuses to
be a good model: its words mean nothing, and its answers are exactly as long as they are asked to be, in plain text,
because the tokens that would end an answer or split a character are never the likeliest ones.
"""

import argparse
import json
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SEED = 0
VOCABULARY = 4096
TEXT_WORDS = 60_000
BOS, EOS = "<s>", "</s>"

# A message is "role: content" on a line of its own; the gateway's guard counts with the same words.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD = 2, 64, 128, 2, 1, 32
CONTEXT = 32_768

Tensor = NDArray[np.float32]


def main() -> None:
    """Build the tiny model; a directory that already stands is replaced."""
    parser = argparse.ArgumentParser(description="Build the tiny model and its tokenizer.")
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--text", type=Path, required=True, help="the words the tokenizer learns from, one a line")
    arguments = parser.parse_args()
    build(arguments.out, arguments.text.read_text(encoding="utf-8").split())


def build(directory: Path, words: list[str]) -> None:
    """Write the model directory for `words`: made beside its place and renamed, so never seen half written."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f"{directory.name}.", dir=directory.parent))
    try:
        tokenizer = train(words)
        tokenizer.save(str(draft / "tokenizer.json"))
        for name, content in configs(tokenizer).items():
            (draft / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        save_file(weights(tokenizer), str(draft / "model.safetensors"), metadata={"format": "pt"})
        draft.chmod(0o755)
        if directory.exists():
            directory.rename(draft / "replaced")
        draft.rename(directory)
        shutil.rmtree(directory / "replaced", ignore_errors=True)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def train(words: list[str]) -> Tokenizer:
    """A byte-level BPE tokenizer for text made of `words`: a common word is one token, a rare one several."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text(words), trainer)
    bos = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, bos)])
    return tokenizer


def text(words: list[str]) -> list[str]:
    """Lines of words drawn with Zipf's frequencies, the ranks dealt by the seed."""
    draw = random.Random(SEED)
    ranked = draw.sample(words, len(words))
    drawn = draw.choices(ranked, weights=[1 / rank for rank in range(1, len(ranked) + 1)], k=TEXT_WORDS)
    return [" ".join(drawn[start : start + 20]) for start in range(0, TEXT_WORDS, 20)]


def configs(tokenizer: Tokenizer) -> dict[str, dict[str, Any]]:
    """The JSON files of a Hugging Face model directory, by name."""
    ends = {"bos_token_id": tokenizer.token_to_id(BOS), "eos_token_id": tokenizer.token_to_id(EOS)}
    return {
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": tokenizer.get_vocab_size(),
            "hidden_size": HIDDEN,
            "intermediate_size": INNER,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD,
            "hidden_act": "silu",
            "max_position_embeddings": CONTEXT,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
            **ends,
        },
        "generation_config.json": ends,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": CONTEXT,
            "bos_token": BOS,
            "eos_token": EOS,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    }


def weights(tokenizer: Tokenizer) -> dict[str, Tensor]:
    """Seeded random weights, by Llama's names.

    The first hidden dimension is held at a constant and read by the output layer alone: it is the bias that keeps
    unspeakable tokens (see `unspeakable`) from being chosen.
    """
    random_numbers = np.random.default_rng(SEED)

    def uniform(*shape: int) -> Tensor:
        # Whole numbers, scaled: the same bits whatever the machine's mathematics library.
        whole = random_numbers.integers(-1000, 1001, size=shape)
        return np.asarray(whole / (1000 * np.sqrt(shape[-1])), np.float32)

    def writes_hidden(matrix: Tensor) -> Tensor:
        matrix[0, :] = 0.0
        return matrix

    vocabulary = tokenizer.get_vocab_size()
    embedding = uniform(vocabulary, HIDDEN) * np.float32(np.sqrt(HIDDEN))
    embedding[:, 0] = 2.0
    output = uniform(vocabulary, HIDDEN) * np.float32(np.sqrt(HIDDEN))
    output[:, 0] = 0.0
    output[unspeakable(tokenizer), 0] = -100.0

    tensors = {"model.embed_tokens.weight": embedding, "lm_head.weight": output}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        tensors |= {
            f"{name}.self_attn.q_proj.weight": uniform(HEADS * HEAD, HIDDEN),
            f"{name}.self_attn.k_proj.weight": uniform(KV_HEADS * HEAD, HIDDEN),
            f"{name}.self_attn.v_proj.weight": uniform(KV_HEADS * HEAD, HIDDEN),
            f"{name}.self_attn.o_proj.weight": writes_hidden(uniform(HIDDEN, HEADS * HEAD)),
            f"{name}.mlp.gate_proj.weight": uniform(INNER, HIDDEN),
            f"{name}.mlp.up_proj.weight": uniform(INNER, HIDDEN),
            f"{name}.mlp.down_proj.weight": writes_hidden(uniform(HIDDEN, INNER)),
            f"{name}.input_layernorm.weight": np.ones(HIDDEN, np.float32),
            f"{name}.post_attention_layernorm.weight": np.ones(HIDDEN, np.float32),
        }
    return tensors | {"model.norm.weight": np.ones(HIDDEN, np.float32)}


def unspeakable(tokenizer: Tokenizer) -> list[int]:
    """Tokens that end an answer, and tokens that are not whole characters by themselves."""
    return [
        token
        for token in range(tokenizer.get_vocab_size())
        if not (piece := tokenizer.decode([token])).strip() or "\ufffd" in piece or not piece.isprintable()
    ]


if __name__ == "__main__":
    main()
