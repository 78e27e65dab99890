"""The simulated GPUs under DCGM's metric names, with a label that says simulated.

    python -m reference_stack.gpu.exporter --port P --devices DIR

Names and units are those of dcgm-exporter's default set: framebuffer in MiB, GPU_UTIL 0 to 100, profiling fields 0 to
1. Every scrape reads the device files afresh. A device that is not there is not exported: a gap stays a gap.
"""

import argparse
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from reference_stack.gpu.device import Device, State

MIB = 2**20
LABELS = ["gpu", "UUID", "modelName", "simulated"]


class Devices(Collector):
    """All devices of a directory as one collector."""

    def __init__(self, directory: Path) -> None:
        """Export the devices that `directory` holds at each scrape."""
        self._directory = directory

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """One family per DCGM field, one sample per device."""
        devices = [Device(path) for path in sorted(self._directory.glob("*.json"))]
        states = [(device, device.read()) for device in devices]
        for name, (help_text, value) in FIELDS.items():
            family = GaugeMetricFamily(name, help_text, labels=LABELS)
            for device, state in states:
                number = device.uuid.rpartition("-")[2]
                family.add_metric([number, device.uuid, state.model, "true"], value(state))
            yield family


def _share(state: State, name: str) -> float:
    """A utilisation of the device; one that nobody reports on is idle."""
    return float(getattr(state.utilisation, name)) if state.utilisation else 0.0


FIELDS: dict[str, tuple[str, Callable[[State], float]]] = {
    "DCGM_FI_DEV_FB_USED": ("Framebuffer memory used (in MiB).", lambda state: state.used_bytes / MIB),
    "DCGM_FI_DEV_FB_FREE": ("Framebuffer memory free (in MiB).", lambda state: state.free_bytes / MIB),
    "DCGM_FI_DEV_GPU_UTIL": ("GPU utilization (in %).", lambda state: 100 * _share(state, "busy")),
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": (
        "Ratio of cycles the tensor (HMMA) pipe is active.",
        lambda state: _share(state, "tensor_active"),
    ),
    "DCGM_FI_PROF_DRAM_ACTIVE": (
        "Ratio of cycles the device memory interface is active sending or receiving data.",
        lambda state: _share(state, "dram_active"),
    ),
}


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description="Export simulated GPUs under DCGM's metric names.")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--devices", type=Path, required=True, help="directory of device files")
    arguments = parser.parse_args()
    registry = CollectorRegistry()
    registry.register(Devices(arguments.devices))
    _, thread = start_http_server(arguments.port, "127.0.0.1", registry)
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(asctime)s %(message)s")
    logging.info("exporting %s on http://127.0.0.1:%d/metrics", arguments.devices, arguments.port)
    thread.join()


if __name__ == "__main__":
    main()
