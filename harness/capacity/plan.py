"""Users to requests, requests to GPUs, GPUs to money: pure arithmetic, every step of it shown.

GPUs are whole, replicas are whole, and each model has GPUs of its own: nothing is rounded before it is bought. It
refuses to know what a GPU serves: that is measured, or assumed by whoever asks.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from harness.capacity.order import Merge, Order, Quantise, Route, WhatIf

DAY_S = 86_400
MONTH_DAYS = 30
SPARE_CONNECTIONS = 1.5  # a pool as large as its mean use makes every second request wait


@dataclass(frozen=True)
class Pool:
    """GPUs of one model: its share of the requests, and what one GPU serves of them a second."""

    name: str
    share: float
    rate_per_gpu_per_s: float


@dataclass(frozen=True)
class Step:
    """A plan, after one change to the plan before it. Money is a month's of 30 days, `per_request` one request's."""

    name: str
    requests_per_day: float
    mean_per_s: float
    peak_per_s: float
    pools: tuple[Pool, ...]
    gpus_by_pool: tuple[int, ...]
    gpu_money: float
    gateway_money: float
    saved: float  # share of the first plan's money
    connections: int | None = None

    @property
    def gpus(self) -> int:
        return sum(self.gpus_by_pool)

    @property
    def money(self) -> float:
        return self.gpu_money + self.gateway_money

    @property
    def per_request(self) -> float:
        return self.money / (self.requests_per_day * MONTH_DAYS)


def steps(order: Order, rate_per_gpu_per_s: float) -> list[Step]:
    """The plan as ordered, where a GPU serves this rate, and after each what-if on top of those before it."""
    first = _step(order, "as it is", order.users * order.requests_per_user, (Pool("main", 1.0, rate_per_gpu_per_s),))
    found = [first]
    for what_if in order.what_if:
        name = f"{what_if.name} {what_if.told()}"
        changed = _step(order, name, *_after(what_if, found[-1]))
        found.append(replace(changed, saved=saved(first.money, changed.money)))
    return found


def _step(order: Order, name: str, requests_per_day: float, pools: tuple[Pool, ...]) -> Step:
    mean_per_s = requests_per_day / DAY_S
    peak_per_s = mean_per_s * order.peak
    gpus = tuple(_gpus(order, peak_per_s * pool.share, pool.rate_per_gpu_per_s) for pool in pools)
    gateways = order.gateways
    return Step(
        name=name,
        requests_per_day=requests_per_day,
        mean_per_s=mean_per_s,
        peak_per_s=peak_per_s,
        pools=pools,
        gpus_by_pool=gpus,
        gpu_money=monthly(sum(gpus), order.price),
        gateway_money=monthly(gateways.count, gateways.price) if gateways else 0.0,
        saved=0.0,
        connections=None if order.latency_s is None else connections(peak_per_s, order.latency_s),
    )


def _after(what_if: WhatIf, before: Step) -> tuple[float, tuple[Pool, ...]]:
    """Requests a day and pools when this is done, too. The first pool is the one that things are done to."""
    main, *others = before.pools
    match what_if:
        case Quantise():
            pools = (replace(main, rate_per_gpu_per_s=what_if.rate_per_gpu_per_s), *others)
            return before.requests_per_day, pools
        case Merge():
            return before.requests_per_day * what_if.to, before.pools
        case Route():
            small = Pool("routed", main.share * what_if.share, what_if.rate_per_gpu_per_s)
            return before.requests_per_day, (replace(main, share=main.share * (1 - what_if.share)), *others, small)


def _gpus(order: Order, peak_per_s: float, rate_per_gpu_per_s: float) -> int:
    """GPUs for this rate: with redundancy, and in whole replicas."""
    return gpus(peak_per_s * (1 + order.redundancy), rate_per_gpu_per_s, order.gpus_per_replica)


def gpus(rate_per_s: float, rate_per_gpu_per_s: float, gpus_per_replica: int = 1) -> int:
    """The GPUs that serve a rate: the fewest whole replicas. None at all for no requests."""
    wanted = rate_per_s / (rate_per_gpu_per_s * gpus_per_replica)
    return math.ceil(wanted * (1 - 1e-12)) * gpus_per_replica  # what is whole but for the last bit is whole


def monthly(count: int, price_per_h: float) -> float:
    """What so many of something cost in a month of 30 days."""
    return count * price_per_h * 24 * MONTH_DAYS


def saved(before: float, after: float) -> float:
    """The share of the money that is not spent any more."""
    return (before - after) / before


def connections(rate_per_s: float, latency_s: float) -> int:
    """Connections that hold this rate: what is in flight by Little's law, and half as many again."""
    return math.ceil(rate_per_s * latency_s * SPARE_CONNECTIONS * (1 - 1e-12))


# Telling ----------------------------------------------------------------------------------------------------------


def table(found: list[Step]) -> list[str]:
    """The steps as lines, one below the other as they were made."""
    rows = [("", "requests/day", "mean", "peak", "GPUs", "GPU money", "gateways", "a month", "a request", "saved")]
    for step in found:
        rows.append(
            (
                step.name,
                f"{step.requests_per_day:,.0f}",
                f"{step.mean_per_s:,.1f}/s",
                f"{step.peak_per_s:,.1f}/s",
                " + ".join(map(str, step.gpus_by_pool)),
                f"{step.gpu_money:,.0f}",
                f"{step.gateway_money:,.0f}",
                f"{step.money:,.0f}",
                f"{step.per_request:.7f}",
                f"{step.saved * 100:.1f} %" if step is not found[0] else "",
            )
        )
    return [*_columns(rows), *_connections(found)]


def _columns(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *figures in rows:
        yield "  ".join([name.ljust(widths[0]), *map(str.rjust, figures, widths[1:])]).rstrip()


def _connections(found: list[Step]) -> Iterator[str]:
    if found[0].connections is not None:
        yield f"connections at the peak: {' -> '.join(f'{step.connections:,}' for step in found)}"


def as_json(found: list[Step]) -> list[dict[str, object]]:
    """The steps for machines, with their units in the names."""
    return [
        {
            "name": step.name,
            "requests_per_day": step.requests_per_day,
            "mean_per_s": step.mean_per_s,
            "peak_per_s": step.peak_per_s,
            "pools": [
                {"name": pool.name, "share": pool.share, "rate_per_gpu_per_s": pool.rate_per_gpu_per_s, "gpus": number}
                for pool, number in zip(step.pools, step.gpus_by_pool, strict=True)
            ],
            "gpus": step.gpus,
            "gpu_money_per_month": step.gpu_money,
            "gateway_money_per_month": step.gateway_money,
            "money_per_month": step.money,
            "money_per_request": step.per_request,
            "saved_share": step.saved,
            "connections": step.connections,
        }
        for step in found
    ]
