"""python breaker.py WORK TTL_S DEED FAULT: injects a toy fault (its arguments as JSON), and then does as it is told.

It says `held` when the fault is in force, and at the end how that ended and how many signals were put off.
"""

import os
import resource
import signal
import sys
import time
from pathlib import Path

import orjson
from toy import LONG_S, Toy

from harness.chaos.discipline import Injection
from harness.log import Log
from harness.targets import base


def do(deed: str, injection: Injection) -> None:
    if deed == "raise":
        raise ZeroDivisionError("an accident")
    if deed == "exit":
        sys.exit(7)
    if deed == "exit at once":
        os._exit(7)
    if deed == "fork" and not (child := os.fork()):
        time.sleep(LONG_S)
    if deed == "fork":
        print("child", child, flush=True)
    if deed == "fill the disk":
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    elif deed != "return":
        injection.hold(LONG_S)


def main() -> None:
    work, ttl_s, deed, arguments = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3], orjson.loads(sys.argv[4])
    signal.signal(signal.SIGINT, signal.default_int_handler)  # both are ignored where tests run in the background
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    run_dir, target = work / "run", base.load(str(work / "target.yaml"))
    log = Log(run_dir / "log.chaos.jsonl")
    if deed == "no room":
        resource.setrlimit(resource.RLIMIT_FSIZE, (16, resource.RLIM_INFINITY))
    put_off = 0
    try:
        injection = Injection("toy", Toy(**arguments), target, log, ttl_s=ttl_s, run_dir=run_dir)
        injection.begin()
        print("held", flush=True)
        try:
            do(deed, injection)
        except BaseException as error:
            put_off = injection.signals
            injection.abort(f"{type(error).__name__}: {error}")
            raise
        injection.end()
        put_off = injection.signals
    except BaseException as error:
        print("ended", type(error).__name__, put_off, flush=True)
        raise
    print("ended well", put_off, flush=True)


if __name__ == "__main__":
    main()
