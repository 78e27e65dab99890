"""What the collector learns from the answers it writes down."""

import math
from pathlib import Path

import pytest

from harness.drivers.collector import Collector
from harness.drivers.connection import Exchange
from harness.drivers.stream import Reply
from harness.drivers.timer import Slices
from harness.model import Request

FREE = Slices(lambda: None, lambda: math.inf)


def streamed(gap_s: float, tokens: int = 5) -> Exchange:
    """An answer that is over, its tokens so far apart."""
    event = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
    pieces = [(1 + gap_s * number, event) for number in range(tokens)] + [(2.0, b"data: [DONE]\n\n")]
    request = Request(0, 0.0, "chat", "/v1/chat/completions", stream=True)
    return Exchange(request, b"", Reply(sent_s=0.0, status=200, pieces=pieces, ended_s=2.0, broken=None))


def told(collector: Collector, *exchanges: Exchange) -> float:
    for exchange in exchanges:
        collector.take(exchange)
    collector.work(FREE, 10)
    return collector.gap_s


def test_the_fastest_stream_says_how_long_reads_may_wait(tmp_path: Path) -> None:
    """A fast stream counts at once, and is forgotten little by little; what has no gaps says nothing."""
    collector = Collector(tmp_path, 0)
    guess_s = collector.gap_s
    assert told(collector, streamed(0.010, tokens=1)) == guess_s
    assert told(collector, streamed(0.010), streamed(0.001)) == pytest.approx(0.001)
    assert 0.001 < told(collector, streamed(0.010)) < 0.0011
    assert told(collector, *[streamed(0.010) for _ in range(300)]) == pytest.approx(0.010)
    collector.close()
