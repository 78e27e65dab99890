"""What is done to a client on purpose, to see whether it notices: its loop blocked, its core shared.

Each is a context manager that acts between enter and exit, from outside: the client under test has no hook for it.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.machine import CLIENT_CORE, busiest

BLOCKED_S, PERIOD_S = 0.030, 0.100
_BURN = "import time\nend = time.monotonic() + 120\nwhile time.monotonic() < end: sum(range(10000))"


@contextmanager
def blocked_loop(client: int) -> Iterator[None]:
    """Stop the client's sending process for 30 ms of every 100 ms, as a blocking call in its event loop would."""
    pid, over = busiest(client), threading.Event()

    def block() -> None:
        due = time.monotonic()
        while not over.is_set():
            due += PERIOD_S
            try:
                os.kill(pid, signal.SIGSTOP)
                over.wait(BLOCKED_S)
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                return
            over.wait(max(0.0, due - time.monotonic()))

    thread = threading.Thread(target=block)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def hog(client: int) -> Iterator[None]:
    """Two processes that want the client's core for themselves."""
    burners = [subprocess.Popen(["taskset", "-c", str(CLIENT_CORE), sys.executable, "-c", _BURN]) for _ in range(2)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
