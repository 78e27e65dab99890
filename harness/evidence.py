"""A run directory as evidence: laid out before a run, judged from its raw files after it, and verified again later.

`verdict.json` says INVALID "not finished" from the first moment, so that whatever dies leaves no verdict of an earlier
run and no silence. Judging reads files only: the same files give the same bytes.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from harness import provenance, scenario, timeline
from harness.judge import verdict as verdicts
from harness.log import read_run_json, write_beside
from harness.model import EXIT_CODE, EXIT_UNSAFE, SEVERITY, Finding, Judgement, UsageError, Verdict
from harness.report import junit, markdown
from harness.targets import base


@contextlib.contextmanager
def only_run(runs: Path) -> Iterator[None]:
    """Hold the place of the one run at a time under `runs`. Raises UsageError when another run holds it.

    Two runs would load each other's stack and judge each other's traffic.
    """
    _made(runs)
    with open(runs / ".lock", "a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise UsageError(f"another run is going on under {runs}/ (pid {lock.read().strip()})") from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def _made(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as trouble:
        raise UsageError(f"cannot make the directory {directory}: {trouble.strerror}") from trouble


def create(runs: Path, name: str) -> Path:
    """A new directory `runs/<utc>-<name>` whose verdict is INVALID until it is judged; `runs/latest` points to it."""
    _made(runs)
    stamp, taken = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ"), 1
    run_dir = runs / f"{stamp}-{name}"
    while run_dir.exists():
        taken += 1
        run_dir = runs / f"{stamp}-{name}-{taken}"
    _made(run_dir)
    write_verdict(run_dir, unfinished(run_dir.name))
    point(runs / "latest", run_dir)
    return run_dir


def point(link: Path, run_dir: Path) -> None:
    """Make `link` a symbolic link to a sibling run directory, in one step."""
    beside = link.with_name(f".{link.name}.{os.getpid()}")
    beside.unlink(missing_ok=True)
    beside.symlink_to(run_dir.name)
    beside.replace(link)


def unfinished(run: str, stage: int = 0) -> Verdict:
    return Verdict(
        verdict=Judgement.INVALID,
        exit_code=EXIT_CODE[Judgement.INVALID],
        why="not finished: the run has not been judged",
        provenance={"run": run, "stage": stage},
    )


def write_verdict(run_dir: Path, verdict: Verdict) -> None:
    write_beside(run_dir / "verdict.json", verdicts.to_json(verdict))


def judge(run_dir: Path) -> Verdict:
    """The verdict of a finished or a broken run, from its raw files alone.

    Raises UsageError when the directory is no run at all.
    """
    if not (run_dir / "run.json").exists():
        raise UsageError(f"{run_dir} holds no run.json: it is not a run directory, or the run died before it began")
    try:
        seen = timeline.read(run_dir)
        judged = scenario.load(run_dir / "scenario.yaml", to_plan=False)
        target = base.load(str(run_dir / "target.yaml"))
    except (FileNotFoundError, ValueError, KeyError, TypeError, UsageError) as trouble:
        return Verdict(
            verdict=Judgement.INVALID,
            exit_code=EXIT_CODE[Judgement.INVALID],
            why=f"the run directory cannot be judged: {trouble}",
            provenance=_provenance(run_dir, read_run_json(run_dir)),
        )
    return verdicts.judge(
        seen,
        judged.gates,
        gpu=target.gpu,
        on_inconclusive=judged.on_inconclusive,
        provenance=_provenance(run_dir, seen.run),
    )


def _provenance(run_dir: Path, run: Mapping[str, Any]) -> dict[str, Any]:
    kept = ("run", "scenario", "claim", "stage", "seed", "plan_sha256", "workers", "target", "engine", "simulated")
    origin = ("force", "commit", "dirty", "command", "versions", "machine", "gpu_driver", "started")
    return {
        **{key: run[key] for key in (*kept, *origin) if key in run},
        "logs": {path.name: provenance.sha256(path) for path in timeline.log_files(run_dir)},
    }


def settle(run_dir: Path) -> Verdict:
    """Judge a run, or every run of a stage, and write all that tells it: verdict.json, report.md, junit.xml."""
    parts = _parts(run_dir)
    if parts:
        return settle_stage(run_dir, _stage(run_dir), [run_dir / name for name in parts])
    verdict = judge(run_dir)
    write_verdict(run_dir, verdict)
    tell(run_dir, verdict)
    return verdict


def tell(run_dir: Path, verdict: Verdict) -> None:
    """Write the reports that tell a verdict."""
    write_beside(run_dir / "report.md", markdown.render(verdict).encode())
    write_beside(run_dir / "junit.xml", junit.render(verdict).encode())


def verify(run_dir: Path) -> list[str]:
    """What differs between the verdict on disk and the raw files it rests on; nothing when all is as judged."""
    told = _told(run_dir)
    parts = _parts(run_dir)
    if parts:
        differences = [f"{name}: {difference}" for name in parts for difference in verify(run_dir / name)]
        again = _merged(run_dir, _stage(run_dir), [run_dir / name for name in parts])
        return differences or ([] if verdicts.to_json(again) == told else [_NOT_GIVEN])
    try:
        hashes: dict[str, str] = orjson.loads(told)["provenance"]["logs"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return ["verdict.json names no logs: it was never judged, or is damaged"]
    present = {path.name: path for path in timeline.log_files(run_dir)}
    differences = [f"{name} is missing" for name in hashes if name not in present]
    differences += [f"{name} was added after the verdict" for name in present if name not in hashes]
    differences += [
        f"{name} differs from what was judged (sha256)"
        for name, path in present.items()
        if name in hashes and provenance.sha256(path) != hashes[name]
    ]
    return differences or ([] if verdicts.to_json(judge(run_dir)) == told else [_NOT_GIVEN])


_NOT_GIVEN = "verdict.json is not what judging these files gives"


def read_verdict(run_dir: Path) -> Verdict:
    """The verdict on disk. Raises UsageError when there is none that can be read."""
    try:
        return verdicts.from_json(_told(run_dir))
    except (ValueError, KeyError, TypeError) as trouble:
        raise UsageError(f"{run_dir}/verdict.json cannot be read: {trouble}") from trouble


def _told(run_dir: Path) -> bytes:
    path = run_dir / "verdict.json"
    if not path.exists():
        raise UsageError(f"{run_dir} holds no verdict.json: judge it first with `harness judge {run_dir}`")
    return path.read_bytes()


# A stage: one verdict over several runs ---------------------------------------------------------------------------

_LEFT_OUT = "left_out.json"


def worst(told: Sequence[Verdict]) -> Verdict:
    """The verdict that stands for all: the gravest; of equals one of a stack left unsafe, then the higher exit code."""
    return min(told, key=lambda v: (SEVERITY.index(v.verdict), v.exit_code != EXIT_UNSAFE, -v.exit_code))


def begin_stage(runs: Path, stage: int) -> Path:
    """The directory of a stage's verdict, INVALID until all its runs are judged; `runs/latest-stageN` points to it."""
    stage_dir = create(runs, f"stage{stage}")
    write_verdict(stage_dir, unfinished(stage_dir.name, stage))
    point(runs / f"latest-stage{stage}", stage_dir)
    return stage_dir


