"""Locust's own fast client, used as well as it can be: a greenlet for each arrival of an open loop, and `readline`.

A locustfile, run by `locust -f`; the load comes in BENCH_LOAD (JSON), the records go to claims.csv. Peer of goal 2:
the same arrivals, the same requests, the client that a locust user would take.
"""

import json
import os
import random
import time
from typing import Any

import gevent
from locust import FastHttpUser, constant, task

LOAD: dict[str, Any] = json.loads(os.environ["BENCH_LOAD"])
BODY = json.dumps(
    {
        "model": "sim",
        "messages": [{"role": "user", "content": "hi " * 64}],
        "max_tokens": 32,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
)


class Everyone(FastHttpUser):
    """One locust user that plays all arrivals."""

    wait_time = constant(0)
    concurrency = 10_000
    rows: list[str]

    @task
    def play(self) -> None:
        self.rows = []
        draw, origin, due = random.Random(LOAD["seed"]), time.monotonic() + 0.5, 0.0
        for index in range(LOAD["requests"]):
            due += draw.expovariate(LOAD["rate_per_s"])
            gevent.spawn_later(max(0.0, origin + due - time.monotonic()), self.send, index, origin + due)
        while len(self.rows) < LOAD["requests"]:
            gevent.sleep(0.1)
        with open("claims.csv", "w") as file:
            file.writelines(self.rows)
        self.environment.runner.quit()

    def send(self, index: int, due_s: float) -> None:
        sent_s, first_s = time.monotonic(), float("nan")
        headers = {"content-type": "application/json", "x-request-id": str(index)}
        with self.client.post("/v1/chat/completions", data=BODY, headers=headers, stream=True) as response:
            while line := response._response.readline(b"\n"):  # iter_lines reads blocks of 1 KiB and loses the moments
                if line.startswith(b"data: {") and first_s != first_s:
                    first_s = time.monotonic()
        ended_s = time.monotonic()
        self.rows.append(f"{index},{due_s!r},{sent_s!r},{first_s - sent_s!r},{ended_s - sent_s!r}\n")
