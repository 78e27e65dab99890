"""The simulated vLLM: its HTTP surface over a replica that computes nothing but time.

    python -m reference_stack.engine.simulated --port P --model tiny --tokenizer .cache/tiny --profile h100-8b
        --device .stack/gpu/GPU-0.json

It is only as good as `tests/contract`, which real vLLM passes too. It starts in about a second and downloads nothing.
It refuses to pass for the real one: /version and every answer's system_fingerprint say that it is simulated.
"""

import argparse
import asyncio
import json
import logging
import os
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from reference_stack.engine import generation
from reference_stack.engine.answers import DONE, VERSION, Answer, Envelope, answer
from reference_stack.engine.generation import Generation, RequestError, UnreadableBodyError
from reference_stack.engine.replica import Replica
from reference_stack.engine.tokens import Tokens
from reference_stack.gpu.device import Device, OutOfDeviceMemory
from reference_stack.profiles import profile
from reference_stack.profiles.document import ProfileError

ASIDE_CHARS = 4096  # a longer text is tokenized on a thread, so that no other request's tokens wait for it

log = logging.getLogger(__name__)


class Server:
    """The routes of one replica."""

    def __init__(self, model: str, tokens: Tokens, replica: Replica, seed: int) -> None:
        """Serve `replica` as `model`; the seed decides the answers."""
        self._model = model
        self._tokens = tokens
        self._replica = replica
        self._seed = seed
        self._words = tokens.words
        self._created = int(time.time())

    def app(self) -> web.Application:
        """The application; requests of any size are read, as vLLM reads them."""
        app = web.Application(client_max_size=0, middlewares=[errors])
        app.add_routes(
            [
                web.post("/v1/completions", lambda request: self.generate(request, chat=False)),
                web.post("/v1/chat/completions", lambda request: self.generate(request, chat=True)),
                web.post("/tokenize", self.tokenize),
                web.get("/v1/models", self.models, allow_head=False),
                web.get("/health", self.health, allow_head=False),
                web.get("/version", self.version, allow_head=False),
                web.get("/metrics", self.metrics, allow_head=False),
            ]
        )
        return app

    async def generate(self, http: web.Request, chat: bool) -> web.StreamResponse:
        """Complete a prompt or a chat, streamed or whole."""
        document = generation.read_json(await http.read(), http.headers.get("Content-Type", ""))
        request = generation.read(document, chat, self._model, self._tokens)
        prompt = await self._encode(request)
        max_model_len = self._replica.profile.vllm.max_model_len
        limit = generation.output_limit(request, prompt, self._tokens.vocabulary_size, max_model_len)
        answered = answer(self._seed, prompt, self._words, limit, request.ignore_eos)
        kind = "chatcmpl" if chat else "cmpl"
        envelope = Envelope(f"{kind}-{uuid.uuid4().hex}", int(time.time()), self._model, chat, len(prompt))
        if request.stream:
            return await self._stream(http, request, envelope, answered, limit)
        with self._replica.admitted(len(prompt), answered, limit) as tokens:
            for _ in answered.pieces:
                await tokens.acquire()
        return json_response(envelope.whole(answered))

    async def _stream(
        self, http: web.Request, request: Generation, envelope: Envelope, answered: Answer, limit: int
    ) -> web.StreamResponse:
        """Send the answer token by token; a client that goes away ends the request."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        response.enable_chunked_encoding()
        last = len(answered.pieces)
        with self._replica.admitted(envelope.prompt_tokens, answered, limit) as tokens:
            await response.prepare(http)
            frame = envelope.opening(request.continuous_usage)
            for count, piece in enumerate(answered.pieces, start=1):
                await tokens.acquire()
                finish_reason = answered.finish_reason if count == last else None
                usage = count if request.continuous_usage else None
                fingerprint = count == last and not request.include_usage
                await response.write(frame + envelope.token(piece, finish_reason, usage, fingerprint))
                frame = b""
        if request.include_usage:
            await response.write(envelope.closing(last))
        await response.write(DONE)
        await response.write_eof()
        return response

    async def _encode(self, request: Generation) -> list[int]:
        """The token ids of the prompt."""
        if not isinstance(request.prompt, str):
            return request.prompt
        generation.check_text(request.prompt, self._tokens, self._replica.profile.vllm.max_model_len)
        return await self._count(request.prompt, request.special_tokens)

    async def _count(self, text: str, special_tokens: bool) -> list[int]:
        """The token ids of a text, found without holding up the tokens of others."""
        if len(text) <= ASIDE_CHARS:
            return self._tokens.encode(text, special_tokens)
        return await asyncio.to_thread(self._tokens.encode, text, special_tokens)

    async def tokenize(self, http: web.Request) -> web.Response:
        """Count the tokens of a prompt or a chat, as a completion of it would."""
        document = generation.read_json(await http.read(), http.headers.get("Content-Type", ""))
        text, special = generation.read_text(document, self._model, self._tokens)
        ids = await self._count(text, special)
        max_model_len = self._replica.profile.vllm.max_model_len
        return json_response({"count": len(ids), "max_model_len": max_model_len, "tokens": ids, "token_strs": None})

    async def models(self, _: web.Request) -> web.Response:
        """The one model that is served."""
        permission = {
            "id": f"modelperm-{uuid.uuid4().hex}",
            "object": "model_permission",
            "created": self._created,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        card = {
            "id": self._model,
            "object": "model",
            "created": self._created,
            "owned_by": "vllm",
            "root": self._model,
            "parent": None,
            "max_model_len": self._replica.profile.vllm.max_model_len,
            "permission": [permission],
        }
        return json_response({"object": "list", "data": [card]})

    async def health(self, _: web.Request) -> web.Response:
        """200 and nothing else, whatever the engine does behind it: as vLLM's."""
        return web.Response()

    async def version(self, _: web.Request) -> web.Response:
        """The version of vLLM that is simulated, and that it is."""
        return json_response({"version": f"{VERSION}+simulated"})

    async def metrics(self, _: web.Request) -> web.Response:
        """The Prometheus page."""
        return web.Response(
            body=self._replica.metrics.page(),
            headers={"Content-Type": "text/plain; version=1.0.0; charset=utf-8"},
        )


