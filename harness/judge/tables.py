"""What a reader wants beside the gates: latency by class and from both clocks, outcomes, refusals, token counts.

Tables decide nothing. Failures are in the quantiles here as in the gates: at infinity, which JSON writes as null.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from harness.judge import belief, comparison, measures, statistics
from harness.model import Outcome, Tag, Window
from harness.timeline import Timeline

QUANTILES = {"p50_s": 0.5, "p95_s": 0.95, "p99_s": 0.99}


def tables(timeline: Timeline, windows: Sequence[Window]) -> dict[str, Any]:
    """All tables over the requests due in the judged windows.

    by_class    class -> n, failed, and quantiles of e2e, service and ttft
    outcomes    class -> outcome -> n
    rejections  kind -> expect, n, right, open, wrong: {how it ended: n}
    latency     e2e (from due), service (from sent), ttft and send_lag of all good requests
    tokens      prompt tokens as planned and as the server counted them
    facts       requests, seconds and shares of the judged windows; connections opened and requests sent again
    and of a replay, `comparison.tables`: replay, answers, changes, against_capture, over_time
    """
    mask = np.logical_or.reduce([timeline.within(window) for window in windows])
    good = mask & timeline.good & ~measures.hung_up_as_planned(timeline)
    return {
        "by_class": {name: _latency_row(timeline, rows) for name, rows in _classes(timeline, good)},
        "outcomes": {name: _outcomes(timeline, rows) for name, rows in _classes(timeline, mask)},
        "rejections": measures.rejections(timeline, mask),
        "latency": {**_latency_row(timeline, good), "send_lag": _quantiles(belief.send_lag_s(timeline, mask))},
        "tokens": _tokens(timeline, good),
        "facts": _facts(timeline, windows, mask),
        **(comparison.tables(timeline, mask, windows) if timeline.replay else {}),
    }


def _classes(timeline: Timeline, mask: np.ndarray) -> list[tuple[str, np.ndarray]]:
    return [
        (name, rows)
        for code, name in enumerate(timeline.classes)
        if (rows := mask & (timeline.class_code == code)).any()
    ]


def _latency_row(timeline: Timeline, rows: np.ndarray) -> dict[str, Any]:
    failed = timeline.observations["outcome"][rows] != Outcome.OK
    return {
        "n": int(rows.sum()),
        "failed": int(failed.sum()),
        "e2e": _quantiles(measures.failures_last(timeline, rows, "e2e")),
        "service": _quantiles(measures.failures_last(timeline, rows, "service")),
        "ttft": _quantiles(measures.failures_last(timeline, rows & timeline.streamed, "ttft")),
    }


def _quantiles(values_s: np.ndarray) -> dict[str, float]:
    return {name: statistics.nearest_rank(values_s, quantile) for name, quantile in QUANTILES.items()}


def _outcomes(timeline: Timeline, rows: np.ndarray) -> dict[str, int]:
    found = np.bincount(timeline.observations["outcome"][rows], minlength=len(Outcome))
    return {outcome.name.lower(): int(found[outcome]) for outcome in Outcome if found[outcome]}


def _tokens(timeline: Timeline, good: np.ndarray) -> dict[str, Any]:
    """The server counts its chat template too, so its figure is a little higher; far higher is another tokenizer."""
    counted = good & (timeline.observations["tokens_in"] > 0) & (timeline.prompt_tokens > 0)
    planned = timeline.prompt_tokens[counted].astype(np.int64)
    reported = timeline.observations["tokens_in"][counted].astype(np.int64)
    return {
        "n": int(counted.sum()),
        "planned_total": int(planned.sum()),
        "reported_total": int(reported.sum()),
        "difference_median": statistics.nearest_rank(reported - planned, 0.5),
        "tokens_out_total": int(timeline.observations["tokens_out"][good].sum()),
    }


def _facts(timeline: Timeline, windows: Sequence[Window], mask: np.ndarray) -> dict[str, Any]:
    n, good = int(mask.sum()), int((mask & timeline.good).sum())
    lasts_s = sum(window.end_s - window.start_s for window in windows)
    return {
        "windows": {window.name: [window.start_s, window.end_s] for window in windows},
        "planned": len(timeline.due_s),
        "due": n,
        "good": good,
        "bad": n - good,
        "bad_share": (n - good) / n if n else None,
        "rate_per_s": n / lasts_s if lasts_s else None,
        "new_connections": measures.tagged(timeline, mask, Tag.NEW_CONNECTION),
        "resent": measures.tagged(timeline, mask, Tag.RESENT),
    }
