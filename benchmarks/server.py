"""The timed server as a process: built on demand, started, asked for its log, stopped.

`timed_server.c` is the ruler; this is the hand that holds it. Whoever needs a server of exactly known timing (the
benchmarks, the player's tests) starts one here. It never outlives its `life_s`, and
refuses to start without a C compiler.
"""

import hashlib
import http.client
import json
import os
import shutil
import signal
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

SOURCE = Path(__file__).with_name("timed_server.c")
CACHE = Path(".cache")

# One finished request; moments on CLOCK_MONOTONIC, which is time.monotonic() here.
TRUTH = np.dtype(
    [("id", "U48"), ("read_s", "f8"), ("first_s", "f8"), ("last_s", "f8"), ("chunks", "i4"), ("streamed", "?")]
)


@dataclass(frozen=True)
class Timing:
    """When the server answers: streamed (`ttft_s`, then `chunks` `itl_s` apart), plain, and one freeze at most.

    `stall_at_s` counts from the first request; None: it freezes only when told to.
    """

    ttft_s: float = 0.050
    itl_s: float = 0.010
    chunks: int = 32
    plain_s: float = 0.050
    stall_at_s: float | None = None
    stall_s: float = 2.0


class TimedServer:
    """A running timed server, as a context manager; `core` pins it, `port` 0 takes a free one.

    Raises RuntimeError when it cannot be built or does not get its port.
    """

    def __init__(
        self, timing: Timing = Timing(), *, port: int = 0, core: int | None = None, life_s: float = 600
    ) -> None:
        command = ["taskset", "-c", str(core)] if core is not None else []
        command.append(str(built()))
        for name, value in {"port": port, "life_s": life_s, **asdict(timing)}.items():
            if value is not None:
                command += [f"--{name.replace('_', '-')}", str(value)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        said = self.process.stdout.readline() if self.process.stdout else ""
        if not said:
            self.stop()
            raise RuntimeError(f"the timed server does not start; is port {port} in use?")
        self.port = int(said)
        self.url = f"http://127.0.0.1:{self.port}"

    def get(self, path: str) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request("GET", path)
            return connection.getresponse().read()
        finally:
            connection.close()

    def stats(self) -> dict[str, Any]:
        """Counts of requests begun and finished, of connections, and the server's own CPU seconds."""
        value: dict[str, Any] = json.loads(self.get("/stats"))
        return value

    def reset(self) -> None:
        self.get("/reset")

    def log(self) -> np.ndarray:
        """All finished requests since the last reset (dtype TRUTH), in the order they were read."""
        rows = [line.split(",") for line in self.get("/log").decode().splitlines()]
        table = np.array([(r[0], *(int(v) / 1e9 for v in r[1:4]), int(r[4]), r[5] == "1") for r in rows], dtype=TRUTH)
        return table[np.argsort(table["read_s"], kind="stable")]

    def stall(self) -> None:
        """Freeze it now, once, for its `stall_s`."""
        self.process.send_signal(signal.SIGUSR1)

    def stop(self) -> None:
        self.process.kill()
        self.process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def built() -> Path:
    """The server's binary, compiled when its source has changed; raises RuntimeError without gcc or cc."""
    source = SOURCE.read_bytes()
    binary = CACHE / f"timed_server-{hashlib.sha256(source).hexdigest()[:12]}"
    if binary.exists():
        return binary
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise RuntimeError("the timed server needs a C compiler: apt-get install gcc libc6-dev")
    CACHE.mkdir(exist_ok=True)
    beside = binary.with_suffix(f".{os.getpid()}")  # two builds at once do not meet
    done = subprocess.run([compiler, "-O2", "-o", beside, SOURCE], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{SOURCE} does not compile:\n{done.stderr}")
    beside.replace(binary)
    return binary
