"""The door. Reads the command line, calls one function of a room below, prints what it says, exits with its code.

Exit codes: 0 PASS, 1 FAIL, 2 usage or configuration, 3 INVALID, 4 INCONCLUSIVE, 5 a fault may still be in
force, 130 interrupted.
"""

import os
import shutil
import sys
import traceback
from pathlib import Path
from typing import Annotated, NoReturn

import orjson
import typer
from rich.console import Console

from harness import evidence, record, run, scenario
from harness.capacity import measured
from harness.capacity import order as orders
from harness.capacity import plan as sizing
from harness.chaos import undo
from harness.model import EXIT_CODE, EXIT_INTERRUPTED, EXIT_UNSAFE, EXIT_USAGE, Judgement, UsageError, Verdict
from harness.report import github, markdown, text
from harness.report.panel import LivePanel
from harness.targets import base, local
from harness.traffic import exports, importing
from harness.traffic import plan as plans
from harness.traffic.capture import filters, tcpdump
from harness.traffic.recording import RecordingHeader

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="The release gate for LLM serving."
)
stack = typer.Typer(
    no_args_is_help=True, help="The local stack: engines, gateway, exporter, Prometheus when installed."
)
app.add_typer(stack, name="stack")
capacity = typer.Typer(no_args_is_help=True, help="How many GPUs, and what they cost.")
app.add_typer(capacity, name="capacity")

ScenarioFile = Annotated[Path, typer.Argument(help="A scenario file.", metavar="SCENARIO")]
RunDir = Annotated[Path, typer.Argument(help="A run directory, such as runs/latest.", metavar="RUN")]
TargetOption = Annotated[str, typer.Option("--target", help="`local`, or a target file.")]
EngineOption = Annotated[str | None, typer.Option("--engine", help="What the local stack serves with: sim or vllm.")]
SeedOption = Annotated[
    int | None, typer.Option("--seed", min=0, max=scenario.GREATEST_SEED, help="Instead of the scenario's own seed.")
]
RecordingOut = Annotated[Path, typer.Option("-o", "--out", help="Where the recording goes.")]


@app.command("run")
def run_command(
    files: Annotated[list[Path], typer.Argument(metavar="SCENARIO...", help="Scenario files, run in turn.")],
    target: TargetOption = "local",
    engine: EngineOption = None,
    workers: Annotated[
        int, typer.Option(min=1, max=64, help="Player processes; the plan is the same for any number.")
    ] = 1,
    seed: SeedOption = None,
    stage: Annotated[int, typer.Option(help="Write one verdict over all runs to runs/latest-stageN.")] = 0,
    web_port: Annotated[int | None, typer.Option(help="Show the traffic in locust's web UI on this port.")] = None,
    master_port: Annotated[int | None, typer.Option(help="Let workers on other machines join on this port.")] = None,
    recording: Annotated[Path | None, typer.Option(help="Played instead of the one that the scenario names.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what its experiments would break; run nothing.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Break the last replica, too.")] = False,
) -> None:
    """Plan, run, judge and report."""
    order = run.Order(
        tuple(files),
        target,
        engine,
        workers,
        seed,
        stage=stage,
        web_port=web_port,
        master_port=master_port,
        recording=recording,
        force=force,
    )
    if dry_run:
        print(*run.preview(order), sep="\n")
        return
    run_dir, verdict = run.run(order, LivePanel, _tell_run)
    if stage and len(files) > 1:
        _tell(run_dir, verdict)
    raise typer.Exit(verdict.exit_code)


def _tell_run(run_dir: Path, verdict: Verdict) -> None:
    _tell(run_dir, verdict)
    if os.environ.get("GITHUB_ACTIONS") == "true":
        print(github.annotations(verdict))
        if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
            with open(summary, "a") as file:
                file.write(markdown.render(verdict))


def _tell(run_dir: Path, verdict: Verdict) -> None:
    text.show(verdict, Console())
    print(f"\n{run_dir}/ holds verdict.json, report.md, junit.xml and every record")


@app.command()
def plan(
    file: ScenarioFile,
    out: Annotated[Path, typer.Option("-o", "--out", help="Where the plan goes.")],
    target: TargetOption = "local",
    engine: EngineOption = None,
    seed: SeedOption = None,
) -> None:
    """Write the plan alone: every request of a run, and its hash."""
    loaded, aimed = scenario.load(file), base.load(target, engine)
    seed = loaded.seed if seed is None else seed
    sha256 = plans.write_alone(out, file, loaded.traffic, aimed, seed, loaded.extendable)
    print(f"{sha256}  {out}")


