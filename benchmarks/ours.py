"""Our side: the product's own command, `harness run`, against the timed server. No part of it is called directly.

What it cost is what a user pays: the conductor, the workers and the judge are all in the tree that is measured.
"""

from pathlib import Path

import numpy as np
import yaml

from benchmarks.peers import ROOT, TOKENIZER
from benchmarks.trial import CLAIM, Load
from harness import timeline
from harness.model import EXIT_CODE, Judgement

FLAGGED = EXIT_CODE[Judgement.INVALID]  # the harness says that it was not able to measure


class Ours:
    """`harness run` with so many workers."""

    def __init__(self, workers: int = 1) -> None:
        self.workers = workers
        self.name = "harness" if workers == 1 else f"harness, {workers} workers"

    def command(self, url: str, load: Load, folder: Path) -> list[str]:
        (folder / "scenario.yaml").write_text(scenario(load))
        (folder / "target.yaml").write_text(target(url))
        return [
            *(str(ROOT / ".venv" / "bin" / "harness"), "run", "scenario.yaml", "--target", "target.yaml"),
            *("--workers", str(self.workers), "--seed", str(load.seed)),
        ]

    def environment(self) -> dict[str, str]:
        return {}

    def claims(self, folder: Path) -> np.ndarray:
        seen = run_of(folder)
        rows = seen.observations[seen.seen]
        table = np.zeros(len(rows), dtype=CLAIM)
        table["id"] = rows["index"].astype("U")
        table["due_s"], table["sent_s"] = rows["due_s"], rows["sent_s"]
        table["ttft_s"] = rows["first_token_s"] - rows["sent_s"]
        table["e2e_s"] = rows["ended_s"] - rows["sent_s"]
        return table


def run_of(folder: Path) -> timeline.Timeline:
    """The run that the command left in a trial's folder."""
    return timeline.read((folder / "runs" / "latest").resolve(strict=True))


def scenario(load: Load) -> str:
    """Poisson arrivals of short prompts, with a gate just above the server's own time: what the harness may be late by
    follows from its gates, and here a few milliseconds spoil a run."""
    gate = {"of": "ttft" if load.streamed else "e2e", "below": "52ms"}
    return yaml.safe_dump(
        {
            "claim": "The load generator keeps its own schedule.",
            "traffic": {
                "arrivals": {"poisson": {"rate": f"{load.rate_per_s:g}/s"}},
                "for": f"{load.seconds:g}s",
                "prompts": {
                    "mix": {"short": {"share": "100%", "tokens": "32..64"}},
                    "answer_tokens": {"mean": 32, "at_most": 32},
                    "streamed": "100%" if load.streamed else "0%",
                },
            },
            "gates": [{"p95_latency": gate}],
        },
        sort_keys=False,
    )


def target(url: str) -> str:
    return yaml.safe_dump(
        {
            "kind": "url",
            "url": url,
            "model": "sim",
            "tokenizer": str(TOKENIZER),
            "gpu": "none",
            "load_factor": 1.0,
            "prompt_limit": 16384,
        },
        sort_keys=False,
    )
