"""What DCGM's profiling fields say of the work on a card, as alerts for those who look, not for those on call.

GPU_UTIL says that a kernel is there, these say whether it gets work done. What is normal depends on the card and the
model, so every number is a setting (`gpu_thresholds.yaml`). There is no field for stalled instructions, and
MEM_COPY_UTIL is the use of the card's own memory: what is told here is the nearest that DCGM has.
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from reference_stack.monitoring.rules import Alert, group

FILE = Path(__file__).with_name("gpu_thresholds.yaml")


class ThresholdError(Exception):
    """The file of thresholds cannot be used; one sentence for the user."""


@dataclass(frozen=True)
class GpuThresholds:
    """The numbers of one card: shares are 0 to 1, what each means stands in the file."""

    busy_percent: float
    tensor_active: float
    memory_bound: float
    copying: float
    link_bytes_per_s: float
    stalled: float


def read(card: str, file: Path = FILE) -> GpuThresholds:
    """The thresholds of a card, by its name; the file's default where it says nothing of it. Raises ThresholdError."""
    written = yaml.safe_load(file.read_text())
    if not isinstance(written, dict) or set(written) != {"default", "cards"}:
        raise ThresholdError(f"{file}: has the keys default and cards, no more and no less.")
    values = written["default"] | written["cards"].get(card, {})
    known = {field.name for field in fields(GpuThresholds)}
    for section in (written["default"], *written["cards"].values()):
        if unknown := section.keys() - known:
            raise ThresholdError(f"{file}: {min(unknown)} is no threshold; there are: {', '.join(sorted(known))}.")
    for name in sorted(known):
        value = values.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ThresholdError(f"{file}: {name} must be a number above 0, not {value!r}.")
    return GpuThresholds(**values)


def alerts(limit: GpuThresholds) -> tuple[Alert, ...]:
    """The alerts of cards with these limits."""
    busy = f"on (gpu, Hostname) DCGM_FI_DEV_GPU_UTIL > {limit.busy_percent:g}"
    copied = "(DCGM_FI_PROF_PCIE_RX_BYTES + DCGM_FI_PROF_PCIE_TX_BYTES)"
    return (
        Alert(
            "TensorCoresIdle",
            f"DCGM_FI_PROF_PIPE_TENSOR_ACTIVE < {limit.tensor_active:g} and {busy} "
            f"unless on (gpu, Hostname) DCGM_FI_PROF_DRAM_ACTIVE > {limit.memory_bound:g}",
            for_s=600,
            severity="info",
            summary="GPU {{ $labels.gpu }} is busy, and neither its tensor cores ({{ $value | humanizePercentage }}) "
            "nor its memory are",
        ),
        Alert(
            "HostCopiesHigh",
            f"{copied} / {limit.link_bytes_per_s:g} > {limit.copying:g}",
            for_s=600,
            severity="info",
            summary="{{ $value | humanizePercentage }} of the link to GPU {{ $labels.gpu }} is taken by copies",
        ),
        Alert(
            "GpuStalled",
            f"DCGM_FI_PROF_GR_ENGINE_ACTIVE - DCGM_FI_PROF_SM_ACTIVE > {limit.stalled:g} and {busy}",
            for_s=600,
            severity="info",
            summary="GPU {{ $labels.gpu }} has work, and {{ $value | humanizePercentage }} of the time does none of it",
        ),
    )


def document(limit: GpuThresholds) -> dict[str, Any]:
    """The rule file."""
    return {"groups": [group("gpu_profiling", alerts(limit), 1.0)]}
