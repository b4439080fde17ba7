"""A process with both doors of a proxy in front of scripted answers: ``python -m tests.unit.security.door_server``. It
prints its two ports, and serves until its standard input ends. What it keeps of a request is measured from outside."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from typing import Any

import grpc
import uvicorn
from grpc_health.v1 import health_pb2_grpc
from ray.serve._private.grpc_util import gRPCGenericServer
from ray.serve._private.proxy_request_response import gRPCStreamingType
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from outrider.actors.replica_calls import RequestError
from outrider.actors.serve_seam.grpc_proxy import add_services
from outrider.actors.serve_seam.http_proxy import TimedProtocol, middlewares
from outrider.actors.serving.grpc.validation import ServedModel, to_generation_request
from outrider.actors.serving.http.body import read_json_object
from outrider.actors.serving.openai.door import to_openai_request
from outrider.actors.serving.openai.errors import HttpError, refused
from outrider.cluster.limits import from_environment
from outrider.v1 import generation_pb2 as pb
from outrider.v1 import generation_pb2_grpc as rpc
from tests.unit.scripted_proxy import router, sent_on

ENDPOINTS: dict[str, Any] = {
    "/v1/completions": "completions",
    "/v1/chat/completions": "chat",
    "/v1/responses": "responses",
    "/detokenize": "detokenize",
}


class Servicer(rpc.GenerationServiceServicer, health_pb2_grpc.HealthServicer): ...


class Proxy:
    """In the place of Serve's and the ingress."""

    proxy_router = router(outrider="/")

    def make_handler(self, method: str, kind: gRPCStreamingType) -> Any:
        async def unary(request: Any, context: Any) -> bytes:
            try:
                to_generation_request(sent_on(request), ServedModel("m", 4, from_environment()), request_id="r")
            except RequestError as error:
                context.set_code(grpc.StatusCode.INVALID_ARGUMENT)
                context.set_details(str(error))
                return b""
            return pb.GenerateResponse(text="whole").SerializeToString()

        async def stream(request: Any, context: Any) -> AsyncGenerator[bytes, None]:
            yield pb.GenerateStreamResponse(text_delta="whole").SerializeToString()

        return unary if kind is gRPCStreamingType.UNARY_UNARY else stream


async def answer(request: Request) -> Response:
    limits = from_environment()
    try:
        body = await read_json_object(request, limits)
        to_openai_request(
            ENDPOINTS[request.url.path], body, request.headers, num_speculative_tokens=4, request_id="r", limits=limits
        )
    except HttpError as error:
        return error.failure.response()
    except RequestError as error:
        return refused(error).response()
    return JSONResponse({"text": "whole"})


async def main() -> None:
    app: Any = Starlette(routes=[Route(path, answer, methods=["POST"]) for path in ENDPOINTS])
    for middleware in middlewares():  # the last is the first that a request meets, as Serve has them
        app = middleware.cls(app, *middleware.args, **middleware.kwargs)
    http = uvicorn.Server(
        uvicorn.Config(app, host="127.0.0.1", port=0, http=TimedProtocol, lifespan="off", log_level="error")
    )
    serving = asyncio.create_task(http.serve())
    while not http.started:  # noqa: ASYNC110 - uvicorn's own flag
        await asyncio.sleep(0.01)
    server = gRPCGenericServer(Proxy().make_handler)
    add_services(Servicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    sys.stdout.write(f"{port} {http.servers[0].sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)
    http.should_exit = True
    await serving


if __name__ == "__main__":
    asyncio.run(main())
