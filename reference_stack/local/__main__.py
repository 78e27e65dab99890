"""The door of the local stack: python -m reference_stack.local up | down | status | logs.

Exit: 0 done or all running, 1 (status) not all running, 2 it cannot be done and a sentence says why, 130 interrupted.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from reference_stack.local import target
from reference_stack.local.stack import Row, Stack, StackError

DEFAULT_TARGET = Path(__file__).with_name("target.yaml")


def main() -> int:
    """Do what the command line asks; the exit status."""
    arguments = parse()
    stack = Stack(Path.cwd())
    try:
        if arguments.verb == "up":
            return up(stack, arguments.target, arguments.full)
        if arguments.verb == "down":
            say(f"down: {stack.down()} processes stopped")
            return 0
        if arguments.verb == "status":
            return status(stack, arguments.json)
        say(stack.logs(arguments.program).rstrip("\n"))
    except (target.UsageError, StackError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="stack", description="Run the reference stack on this machine.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    start = verbs.add_parser("up", help="start it and wait until it serves")
    start.add_argument("--target", type=Path, default=DEFAULT_TARGET, help="what to run (default: %(default)s)")
    start.add_argument("--full", action="store_true", help="with the orchestrator, Redis and Qdrant")
    verbs.add_parser("down", help="stop every process of it")
    show = verbs.add_parser("status", help="its programs")
    show.add_argument("--json", action="store_true", help="for machines")
    read = verbs.add_parser("logs", help="what its programs said")
    read.add_argument("program", nargs="?", help="one program only")
    return parser.parse_args()


def up(stack: Stack, path: Path, full: bool) -> int:
    """Start the target in a file, and show what runs."""
    wanted = target.read(path)
    if not stack.up(wanted, full):
        say(f"already up: {wanted.url}")
    return status(stack, as_json=False)


def status(stack: Stack, as_json: bool) -> int:
    """Show the programs; 0 when there are some and all run."""
    rows = stack.status()
    running = bool(rows) and all(row.state in ("RUNNING", "STARTING") for row in rows)
    if as_json:
        say(json.dumps({"running": running, "programs": [dataclasses.asdict(row) for row in rows]}, indent=2))
    else:
        say("\n".join([*table(rows), *stack.remarks()]) if rows else "no stack is up")
    return 0 if running else 1


def table(rows: list[Row]) -> list[str]:
    """The rows in columns."""
    lines = [("PROGRAM", "STATE", "PID", "URL")]
    lines += [(row.program, row.state, str(row.pid or "-"), row.url or "-") for row in rows]
    return ["{:<13} {:<9} {:<8} {}".format(*line) for line in lines]


def say(text: str) -> None:
    """To the user."""
    sys.stdout.write(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main())
