"""Users to requests to GPUs to money, and the documents' own table put right (CAP-1)."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.capacity import order, plan
from harness.capacity.order import Order

# The documents: a million users, 24 requests each, 42/s a card, $0.95 an hour, two gateways at $0.35 an hour.
DOCUMENTS = {
    "users": 1_000_000,
    "requests_per_user": 24,
    "rate_per_gpu": "42/s",
    "price": "0.95/h",
    "gateways": {"count": 2, "price": "0.35/h"},
}


def documents(*what_if: str, **changed: Any) -> list[plan.Step]:
    asked = order.read(None, {**DOCUMENTS, **changed}, what_if)
    assert asked.rate_per_gpu_per_s is not None
    return plan.steps(asked, asked.rate_per_gpu_per_s)


def test_a_card_costs_684_a_month_and_two_gateways_504() -> None:
    """$0.95 x 720 h is $684, not $720, and 2 x $0.35 x 720 h is $504, not $1,200."""
    assert plan.monthly(1, 0.95) == pytest.approx(684)
    assert plan.monthly(2, 0.35) == pytest.approx(504)


def test_24_million_requests_a_day_need_seven_cards() -> None:
    """24 M / (42 x 86,400) is 6.6, so 7 cards and with 30 % spare 9; not the 33.2 that the documents give."""
    (even,) = documents()
    assert even.mean_per_s == pytest.approx(277.8, abs=0.05)
    assert even.mean_per_s / 42 == pytest.approx(6.61, abs=0.005)
    assert even.gpus == 7
    assert even.money == pytest.approx(7 * 684 + 504)
    (spare,) = documents(redundancy="30%")
    assert spare.gpus == 9


def test_34_cards_are_those_of_a_peak_that_the_documents_do_not_state() -> None:
    """With five times the mean it is 33.1, so 34 cards; that is 3 % spare, and 30 % would be 43."""
    (peak,) = documents(peak="5x")
    assert peak.peak_per_s / 42 == pytest.approx(33.07, abs=0.005)
    assert peak.gpus == 34
    assert peak.gpus / (peak.peak_per_s / 42) - 1 == pytest.approx(0.03, abs=0.005)
    assert documents(peak="5x", redundancy="30%")[0].gpus == 43
    assert peak.money == pytest.approx(23_760)
    assert peak.per_request == pytest.approx(0.000033, rel=0.01)


def test_quantised_merged_and_routed_in_turn() -> None:
    """78/s: 34 cards' worth are 19, not 18, and at the stated peak 18 of 18; merging then leaves 13 and saves five."""
    assert plan.gpus(34 * 42, 78) == 19
    as_it_is, quantised, merged = documents("quantise=78/s", "merge=70%", peak="5x")
    assert [as_it_is.gpus, quantised.gpus, merged.gpus] == [34, 18, 13]
    assert plan.gpus(18 * 78 * 0.7, 78) == 13
    assert merged.requests_per_day == pytest.approx(16_800_000)
    assert quantised.saved == pytest.approx(1 - (18 * 684 + 504) / 23_760)


def test_the_saving_is_72_percent_and_a_request_costs_more_when_there_are_fewer() -> None:
    """From $25,680 to $7,080 is 72.4 %, not 62 %; over 16.8 M requests a day that is $0.000014, not $0.00001."""
    assert plan.saved(25_680, 7_080) == pytest.approx(0.724, abs=0.0005)
    (fewer,) = documents(users=700_000)
    spent = replace(fewer, gpu_money=7_080.0, gateway_money=0.0)
    assert spent.per_request == pytest.approx(0.000014, rel=0.01)


def test_4500_a_second_take_107_cards() -> None:
    """What the documents' gateway lets through is three times what their cards serve."""
    assert plan.gpus(4500, 42) == 108  # 107.1: the 107 that are told of lack a card
    assert math.floor(4500 / 42) == 107


def test_a_pool_of_1512_connections() -> None:
    """8,400/s for 0.12 s each, and half as many again: 1,512, not 100."""
    assert plan.connections(8400, 0.12) == 1512
    (step,) = documents(users=8400 * 3600, latency="120ms")
    assert step.connections == 1512


def test_routing_gives_each_model_cards_of_its_own() -> None:
    """95 % at 160/s and 5 % at 42/s: six cards and two, each rounded up by itself."""
    _, routed = documents("route=95%@160/s", peak="5x", redundancy="0%")
    assert [(pool.name, pool.share) for pool in routed.pools] == [("main", pytest.approx(0.05)), ("routed", 0.95)]
    assert routed.gpus_by_pool == (2, 9)
    assert routed.gpus_by_pool == (math.ceil(0.05 * 1388.9 / 42), math.ceil(0.95 * 1388.9 / 160))


def test_replicas_are_whole() -> None:
    """Replicas of four cards are bought by four."""
    assert documents(gpus_per_replica=4)[0].gpus == 8
    assert plan.gpus(0, 42, 4) == 0


@given(rate=st.floats(0.01, 1e6), more=st.floats(0, 1e6), each=st.floats(0.01, 1e4), group=st.integers(1, 8))
def test_gpus_serve_the_rate_and_no_replica_is_idle(rate: float, more: float, each: float, group: int) -> None:
    """They are enough, one replica less is not, and more requests never need fewer."""
    found = plan.gpus(rate, each, group)
    assert found % group == 0
    assert found * each >= rate * (1 - 1e-9)
    assert (found - group) * each < rate
    assert plan.gpus(rate + more, each, group) >= found


@given(
    share=st.floats(0.01, 0.99),
    peak=st.floats(1, 20),
    redundancy=st.floats(0, 1),
    faster=st.floats(1, 10),
)
def test_what_ifs_go_the_way_they_should(share: float, peak: float, redundancy: float, faster: float) -> None:
    """Merging and faster cards never cost more, and peaks and redundancy never less."""
    plain = Order(users=10**6, requests_per_user=24, price=1.0, rate_per_gpu_per_s=42.0)
    asked = Order(
        users=10**6,
        requests_per_user=24,
        price=1.0,
        rate_per_gpu_per_s=42.0,
        peak=peak,
        redundancy=redundancy,
        what_if=[order.Merge(to=share), order.Quantise(rate_per_gpu_per_s=42 * faster)],
    )
    first, merged, quantised = plan.steps(asked, 42.0)
    assert plan.steps(plain, 42.0)[0].gpus <= first.gpus
    assert quantised.gpus <= merged.gpus <= first.gpus
    assert 0 <= merged.saved <= quantised.saved < 1


def test_every_figure_is_told() -> None:
    """The table has a line for each step, and the JSON the same figures unrounded."""
    found = documents("merge=70%", peak="5x", latency="120ms")
    lines = plan.table(found)
    assert lines[1].split()[:3] == ["as", "it", "is"]
    assert "23,256" in lines[1]
    assert "504" in lines[1]
    assert lines[2].endswith(f"{found[1].saved * 100:.1f} %")
    assert lines[3] == "connections at the peak: 250 -> 175"
    assert [entry["gpus"] for entry in plan.as_json(found)] == [34, 24]
    assert plan.as_json(found)[0]["money_per_request"] == found[0].per_request
