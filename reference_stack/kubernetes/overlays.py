"""An overlay for each profile that has a GPU: the engine's arguments, its cards and their rules, where its weights are.

Everything in an overlay follows from the profile, so that what `harness profile` checks is what a cluster runs.
"""

from typing import Any

from reference_stack.monitoring import gpu_rules
from reference_stack.profiles import profile
from reference_stack.profiles.arguments import settings
from reference_stack.profiles.profile import Profile

ENGINE = "/spec/template/spec/containers/0"
NODES = "/spec/template/spec/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution/nodeSelectorTerms/0"
MODEL = "assistant"  # what users and checks call it, whichever it is
SHUTDOWN_S = 120  # for answers that are under way; the pod's grace period is longer

# By card: nvidia.com/gpu.product, as GPU feature discovery labels nodes.
PRODUCTS = {
    "NVIDIA A10": ["NVIDIA-A10"],
    "NVIDIA L4": ["NVIDIA-L4"],
    "NVIDIA L40S": ["NVIDIA-L40S"],
    "NVIDIA A100-SXM4-40GB": ["NVIDIA-A100-SXM4-40GB", "NVIDIA-A100-PCIE-40GB"],
    "NVIDIA A100-SXM4-80GB": ["NVIDIA-A100-SXM4-80GB", "NVIDIA-A100-80GB-PCIe"],
    "NVIDIA H100 80GB HBM3": ["NVIDIA-H100-80GB-HBM3"],
    "NVIDIA H200": ["NVIDIA-H200"],
}


def documents() -> dict[str, Any]:
    """The files of every profile with a GPU, by their paths in this folder."""
    found: dict[str, Any] = {}
    for chosen in map(profile.load, profile.names()):
        if chosen.card.compute_capability is not None:
            found[f"overlays/{chosen.name}/kustomization.yaml"] = kustomization(chosen)
            found[f"overlays/{chosen.name}/engine.yaml"] = patch(chosen)
            thresholds = gpu_rules.read(chosen.card.name)
            found[f"overlays/{chosen.name}/gpu_rules.yml"] = gpu_rules.document(thresholds)
    return found


def kustomization(chosen: Profile) -> dict[str, Any]:
    """The base, the directory of the weights on their volume, and the patch of both engine Deployments."""
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": "llm-serving",
        "resources": ["../../base"],
        "configMapGenerator": [
            {"name": "model", "literals": [f"directory={chosen.checkpoint.rpartition('/')[2]}"]},
            {"name": "prometheus", "namespace": "llm-serving", "behavior": "merge", "files": ["gpu_rules.yml"]},
        ],
        "patches": [
            {
                "target": {"kind": "Deployment", "labelSelector": "app.kubernetes.io/component=engine"},
                "path": "engine.yaml",
            }
        ],
    }


def patch(chosen: Profile) -> list[dict[str, Any]]:
    """Arguments, how many cards, and which."""
    products = {"key": "nvidia.com/gpu.product", "operator": "In", "values": PRODUCTS[chosen.card.name]}
    cards = str(chosen.vllm.tensor_parallel_size)
    return [
        {"op": "replace", "path": f"{ENGINE}/args", "value": arguments(chosen)},
        {"op": "add", "path": f"{ENGINE}/resources/limits/nvidia.com~1gpu", "value": cards},
        {"op": "add", "path": f"{NODES}/matchExpressions/-", "value": products},
    ]


def arguments(chosen: Profile) -> list[str]:
    """What follows `vllm serve DIRECTORY`: the stack's own, then the profile's."""
    own = ["--served-model-name", MODEL, "--host", "0.0.0.0", "--port", "8000", "--disable-uvicorn-access-log"]
    return [*own, "--shutdown-timeout", str(SHUTDOWN_S), *settings(chosen)]
