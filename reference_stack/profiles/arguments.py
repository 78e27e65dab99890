"""A profile as the arguments of vLLM: one rendering, for the local start, for a shell and for a Kubernetes container.

How a checkpoint is quantised stands in its own configuration, so no argument says it again. Ports and names are the
caller's.
"""

import shlex

from reference_stack.profiles.profile import Profile


def settings(profile: Profile) -> list[str]:
    """The arguments that the profile decides, all but the model, as flags that `vllm serve` knows."""
    vllm = profile.vllm
    pairs = {
        "--dtype": vllm.dtype,
        "--tensor-parallel-size": vllm.tensor_parallel_size,
        "--max-model-len": vllm.max_model_len,
        "--max-num-seqs": vllm.max_num_seqs,
        "--max-num-batched-tokens": vllm.max_num_batched_tokens,
        "--gpu-memory-utilization": vllm.gpu_memory_utilization,
        "--kv-cache-memory-bytes": vllm.kv_cache_memory_bytes,
        "--kv-cache-dtype": vllm.kv_cache_dtype,
        "--distributed-executor-backend": vllm.distributed_executor_backend,
    }
    rendered = [text for flag, value in pairs.items() if value is not None for text in (flag, str(value))]
    rendered.append("--enable-prefix-caching" if vllm.enable_prefix_caching else "--no-enable-prefix-caching")
    return rendered + (["--enforce-eager"] if vllm.enforce_eager else [])


def shell(profile: Profile) -> str:
    """A command for a terminal, one setting on a line."""
    lines = [f"vllm serve {shlex.quote(profile.checkpoint)}"]
    for text in settings(profile):
        if text.startswith("--"):
            lines.append(f"  {text}")
        else:
            lines[-1] += f" {shlex.quote(text)}"
    return " \\\n".join(lines)


def kubernetes(profile: Profile) -> str:
    """`command` and `args` of a container, as YAML. Every item is quoted: a container's arguments are strings."""
    items = [profile.checkpoint, *settings(profile)]
    return "\n".join(["command: [vllm, serve]", "args:", *(f'  - "{item}"' for item in items)])
