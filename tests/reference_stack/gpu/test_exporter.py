"""The exporter: DCGM's names, units and labels, read afresh at each scrape."""

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from reference_stack.gpu.device import Device
from reference_stack.gpu.exporter import Devices

LABELS = {"gpu": "1", "UUID": "GPU-1", "modelName": "Test GPU", "simulated": "true"}


@pytest.fixture
def registry(tmp_path: Path) -> CollectorRegistry:
    """A registry over a directory of devices that is empty at first."""
    registry = CollectorRegistry()
    registry.register(Devices(tmp_path))
    return registry


def test_fields_have_dcgm_units(tmp_path: Path, registry: CollectorRegistry) -> None:
    """Memory is in MiB, GPU_UTIL in percent, profiling fields are shares."""
    device = Device(tmp_path / "GPU-1.json")
    device.create("Test GPU", 1000 * 2**20)
    device.allocate("weights", 250 * 2**20)
    device.report(0.9, 0.2, 0.6)
    assert registry.get_sample_value("DCGM_FI_DEV_FB_USED", LABELS) == 250
    assert registry.get_sample_value("DCGM_FI_DEV_FB_FREE", LABELS) == 750
    assert registry.get_sample_value("DCGM_FI_DEV_GPU_UTIL", LABELS) == pytest.approx(90)
    assert registry.get_sample_value("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", LABELS) == pytest.approx(0.2)
    assert registry.get_sample_value("DCGM_FI_PROF_DRAM_ACTIVE", LABELS) == pytest.approx(0.6)


def test_missing_device_is_a_gap(registry: CollectorRegistry) -> None:
    """No device file, no sample: nothing is reported as zero."""
    assert registry.get_sample_value("DCGM_FI_DEV_FB_USED", LABELS) is None


def test_idle_device_reads_zero(tmp_path: Path, registry: CollectorRegistry) -> None:
    """A device that nobody works on is there, and idle."""
    Device(tmp_path / "GPU-1.json").create("Test GPU", 2**30)
    assert registry.get_sample_value("DCGM_FI_DEV_GPU_UTIL", LABELS) == 0
