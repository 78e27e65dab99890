"""Traces of token counts and access logs give requests with moments and lengths, or name the line that is wrong."""

import gzip
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.model import UsageError
from harness.traffic.recording import Recorded
from harness.traffic.traces import azure, burstgpt, mooncake, nginx

MOONCAKE = """{"timestamp": 0, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 48]}
{"timestamp": 3052, "input_length": 600, "output_length": 1, "hash_ids": [46, 49], "more": true}

{"timestamp": 3052.5, "input_length": 7, "output_length": 3}
"""
BURSTGPT = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
5,a,1.5,ChatGPT,472,18,490,Conversation log
9,b,,GPT-4,10,0,10,API log
45,a,2,ChatGPT,1087,230,1317,Conversation log
"""
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2024-05-10 00:00:00.009930+00:00,2162,5
"""
NGINX = r"""10.0.0.7 - jane [10/Oct/2026:13:55:36 +0200] "POST /v1/chat/completions?key=s HTTP/1.1" 200 26 "-" "c" 1.250
10.0.0.8 - - [10/Oct/2026:13:55:37 +0200] "GET /v1/models HTTP/2.0" 422 12 "-" "a \x22b\x22 c"
10.0.0.9 - - [10/Oct/2026:13:55:38 +0200] "\x16\x03\x01" 400 0 "-" "-" 0.000
"""
Read = Callable[[Path], Any]


def read(reader: Read, tmp_path: Path, text: str) -> list[Recorded]:
    (tmp_path / "trace").write_text(text)
    found = list(reader(tmp_path / "trace"))
    assert not any(lost for _, lost in found)
    return [one for one, _ in found]


def test_mooncake_keeps_lengths_and_blocks(tmp_path: Path) -> None:
    """Milliseconds become seconds; what else a line holds is not asked for."""
    ones = read(mooncake.read, tmp_path, MOONCAKE)
    assert [(one.at_s, one.prompt_tokens, one.max_tokens) for one in ones] == [
        (0, 1100, 52),
        (3.052, 600, 1),
        (3.0525, 7, 3),
    ]
    assert [one.blocks for one in ones] == [(46, 47, 48), (46, 49), ()]
    assert {(one.path, one.raw, one.stream, one.method) for one in ones} == {
        ("/v1/chat/completions", b"", True, "POST")
    }
    assert len({one.connection for one in ones}) == 3


def test_burstgpt_keeps_who_waited_for_what(tmp_path: Path) -> None:
    """In its later form; the earlier has neither sessions nor how long an answer took."""
    ones = read(burstgpt.read, tmp_path, BURSTGPT)
    assert [(one.at_s, one.prompt_tokens, one.max_tokens) for one in ones] == [
        (5, 472, 18),
        (9, 10, 0),
        (45, 1087, 230),
    ]
    assert [(one.session, one.connection, one.turn) for one in ones] == [("a", 0, 0), ("b", 1, 0), ("a", 0, 1)]
    assert (ones[0].answer.ended_s, math.isnan(ones[1].answer.ended_s)) == (1.5, True)
    early = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,API log\n"
    (one,) = read(burstgpt.read, tmp_path, early)
    assert (one.at_s, one.session, one.answer.tokens_out) == (5, "", 18)


def test_azure_has_dates(tmp_path: Path) -> None:
    """With seven digits of a second, with a zone or without."""
    first, second, later = read(azure.read, tmp_path, AZURE)
    assert second.at_s - first.at_s == pytest.approx(4.314579, abs=1e-6)
    assert later.at_s == pytest.approx(1715299200.00993, abs=1e-6)
    assert (later.prompt_tokens, later.answer.tokens_out) == (2162, 5)


def test_nginx_has_moments_paths_and_statuses(tmp_path: Path) -> None:
    """A line with its time begins that much sooner; what is no request is lost; a query is not kept."""
    (tmp_path / "access.log.gz").write_bytes(gzip.compress(NGINX.encode()))
    (timed, _), (plain, _), (odd, lost) = nginx.read(tmp_path / "access.log.gz")
    assert (timed.method, timed.path, timed.answer.status, timed.client) == (
        "POST",
        "/v1/chat/completions",
        200,
        "10.0.0.7",
    )
    assert (timed.answer.ended_s, plain.at_s - timed.at_s) == (1.25, 2.25)
    assert (plain.method, plain.path, plain.answer.status) == ("GET", "/v1/models", 422)
    assert (odd.path, lost) == ("", "no request line in the log")


@pytest.mark.parametrize(
    ("reader", "text", "said"),
    [
        (mooncake.read, MOONCAKE + "{", "trace:5: no JSON"),
        (mooncake.read, "[1]\n", "trace:1: no object"),
        (mooncake.read, '{"timestamp": 0, "output_length": 1}', "trace:1: input_length is no number: None"),
        (mooncake.read, '{"timestamp": "x", "input_length": 1, "output_length": 1}', "trace:1: timestamp is no number"),
        (
            mooncake.read,
            '{"timestamp": 0, "input_length": -1, "output_length": 1}',
            "trace:1: input_length is no count",
        ),
        (mooncake.read, MOONCAKE.replace("[46, 49]", '["a"]'), "trace:2: hash_ids is no list"),
        (mooncake.read, MOONCAKE.replace("[46, 49]", "[1, 2, 3, 4]"), "trace:2: 4 hash_ids for 600 tokens"),
        (burstgpt.read, "", "trace:1: the first line names no column Timestamp, Request"),
        (burstgpt.read, BURSTGPT + "1,2\n", "trace:5: 2 columns, not 8"),
        (burstgpt.read, BURSTGPT.replace("1087", "1.5"), "trace:4: Request tokens is no count"),
        (burstgpt.read, BURSTGPT.replace("472", "nan"), "trace:2: Request tokens is no number"),
        (azure.read, AZURE.replace("18:15:50", "28:15:50"), "trace:3: .* is no date"),
        (azure.read, AZURE.replace("ContextTokens", "Context"), "trace:1: .* no column ContextTokens"),
        (nginx.read, NGINX + "hello\n", "trace:4: no line of an access log"),
        (nginx.read, NGINX.replace("Oct", "Okt"), "trace:1: .* is no time"),
    ],
)
def test_a_line_that_makes_no_sense_is_named(tmp_path: Path, reader: Read, text: str, said: str) -> None:
    """With its file and what was found there."""
    with pytest.raises(UsageError, match=said):
        (tmp_path / "trace").write_text(text)
        list(reader(tmp_path / "trace"))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """Missing, or not packed though they say so."""
    (tmp_path / "trace.gz").write_text(MOONCAKE)
    for name in ("trace.gz", "missing"):
        with pytest.raises(UsageError, match=f"{name} cannot be read"):
            list(mooncake.read(tmp_path / name))
