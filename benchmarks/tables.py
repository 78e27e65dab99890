"""The results as Markdown: every run, the ratios to the peers, the goals. Formats only."""

from collections.abc import Iterable, Sequence
from statistics import median

import numpy as np

from benchmarks.goals import Goal, Results
from benchmarks.trial import Trial, spread


def runs(results: Results) -> str:
    """A row for each run; times in milliseconds as P50 / P99 / max."""
    head = (
        *("section", "client", "asked /s", "got /s", "CPU s / 1000", "CPU us / event", "whole CPU s"),
        *("send lag ms", "TTFT error ms", "E2E error ms", "others' time"),
    )
    rows = [_run(section, trial) for section, trials in results.trials.items() for trial in trials]
    return table(head, rows)


def ratios(results: Results, peers: Iterable[str]) -> str:
    """CPU of each peer over ours at the same rate, in neighbouring runs."""
    rows = []
    for peer in peers:
        found = results.ratios(peer)
        said = ", ".join(f"{ratio:.1f}" for ratio in found)
        rows.append(
            (peer, f"{median(found):.1f} x", said) if found else (peer, results.absent.get(peer, "not run"), "")
        )
    return table(("peer", "CPU of the peer / ours (median)", "rounds"), rows)


def goals(judged: Sequence[Goal]) -> str:
    return table(
        ("#", "goal", "measured", ""), [(str(g.number), g.text, g.measured or "-", f"**{g.outcome}**") for g in judged]
    )


def _run(section: str, trial: Trial) -> tuple[str, ...]:
    return (
        section,
        trial.client + (f" ({trial.folder.name.split('.')[1]})" if trial.disturbed else ""),
        f"{trial.load.rate_per_s:g} {'streamed' if trial.load.streamed else 'plain'}",
        f"{trial.achieved_per_s:.1f}",
        f"{trial.cpu_s_per_1000:.2f}",
        f"{trial.cpu_us_per_event:.0f}",
        f"{trial.whole_cpu_s:.1f}",
        *(_ms(values) for values in (trial.send_lag_s, trial.ttft_error_s, trial.e2e_error_s)),
        f"{100 * trial.usage.noise_s / trial.usage.wall_s:.1f} %",
    )


def _ms(values: np.ndarray) -> str:
    figures = spread(values)
    return " / ".join(f"{1e3 * value:.2f}" for value in figures) if figures else "-"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