@app.command("import")
def import_command(
    captures: Annotated[list[Path], typer.Argument(metavar="CAPTURE...", help="Capture files; - is standard input.")],
    out: RecordingOut,
    source: Annotated[importing.Source, typer.Option("--from", help="What the files are.")] = importing.Source.CAPTURE,
    port: Annotated[list[int] | None, typer.Option(min=1, max=65535, help="The servers' port.")] = None,
    keep_secrets: Annotated[bool, typer.Option("--keep-secrets", help="Write everything as it was captured.")] = False,
    scrub_field: Annotated[list[str] | None, typer.Option(help="A further JSON member to mask.")] = None,
    session_header: Annotated[list[str] | None, typer.Option(help="It names a request's conversation.")] = None,
    method: Annotated[list[str] | None, typer.Option(help="Keep only these, such as POST.")] = None,
    path: Annotated[list[str] | None, typer.Option(help="Keep only these, such as '/v1/*'.")] = None,
    status: Annotated[list[str] | None, typer.Option(help="Keep only these: 422, 2xx, or none.")] = None,
    size: Annotated[str | None, typer.Option(help="Keep only requests of this size, such as 1kB..10MB.")] = None,
    client: Annotated[list[str] | None, typer.Option(help="Keep only these addresses or networks.")] = None,
    from_time: Annotated[
        str | None, typer.Option(help="Keep what came this long after the first packet or later.")
    ] = None,
    until: Annotated[str | None, typer.Option(help="Keep what came before that, such as 10m.")] = None,
    sample: Annotated[str | None, typer.Option(help="Keep this share of the connections, such as 10%.")] = None,
    synthetic_prompts: Annotated[
        bool, typer.Option("--synthetic-prompts", help="Replace prompts by made-up ones of as many tokens.")
    ] = False,
    tokenizer: Annotated[Path, typer.Option(help="Whose tokens: a model's directory.")] = Path(".cache/tiny"),
) -> None:
    """Turn captured traffic into a recording that can be replayed: scrubbed, and with an account of what was lost."""
    kept = filters.read(method, path, status, size, client, from_time, until, sample)
    made_up = tokenizer if synthetic_prompts else None
    choices = importing.choices(port, keep_secrets, kept, session_header, scrub_field, made_up)
    _tell_import(out, importing.import_from(source, captures, out, choices))


@app.command("export")
def export_command(
    recording: Annotated[Path, typer.Argument(metavar="RECORDING", help="What `harness import` wrote.")],
    to: Annotated[exports.Format, typer.Option("--to", help="The format of another tool.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Where it goes.")],
) -> None:
    """Write a recording in the format of another tool, and say what that cannot hold."""
    done = exports.export(recording, to, out)
    for why, count in done.left_out.items():
        print(f"{count} left out: {why}")
    print(f"{out}: {done.written} requests")


@app.command("record")
def record_command(
    file: ScenarioFile,
    out: RecordingOut,
    target: TargetOption = "local",
    engine: EngineOption = None,
    seed: SeedOption = None,
) -> None:
    """Play a scenario while tcpdump listens, and import what it saw: the baseline of a build in good health."""
    _tell_import(out, record.record(run.Order((file,), target, engine, seed=seed), out, LivePanel, _tell_run))


def _tell_import(out: Path, header: RecordingHeader) -> None:
    for what, told in importing.told(header):
        print(f"{what:36}{told}")
    print(f"\n{out} can be replayed: `traffic: {{replay: {out}}}` in a scenario")


@app.command()
def capture(
    target: TargetOption = "local",
    engine: EngineOption = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="For how long.")] = 60.0,
    out: Annotated[Path, typer.Option("-o", "--out", help="Where the packets go.")] = Path("capture.pcap"),
    now: Annotated[bool, typer.Option("--run", help="Run it here; needs root.")] = False,
) -> None:
    """Print the tcpdump that captures a target's traffic, or run it."""
    url = base.load(target, engine).url
    if not now:
        print(*tcpdump.told(url, out, seconds), sep="\n")
        return
    seen = tcpdump.run(url, out, seconds)
    print(f"{out}: {seen.packets} packets, {seen.dropped} dropped by the kernel")


@app.command()
def judge(run_dir: RunDir) -> None:
    """Judge a run again from its raw files, finished or broken, and write its verdict and reports."""
    verdict = evidence.settle(run_dir)
    _tell(run_dir, verdict)
    raise typer.Exit(verdict.exit_code)


@app.command()
def report(run_dir: RunDir) -> None:
    """Tell the verdict of a run again."""
    verdict = evidence.read_verdict(run_dir)
    evidence.tell(run_dir, verdict)
    _tell(run_dir, verdict)
    raise typer.Exit(verdict.exit_code)


@app.command()
def verify(run_dir: RunDir) -> None:
    """Show that a verdict is what the raw files give: hashes first, then the same judgement to the byte."""
    differences = evidence.verify(run_dir)
    for difference in differences:
        print(f"{run_dir}: {difference}")
    if differences:
        raise typer.Exit(3)
    print(f"{run_dir}: verdict.json is what these files give")


@app.command()
def heal() -> None:
    """Take back every fault that a run left in force when it died."""
    if undo.heal(print):
        raise typer.Exit(EXIT_UNSAFE)


