"""A run directory as evidence: laid out before a run, judged from its raw files after it, and verified again later.

`verdict.json` says INVALID "not finished" from the first moment, so that whatever dies leaves no verdict of an earlier
run and no silence. Judging reads files only: the same files give the same bytes.
"""

import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from harness import provenance, scenario, timeline
from harness.judge import verdict as verdicts
from harness.model import EXIT_CODE, SEVERITY, Finding, Judgement, UsageError, Verdict
from harness.report import junit, markdown
from harness.targets import base


def create(runs: Path, name: str) -> Path:
    """A new directory `runs/<utc>-<name>` whose verdict is INVALID until it is judged; `runs/latest` points to it."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    taken = 0
    while True:
        run_dir = runs / (f"{stamp}-{name}" + (f"-{taken + 1}" if taken else ""))
        try:
            run_dir.mkdir(parents=True)
            break
        except FileExistsError:
            taken += 1
        except OSError as trouble:
            raise UsageError(f"cannot make the run directory {run_dir}: {trouble.strerror}") from trouble
    write_verdict(run_dir, unfinished(run_dir.name))
    point(runs / "latest", run_dir)
    return run_dir


def point(link: Path, run_dir: Path) -> None:
    """Make `link` a symbolic link to a sibling run directory, in one step."""
    beside = link.with_name(f".{link.name}.{os.getpid()}")
    beside.unlink(missing_ok=True)
    beside.symlink_to(run_dir.name)
    beside.replace(link)


def unfinished(run: str) -> Verdict:
    return Verdict(
        verdict=Judgement.INVALID,
        exit_code=EXIT_CODE[Judgement.INVALID],
        why="not finished: the run has not been judged",
        provenance={"run": run},
    )


def write_verdict(run_dir: Path, verdict: Verdict) -> None:
    timeline.write_beside(run_dir / "verdict.json", verdicts.to_json(verdict))


def judge(run_dir: Path) -> Verdict:
    """The verdict of a finished or a broken run, from its raw files alone.

    Raises UsageError when the directory is no run at all.
    """
    if not (run_dir / "run.json").exists():
        raise UsageError(f"{run_dir} holds no run.json: it is not a run directory, or the run died before it began")
    try:
        seen = timeline.read(run_dir)
        judged = scenario.load(run_dir / "scenario.yaml")
        target = base.load(str(run_dir / "target.yaml"))
    except (FileNotFoundError, ValueError) as trouble:
        return Verdict(
            verdict=Judgement.INVALID,
            exit_code=EXIT_CODE[Judgement.INVALID],
            why=f"the run directory cannot be judged: {trouble}",
            provenance=_provenance(run_dir, timeline.read_run_json(run_dir)),
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
    origin = ("commit", "dirty", "command", "versions", "machine", "gpu_driver", "started")
    return {
        **{key: run[key] for key in (*kept, *origin) if key in run},
        "logs": {path.name: provenance.sha256(path) for path in timeline.log_files(run_dir)},
    }


def settle(run_dir: Path) -> Verdict:
    """Judge a run and write everything that tells it: verdict.json, report.md, junit.xml."""
    verdict = judge(run_dir)
    tell(run_dir, verdict)
    return verdict


def tell(run_dir: Path, verdict: Verdict) -> None:
    write_verdict(run_dir, verdict)
    timeline.write_beside(run_dir / "report.md", markdown.render(verdict).encode())
    timeline.write_beside(run_dir / "junit.xml", junit.render(verdict).encode())


def verify(run_dir: Path) -> list[str]:
    """What differs between the verdict on disk and the raw files it rests on; nothing when all is as judged."""
    path = run_dir / "verdict.json"
    if not path.exists():
        raise UsageError(f"{run_dir} holds no verdict.json: judge it first with `harness judge {run_dir}`")
    told = path.read_bytes()
    try:
        hashes: dict[str, str] = orjson.loads(told)["provenance"]["logs"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return ["verdict.json names no logs: it was never judged, or is damaged"]
    present = {p.name: p for p in timeline.log_files(run_dir)}
    differences = [f"{name} is missing" for name in hashes if name not in present]
    differences += [f"{name} was added after the verdict" for name in present if name not in hashes]
    differences += [
        f"{name} differs from what was judged (sha256)"
        for name, path in present.items()
        if name in hashes and provenance.sha256(path) != hashes[name]
    ]
    if not differences and verdicts.to_json(judge(run_dir)) != told:
        differences.append("verdict.json is not what judging these files gives")
    return differences


def merge(runs: Path, stage: int, parts: Sequence[tuple[Path, Verdict]]) -> tuple[Path, Verdict]:
    """One verdict over all runs of a stage, in a directory of its own; `runs/latest-stageN` points to it."""
    run_dir = create(runs, f"stage{stage}")
    worst = min((verdict for _, verdict in parts), key=lambda v: SEVERITY.index(v.verdict))
    several = len(parts) > 1
    merged = Verdict(
        verdict=worst.verdict,
        exit_code=worst.exit_code,
        why="; ".join(f"{_scenario_name(verdict)}: {verdict.why}" for _, verdict in parts if verdict.why == worst.why),
        believed=tuple(_named(f, v, several) for _, v in parts for f in v.believed),
        findings=tuple(_named(f, v, several) for _, v in parts for f in v.findings),
        tables=parts[0][1].tables if not several else {_scenario_name(v): v.tables for _, v in parts},
        notes=tuple(note for _, v in parts for note in v.notes),
        provenance={
            **{k: v for k, v in parts[0][1].provenance.items() if k != "logs"},
            "stage": stage,
            "run": run_dir.name,
            "runs": [part.name for part, _ in parts],
            "verdicts": {part.name: provenance.sha256(part / "verdict.json") for part, _ in parts},
        },
    )
    for part, _ in parts:
        (run_dir / part.name).symlink_to(Path("..") / part.name)
    tell(run_dir, merged)
    point(runs / f"latest-stage{stage}", run_dir)
    return run_dir, merged


def _scenario_name(verdict: Verdict) -> str:
    return Path(str(verdict.provenance.get("scenario", "run"))).stem


def _named(finding: Finding, verdict: Verdict, several: bool) -> Finding:
    if not several:
        return finding
    values = {name: getattr(finding, name) for name in Finding.__slots__}
    return Finding(**{**values, "gate": f"{_scenario_name(verdict)}.{finding.gate}"})
