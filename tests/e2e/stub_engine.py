"""An engine that tells what it was asked: body hash, headers, its own port. Its answers are shaped by request headers.

x-wait: S       think for S seconds first          x-stream: N     N events, 50 ms apart
x-big: BYTES    one response header of that size   x-status: CODE  answer with this status
"""

import asyncio
import hashlib
import sys

from aiohttp import web

PORT = int(sys.argv[1])
answered = 0


async def completions(request: web.Request) -> web.StreamResponse:
    global answered
    body = await request.read()
    await asyncio.sleep(float(request.headers.get("x-wait", "0")))
    answered += 1
    if "x-stream" in request.headers:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for number in range(int(request.headers["x-stream"])):
            await response.write(b"data: %d\n\n" % number)
            await asyncio.sleep(0.05)
        await response.write(b"data: [DONE]\n\n")
        return response
    seen = {"port": PORT, "sha256": hashlib.sha256(body).hexdigest(), "headers": dict(request.headers)}
    big = {"x-big": "b" * int(request.headers["x-big"])} if "x-big" in request.headers else {}
    return web.json_response(seen, status=int(request.headers.get("x-status", "200")), headers=big)


async def models(_: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "tiny"}]})


async def metrics(_: web.Request) -> web.Response:
    return web.Response(text=f'vllm:generation_tokens_total{{model_name="tiny"}} {answered}.0\n')


app = web.Application(client_max_size=64 * 1024 * 1024)
app.add_routes(
    [
        web.post("/v1/completions", completions),
        web.post("/v1/chat/completions", completions),
        web.get("/v1/models", models),
        web.get("/health", models),
        web.get("/metrics", metrics),
    ]
)
web.run_app(app, host="127.0.0.1", port=PORT, print=None)