@app.command(
    "profile",
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def profile_command(asked: typer.Context) -> None:
    """Size an engine: check | explain | suggest | args, and --help for each."""
    raise typer.Exit(local.profiles(*asked.args))


@app.command()
def schema() -> None:
    """Print the JSON schema of scenario files, for editors."""
    sys.stdout.buffer.write(
        orjson.dumps(scenario.json_schema(), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    )


@app.command()
def doctor() -> None:
    """Say what this machine has and what a run here would lack."""
    cores = len(os.sched_getaffinity(0))
    checks = (
        (cores >= 2, f"{cores} cores", "one core for the player and one for the stack are the least"),
        (bool(shutil.which("prometheus")), "Prometheus", "GPU memory is then read straight from the exporter"),
        (
            Path(".venv-vllm/bin/python").exists(),
            "real vLLM",
            "`make vllm` installs it; the simulated engine needs nothing",
        ),
        (Path(".cache/tiny/tokenizer.json").exists(), "tiny model and tokenizer", "`make setup` builds them"),
        (not undo.left(), "no fault left in force", "`harness heal` takes it back"),
        (Path("/dev/nvidia0").exists(), "a GPU", "the local stack simulates one and says so in every report"),
    )
    for there, what, otherwise in checks:
        print(f"{'yes' if there else 'no ':3}  {what}" + ("" if there else f": {otherwise}"))


@capacity.command("plan")
def capacity_plan(
    file: Annotated[Path | None, typer.Argument(help="A capacity file; flags take the place of its keys.")] = None,
    run_dir: Annotated[Path | None, typer.Option("--run", help="Measured: a run that passed.")] = None,
    replicas: Annotated[int | None, typer.Option(min=1, help="Of that run, if its target does not list them.")] = None,
    rate_per_gpu: Annotated[str | None, typer.Option(help="Assumed: what a GPU serves, such as 42/s.")] = None,
    users: Annotated[int | None, typer.Option(help="Users of a day.")] = None,
    requests_per_user: Annotated[float | None, typer.Option(help="Requests of one in a day.")] = None,
    peak: Annotated[str | None, typer.Option(help="The busiest time against the mean, such as 5x.")] = None,
    redundancy: Annotated[str | None, typer.Option(help="More GPUs than the peak asks for, such as 30%.")] = None,
    price: Annotated[str | None, typer.Option(help="Of a GPU, such as 0.95/h.")] = None,
    gpus_per_replica: Annotated[int | None, typer.Option(help="GPUs that share a model.")] = None,
    what_if: Annotated[
        list[str] | None, typer.Option(help="In turn: quantise=78/s, merge=70%, route=95%@160/s.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Users to requests to GPUs to money, from what a GPU was measured, or is assumed, to serve."""
    flags = {
        "run": run_dir and str(run_dir),
        "replicas": replicas,
        "rate_per_gpu": rate_per_gpu,
        "users": users,
        "requests_per_user": requests_per_user,
        "peak": peak,
        "redundancy": redundancy,
        "price": price,
        "gpus_per_replica": gpus_per_replica,
    }
    wanted = orders.read(file, flags, what_if or [])
    rate = measured.rate(wanted)
    found = sizing.steps(wanted, rate.per_gpu_per_s)
    if as_json:
        told = {"rate": rate.as_json(), "plans": sizing.as_json(found)}
        print(orjson.dumps(told, option=orjson.OPT_INDENT_2).decode())
    else:
        print(rate.told(), "", *sizing.table(found), sep="\n")


@stack.command()
def up(
    target: TargetOption = "local",
    engine: EngineOption = None,
    full: Annotated[bool, typer.Option("--full", help="With the orchestrator, Redis and Qdrant.")] = False,
) -> None:
    """Start it and wait until it serves."""
    asked = ["--target", str(base.load(target, engine).path), *(["--full"] if full else [])]
    raise typer.Exit(local.door("up", *asked))


@stack.command()
def down() -> None:
    """Stop it, and everything it ever started."""
    raise typer.Exit(local.door("down"))


@stack.command()
def status(as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False) -> None:
    """Each program, its state, pid and URL."""
    raise typer.Exit(local.door("status", *(["--json"] if as_json else [])))


@stack.command()
def logs(program: Annotated[str | None, typer.Argument(help="One program only.")] = None) -> None:
    """What its programs printed."""
    raise typer.Exit(local.door("logs", *([program] if program else [])))


def main() -> None:
    """The command `harness`. What goes wrong in the harness itself is never a verdict: it exits as INVALID does."""
    try:
        app()
    except UsageError as mistake:
        if os.environ.get("GITHUB_ACTIONS") == "true":
            print(github.mistake(mistake.sentence, mistake.where))
        _fail(str(mistake), EXIT_USAGE)
    except KeyboardInterrupt:
        _fail("interrupted before anything was sent", EXIT_INTERRUPTED)
    except OSError as trouble:
        _fail(f"{trouble.filename or 'the run'}: {trouble.strerror or trouble}", EXIT_CODE[Judgement.INVALID])
    except Exception:  # ours: Python would exit 1, and 1 is what FAIL exits with
        traceback.print_exc()
        sys.exit(EXIT_CODE[Judgement.INVALID])


def _fail(sentence: str, code: int) -> NoReturn:
    print(f"harness: {sentence}", file=sys.stderr)
    sys.exit(code)