def json_response(document: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """A JSON body without blanks, as vLLM's."""
    body = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refusals as vLLM words them: its own error body, or FastAPI's for a path or a method that is not there."""
    try:
        return await handler(request)
    except RequestError as error:
        return json_response(error.body, status=error.status)
    except UnicodeEncodeError as error:
        return json_response(RequestError(f"The prompt is not a text: {error.reason}.").body, status=400)
    except UnreadableBodyError as error:
        return json_response({"detail": str(error)}, status=400)
    except web.HTTPException as error:
        allow = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
        return json_response({"detail": error.reason}, status=error.status, headers=allow)


async def serve(server: Server, replica: Replica, port: int) -> None:
    """Answer requests until the process ends; a fault of the engine ends it."""
    runner = web.AppRunner(server.app(), access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, backlog=1024).start()
    log.info("serving on http://127.0.0.1:%d", port)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(replica.run())
        tasks.create_task(replica.report())


async def start(arguments: argparse.Namespace) -> None:
    """Bring up the replica and serve it."""
    chosen = profile.load(arguments.profile, arguments.max_model_len)
    tokens = Tokens.read(arguments.tokenizer)
    device = Device(arguments.device)
    device.create(chosen.card.name, chosen.card.memory_bytes)
    replica = Replica(arguments.model, chosen, device)
    log.info("%s on a simulated %s, %d KV blocks", chosen.checkpoint, chosen.card.name, chosen.kv_blocks)
    server = Server(arguments.model, tokens, replica, arguments.seed)
    await serve(server, replica, arguments.port)


def main() -> None:
    """Parse the command line and serve in the foreground; exit 2 when asked for the impossible."""
    parser = argparse.ArgumentParser(description="Serve a simulated vLLM.")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", required=True, help="the name it is served under")
    parser.add_argument("--tokenizer", type=Path, required=True, help="directory with tokenizer.json")
    parser.add_argument("--profile", required=True, help="a file of reference_stack/profiles, without .yaml")
    parser.add_argument("--device", type=Path, required=True, help="file of the simulated GPU; made when missing")
    parser.add_argument("--max-model-len", type=int, help="instead of the profile's")
    parser.add_argument("--seed", type=int, default=0, help="of the answers")
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a count is one prompt: no threads of its own
    try:
        asyncio.run(start(parser.parse_args()))
    except (ProfileError, OutOfDeviceMemory, OSError) as error:
        log.critical("%s", error)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
