"""The faults by name: a new one is a class in `faults/` and a line here."""

from harness.chaos.fault import Fault
from harness.chaos.faults.gpu import GpuLeak

FAULTS: dict[str, type[Fault]] = {
    "gpu_leak": GpuLeak,
}
