"""The arguments that real vLLM is started with (tests/vllm starts it)."""

from argparse import Namespace

from reference_stack.engine import vllm_replica
from reference_stack.profiles import profile

OPTIONS = Namespace(port=1, model="tiny", model_dir=".cache/tiny", max_model_len=2304, profile="h100-8b", zygote=None)


def value(arguments: list[str], name: str) -> str:
    return arguments[arguments.index(name) + 1]


def test_on_cpu_the_tiny_model_is_served_in_float32() -> None:
    """On CPU the model directory is served under the users' name, in the type that no short prompt can kill."""
    arguments = vllm_replica.arguments(OPTIONS, on_gpu=False)
    assert value(arguments, "--model") == ".cache/tiny"
    assert value(arguments, "--served-model-name") == "tiny"
    assert value(arguments, "--dtype") == "float32"


def test_on_a_gpu_the_profile_decides() -> None:
    """On a GPU the profile's checkpoint is served with the profile's settings, under the same name and limit."""
    arguments = vllm_replica.arguments(OPTIONS, on_gpu=True)
    chosen = profile.load("h100-8b")
    assert value(arguments, "--model") == chosen.checkpoint
    assert value(arguments, "--served-model-name") == "tiny"
    assert value(arguments, "--max-model-len") == "2304"
    assert float(value(arguments, "--gpu-memory-utilization")) == chosen.vllm.gpu_memory_utilization
    assert int(value(arguments, "--max-num-seqs")) == chosen.vllm.max_num_seqs
