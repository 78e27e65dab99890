"""The canary of one replica as a service of its own, for where it lives beside its engine: in the engine's pod.

  GET /canary   is the replica well? 200, 503 when it is dead, 504 when it is late
  GET /health   200: this service runs

Kubelet and the gateway ask the same canary, so they cannot disagree about a replica; /health of the engine would say
200 for a frozen one.
"""

import argparse
import asyncio
import signal
from collections.abc import Coroutine

from reference_stack.gateway.canary import Canary, Health
from reference_stack.gateway.server import Answer, Exchange, Headers


class CanaryService:
    """Answers for one canary."""

    def __init__(self, canary: Canary) -> None:
        self._canary = canary

    def handle(self, path: str, headers: Headers, body: bytes) -> Answer | Coroutine[None, None, Answer]:
        """The answer to one request."""
        if path == "/canary":
            return self._ask()
        return Answer(200) if path == "/health" else Answer(404)

    async def _ask(self) -> Answer:
        health = await self._canary.health()
        return Answer(200 if health is Health.BUSY else health.value)


async def serve(service: CanaryService, host: str, port: int) -> None:
    """Answer until SIGTERM or SIGINT."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    server = await loop.create_server(lambda: Exchange(service.handle), host, port)
    await stop.wait()
    server.close()


def main() -> None:
    """The door: python -m reference_stack.gateway.canary_service."""
    parser = argparse.ArgumentParser(prog="canary_service", description="Say whether one replica still answers.")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at; a pod's is 0.0.0.0")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--engine", required=True, help="URL of the replica")
    parser.add_argument("--model", required=True, help="the name it serves")
    options = parser.parse_args()
    asyncio.run(serve(CanaryService(Canary(options.engine, options.model)), options.host, options.port))


if __name__ == "__main__":
    main()
