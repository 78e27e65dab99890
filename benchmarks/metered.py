"""Runs a command and prints what it used, as JSON: CPU seconds, peak MB of its largest process, exit code.

    python -m benchmarks.metered LIMIT_S SAID COMMAND...

A process of its own because it must be small: the kernel counts to a child's peak what its parent held when it
started it. What the command says goes to the file SAID.
"""

import json
import resource
import subprocess
import sys


def main() -> None:
    limit_s, said, *command = sys.argv[1:]
    with open(said, "wb") as file:
        done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, timeout=float(limit_s), check=False)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    value = {"cpu_s": used.ru_utime + used.ru_stime, "peak_mb": used.ru_maxrss / 1024, "exit_code": done.returncode}
    json.dump(value, sys.stdout)


if __name__ == "__main__":
    main()
