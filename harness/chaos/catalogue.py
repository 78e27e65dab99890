"""The faults by name: a new one is a class in `faults/` and a line here."""

from harness.chaos.fault import Fault
from harness.chaos.faults.gpu import GpuLeak
from harness.chaos.faults.link import Bandwidth, Blackhole, ConnectionReset, SlowLink
from harness.chaos.faults.network import Aborts, Latency
from harness.chaos.faults.pressure import CpuPressure, DiskFull, MemoryPressure
from harness.chaos.faults.process import CrashLoop, EngineFrozen, GatewayRestarted, ReplicaKilled, ServerCrashed

FAULTS: dict[str, type[Fault]] = {
    "gpu_leak": GpuLeak,
    "bandwidth": Bandwidth,
    "blackhole": Blackhole,
    "connection_reset": ConnectionReset,
    "slow_link": SlowLink,
    "aborts": Aborts,
    "latency": Latency,
    "cpu_pressure": CpuPressure,
    "disk_full": DiskFull,
    "memory_pressure": MemoryPressure,
    "crash_loop": CrashLoop,
    "engine_frozen": EngineFrozen,
    "gateway_restarted": GatewayRestarted,
    "replica_killed": ReplicaKilled,
    "server_crashed": ServerCrashed,
}
