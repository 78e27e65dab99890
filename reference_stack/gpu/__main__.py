"""The simulated driver's door, for processes that share no code with it: python -m reference_stack.gpu info | allocate.

    python -m reference_stack.gpu info --device FILE                             what there is, as JSON
    python -m reference_stack.gpu allocate --device FILE --bytes N --pid PID     memory for a process, until it dies

Exit: 0 done, 1 out of memory, 2 it cannot be done and a sentence says why. It is SIMULATED: no GPU is touched.
"""

import argparse
import json
import sys
from pathlib import Path

from reference_stack.gpu.device import Device, OutOfDeviceMemory


def main() -> int:
    """Do what the command line asks; the exit status."""
    asked = _parse()
    device = Device(asked.device)
    try:
        if asked.verb == "allocate":
            device.allocate("held from outside", asked.bytes, asked.pid)
        else:
            sys.stdout.write(json.dumps(_info(device)) + "\n")
    except OutOfDeviceMemory as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{asked.device}: {error}\n")
        return 2
    return 0


def _info(device: Device) -> dict[str, object]:
    state = device.read()
    memory = {"free_bytes": state.free_bytes, "total_bytes": state.total_bytes}
    return {"simulated": True, "uuid": device.uuid, "model": state.model, **memory}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m reference_stack.gpu", description="Ask a simulated GPU.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    info = verbs.add_parser("info", help="its memory, as JSON")
    allocate = verbs.add_parser("allocate", help="take memory for a process, until it dies")
    for verb in (info, allocate):
        verb.add_argument("--device", type=Path, required=True, help="file of the simulated GPU")
    allocate.add_argument("--bytes", type=int, required=True)
    allocate.add_argument("--pid", type=int, required=True, help="the process that is to own it")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