def leave_out(stage_dir: Path, why: Mapping[str, str]) -> None:
    """Put on record which scenarios the stage goes on without, by name, and why: its verdict will say so."""
    write_beside(stage_dir / _LEFT_OUT, orjson.dumps(why))


def settle_stage(stage_dir: Path, stage: int, run_dirs: Sequence[Path]) -> Verdict:
    """Judge every run of a stage and write the one verdict over them."""
    for run_dir in run_dirs:
        settle(run_dir)
        link = stage_dir / run_dir.name
        if not link.is_symlink():
            link.symlink_to(Path("..") / run_dir.name)
    verdict = _merged(stage_dir, stage, run_dirs)
    write_verdict(stage_dir, verdict)
    tell(stage_dir, verdict)
    return verdict


def _parts(run_dir: Path) -> list[str]:
    """The runs of a stage's directory, by name; none for a run's own directory."""
    return sorted(path.name for path in run_dir.iterdir() if path.is_symlink()) if run_dir.is_dir() else []


def _stage(stage_dir: Path) -> int:
    return int(read_verdict(stage_dir).provenance.get("stage", 0))


def _merged(stage_dir: Path, stage: int, run_dirs: Sequence[Path]) -> Verdict:
    parts = {run_dir: read_verdict(run_dir) for run_dir in sorted(run_dirs)}
    stands, several = worst(list(parts.values())), len(parts) > 1
    why = "; ".join(f"{_scenario_name(v)}: {v.why}" for v in parts.values() if v.verdict == stands.verdict)
    first = next(iter(parts.values()))
    return Verdict(
        verdict=stands.verdict,
        exit_code=stands.exit_code,
        why=why if several else stands.why,
        believed=tuple(_named(finding, v, several) for v in parts.values() for finding in v.believed),
        findings=tuple(_named(finding, v, several) for v in parts.values() for finding in v.findings),
        tables=first.tables if not several else {_scenario_name(v): v.tables for v in parts.values()},
        notes=tuple(dict.fromkeys((*_left_out(stage_dir), *(note for v in parts.values() for note in v.notes)))),
        provenance={
            **{key: value for key, value in first.provenance.items() if key != "logs"},
            "stage": stage,
            "run": stage_dir.resolve().name,
            "runs": [run_dir.name for run_dir in parts],
            "verdicts": {run_dir.name: provenance.sha256(run_dir / "verdict.json") for run_dir in parts},
        },
    )


def _left_out(stage_dir: Path) -> Iterator[str]:
    path = stage_dir / _LEFT_OUT
    for name, why in orjson.loads(path.read_bytes()).items() if path.exists() else ():
        yield f"{name} was left out: {why}"


def _scenario_name(verdict: Verdict) -> str:
    return Path(str(verdict.provenance.get("scenario", "run"))).stem


def _named(finding: Finding, verdict: Verdict, several: bool) -> Finding:
    return replace(finding, gate=f"{_scenario_name(verdict)}.{finding.gate}") if several else finding
