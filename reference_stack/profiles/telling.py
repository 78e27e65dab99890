"""A profile in words: its arithmetic line by line, what is wrong with it, and what would fit instead.

Numbers become text here and nowhere else, each with its unit. It refuses to calculate: that is done in `profile`,
`memory` and `rules`.
"""

from collections.abc import Iterable, Sequence

from reference_stack.profiles import memory, rules
from reference_stack.profiles.memory import DTYPE_BYTES, GATE, GIB, KV_BYTES, WEIGHT_BITS
from reference_stack.profiles.profile import Profile

KIB = 1024
SLO_S = 1.2  # end to end, for which short answers must be made


def summary(profiles: Iterable[Profile]) -> list[str]:
    """One line for each profile, with what it leaves and whether it holds."""
    rows = [("profile", "card", "model", "weights", "KV cache", "tokens", "sequences", "utilization", "holds")]
    for one in profiles:
        share = one.vllm.gpu_memory_utilization
        rows.append(
            (
                one.name,
                _cards(one),
                f"{one.model.name} {weights_in(one)}",
                f"{one.weights_bytes / GIB:.2f} GiB",
                f"{one.kv_pool_bytes / GIB:.2f} GiB",
                f"{one.kv_tokens:,}",
                f"{one.vllm.max_num_seqs}",
                "-" if share is None else f"{share:.2f}",
                "no" if rules.refused(one) else "yes",
            )
        )
    return columns(rows)


def explained(profile: Profile) -> list[str]:
    """The arithmetic, a line for each term, with GiB in the last column."""
    title = f"{profile.name}: {profile.model.name}, weights in {weights_in(profile)}, on {_cards(profile)}"
    return [title, "", *columns([*_memory(profile), ("", "", ""), *_capacity(profile)]), "", *verdict(profile)]


def verdict(profile: Profile) -> list[str]:
    """Whether the profile holds, and every breach as a sentence."""
    found = rules.breaches(profile)
    refused = [breach for breach in found if breach.refuses]
    lines = ["It does not hold:" if refused else "It holds."]
    lines += [f"- {breach.sentence}." for breach in refused]
    return lines + [f"Note: {breach.sentence}." for breach in found if not breach.refuses]


def proposed(found: Sequence[Profile]) -> list[str]:
    """What would fit, as a table."""
    if not found:
        return ["Nothing that is known here would fit it, up to eight GPUs."]
    length = found[0].vllm.max_model_len
    heads = (
        "card",
        "GPUs",
        "weights in",
        "of which a GPU",
        "KV cache",
        "tokens",
        "sequences",
        "utilization",
        "a token",
    )
    rows = [heads]
    for one in found:
        rows.append(
            (
                one.name,
                str(one.vllm.tensor_parallel_size),
                weights_in(one),
                f"{one.weights_bytes / GIB:.1f} GiB",
                f"{one.kv_pool_bytes / GIB:.1f} GiB",
                f"{one.kv_tokens:,}",
                str(one.vllm.max_num_seqs),
                f"{one.vllm.gpu_memory_utilization:.2f}",
                f"{one.cost(1, 0, 0).step_s * 1000:.0f} ms" if one.card.speed else "-",
            )
        )
    return [f"What would, at {length:,} tokens (sequences: of {found[0].typical_tokens:,} tokens):", *columns(rows)]


def weights_in(profile: Profile) -> str:
    plain = f"{8 * DTYPE_BYTES[profile.vllm.dtype]} bits"
    return {"fp8": "FP8", "int4": "INT4"}.get(profile.quantization, plain)


def columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows of words in columns: the first is left, what starts with a digit or a sign stands right."""
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    right = [k > 0 and all(_is_figure(row[k]) for row in rows[1:]) for k in range(len(widths))]
    return [
        "  ".join(
            word.rjust(width) if side else word.ljust(width)
            for word, width, side in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in rows
    ]


def _is_figure(word: str) -> bool:
    return not word or word[0].isdigit() or word[0] == "-"


def _cards(profile: Profile) -> str:
    gpus = profile.vllm.tensor_parallel_size
    return profile.card.name if gpus == 1 else f"{gpus} x {profile.card.name}"


Row = tuple[str, str, str]


def _memory(profile: Profile) -> list[Row]:
    """Budget, weights, overhead and what is left: of one GPU."""
    share, total = profile.vllm.gpu_memory_utilization, profile.card.memory_gib
    rows = [("of one GPU", "", "GiB")]
    if share is None:
        rows.append(("memory", "that a replica may use", f"{total:.2f}"))
    else:
        rows.append(("budget", f"{total:.2f} GiB x {share:.2f} of gpu_memory_utilization", _gib(profile.budget_bytes)))
    rows.append(("weights", _weights(profile), _gib(-profile.weights_bytes)))
    rows += _overhead(profile)
    left = profile.budget_bytes - profile.weights_bytes - profile.overhead_bytes
    rows.append(("KV cache", "what is left" if share else "as it is told", _gib(left)))
    return rows


def _weights(profile: Profile) -> str:
    if profile.stated.weights_gib is not None:
        return f"as the profile states ({profile.need.weights / GIB:.2f} by arithmetic)"
    model, plain = profile.model, 8 * DTYPE_BYTES[profile.vllm.dtype]
    embeddings, bits = model.embedding_params / 1e9, WEIGHT_BITS.get(profile.quantization, plain)
    layers = model.params / 1e9 - embeddings
    told = f"{layers:.3f} G in layers x {bits:.4g} bits + {embeddings:.3f} G of embeddings x {plain} bits"
    gpus = profile.vllm.tensor_parallel_size
    return told if gpus == 1 else f"({told}) / {gpus} GPUs"


def _overhead(profile: Profile) -> list[Row]:
    need, model, vllm = profile.need, profile.model, profile.vllm
    if profile.stated.overhead_gib is not None:
        told = f"activations, CUDA graphs and the rest, as the profile states ({need.overhead / GIB:.2f} by arithmetic)"
        return [("overhead", told, _gib(-profile.overhead_bytes))]
    values = memory.forward_values(model, vllm.tensor_parallel_size)
    if need.forward >= need.sampling:
        peak = (
            f"a batch of {vllm.max_num_batched_tokens:,} tokens x {values:,} values x {DTYPE_BYTES[vllm.dtype]} bytes"
        )
    else:
        peak = f"sampling: {vllm.max_num_seqs} sequences x {model.vocabulary:,} logits x {memory.SAMPLING_BYTES} bytes"
    rows = [("activations", peak, _gib(-need.activations))]
    if need.graphs:
        each = memory.GRAPH_BYTES_PER_LAYER // 2**20
        rows.append(("CUDA graphs", f"{model.layers} layers x {each} MiB (planned)", _gib(-need.graphs)))
    outside = (
        "context and libraries (planned)" if vllm.tensor_parallel_size == 1 else "context, libraries, NCCL (planned)"
    )
    return [*rows, ("outside torch", outside, _gib(-need.outside))]


def _capacity(profile: Profile) -> list[Row]:
    """What the cache holds, how fast a token comes, and whether the gate can pass: figures with units of their own."""
    model, vllm = profile.model, profile.vllm
    kind = vllm.dtype if vllm.kv_cache_dtype == "auto" else vllm.kv_cache_dtype
    heads = max(1, -(-model.kv_heads // vllm.tensor_parallel_size))
    size = (KV_BYTES | DTYPE_BYTES)[kind]
    each = f"2 x {model.layers} layers x {heads} KV heads x {model.head_dim} x {size} bytes ({kind})"
    full = profile.kv_tokens / vllm.max_model_len
    rows = [
        ("a token", each, f"{profile.need.kv_per_token / KIB:.4g} KiB"),
        ("cache", "in blocks of 16 tokens", f"{profile.kv_tokens:,} tokens"),
        ("at full length", f"of {vllm.max_model_len:,} tokens", f"{full:.1f} sequences"),
        (
            "typical",
            f"of {profile.typical_tokens:,} tokens",
            f"{profile.kv_tokens // profile.typical_tokens} sequences",
        ),
    ]
    speed = profile.card.speed
    if speed:
        step_s, share = profile.cost(1, 0, 0).step_s, speed.decode_efficiency
        told = f"{profile.weights_bytes / GIB:.2f} GiB at {share * 100:.0f} % of {speed.bandwidth_gb_per_s:,.0f} GB/s"
        rows.append(("a decode", f"{told}: {SLO_S / step_s:.0f} tokens in {SLO_S} s", f"{step_s * 1000:.1f} ms"))
    if vllm.gpu_memory_utilization is not None:
        rows.append(_gate(profile))
    return rows


def _gate(profile: Profile) -> Row:
    most = memory.highest_utilization(profile.card.memory_bytes)
    unseen, total = memory.UNSEEN_BYTES / GIB, profile.card.memory_gib
    told = f"{GATE:.2f} - {unseen:.2f} GiB that vLLM does not see / {total:.2f} GiB - {memory.GATE_MARGIN}"
    return (f"gate of {GATE * 100:.0f} %", f"passes with a utilization of at most {told}", f"{most:.3f}")


def _gib(value: float) -> str:
    return f"{round(value / GIB, 2) + 0:.2f}"  # + 0: no minus before nothing
