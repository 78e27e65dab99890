"""The orchestrator as an ASGI application: its routes, and the parts of one worker put together."""

import contextlib
import ctypes
import logging
import os
import resource
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from reference_stack.orchestrator import config as configuration
from reference_stack.orchestrator import keys as key_file
from reference_stack.orchestrator import retrieval
from reference_stack.orchestrator.chat import Chat
from reference_stack.orchestrator.config import CONFIG_VARIABLE, Config
from reference_stack.orchestrator.counts import Counts
from reference_stack.orchestrator.edge import Hangup, RequestId
from reference_stack.orchestrator.refusal import Refusal
from reference_stack.orchestrator.retrieval import Library
from reference_stack.orchestrator.store import Store
from reference_stack.orchestrator.tokens import Tokens
from reference_stack.orchestrator.trace import Tracer
from reference_stack.orchestrator.upstream import Upstream

_PR_SET_PDEATHSIG = 1  # linux/prctl.h

log = logging.getLogger(__name__)


def worker() -> FastAPI:
    """What uvicorn starts in each worker process: the application of the configuration named in the environment.

    The worker dies with its parent, whatever that dies of, and may have so much memory and no more (INC-13).
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    config = configuration.read(Path(os.environ[CONFIG_VARIABLE]))
    limit_bytes = config.worker_memory_mib * 1024 * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
    return application(config)


def application(config: Config) -> FastAPI:
    """The application; its parts are made when it starts and closed when it ends."""
    counts = Counts()

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with _parts(config, counts) as chat:
            app.state.chat = chat
            log.info("ready")
            yield

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    _routes(app, config, counts)
    _errors(app)
    app.add_middleware(Hangup)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=config.cors_origins,
        allow_methods=["GET", "POST"],
        allow_headers=["authorization", "content-type", "x-request-id", "x-session-id", "traceparent", "tracestate"],
        expose_headers=["x-request-id", "x-pool", "x-route", "x-degraded", "retry-after"],
    )
    app.add_middleware(RequestId)
    return app


@contextlib.asynccontextmanager
async def _parts(config: Config, counts: Counts) -> AsyncIterator[Chat]:
    async with contextlib.AsyncExitStack() as closing:
        keys = key_file.Keys(key_file.read(config.keys, list(config.tiers)))
        store = Store(config.redis)
        closing.push_async_callback(store.close)
        library = None
        if config.retrieval:
            library = Library(config.retrieval)
            closing.push_async_callback(library.close)
            if config.retrieval.documents:
                await library.load(retrieval.read_documents(config.retrieval.documents))
        upstream = Upstream(config.upstream_idle_s)
        closing.push_async_callback(upstream.close)
        tracer = Tracer(config.tracing.otlp if config.tracing else None)
        closing.callback(tracer.close)
        chat = Chat(config, keys, store, library, upstream, Tokens(config.tokenizer), tracer, counts)
        closing.push_async_callback(chat.close)
        yield chat


def _routes(app: FastAPI, config: Config, counts: Counts) -> None:
    @app.post("/v1/chat/completions")
    async def chat(http: Request) -> Response:
        answering: Chat = http.app.state.chat
        return await answering.answer(http)

    @app.get("/v1/models")
    async def models() -> JSONResponse:
        names = [config.model, *config.pools]
        cards = [{"id": name, "object": "model", "owned_by": "orchestrator"} for name in names]
        return JSONResponse({"object": "list", "data": cards})

    @app.get("/health")
    async def health() -> Response:
        return Response()

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(counts.page(), media_type="text/plain; version=0.0.4")


def _errors(app: FastAPI) -> None:
    """Every error in OpenAI's shape."""

    @app.exception_handler(Refusal)
    async def refused(_: Request, refusal: Refusal) -> JSONResponse:
        return JSONResponse(refusal.document(), refusal.status, refusal.headers())

    @app.exception_handler(HTTPException)
    async def unknown(_: Request, error: HTTPException) -> JSONResponse:
        refusal = Refusal(error.status_code, "not_found" if error.status_code == 404 else "bad_request", error.detail)
        return JSONResponse(refusal.document(), error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> JSONResponse:
        refusal = Refusal(500, "internal_error", "The orchestrator made a mistake.")
        return JSONResponse(refusal.document(), 500)
