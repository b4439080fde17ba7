"""Runs vLLM's own OpenAI server inside a target replica, without its sockets.

`build_app` and `init_app_state` are what ``vllm serve`` runs. Each forwarded request is one call of that ASGI app.
"""

from __future__ import annotations

import asyncio
import logging
import os
from argparse import Namespace
from collections.abc import AsyncGenerator
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import FrontendArgs
from vllm.entrypoints.openai.models.protocol import LoRAModulePath
from vllm.entrypoints.rl.factories import register_rl_api_routers
from vllm.exceptions import VLLMClientError
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM

from outrider.actors.observability.logs import note_request
from outrider.actors.replica_calls import HttpCall, HttpHead, ReplicaLost, RequestIdInUse
from outrider.actors.serving.openai.engine import CURRENT_CALL, CallState, OpenAIEngine
from outrider.actors.vllm_adapter.answer_parsers import answer_parsers
from outrider.cluster.config import ConfigError, OutriderConfig

_MOST_WAITING = 64
"""Largest number of parts of one answer that wait to be sent; the app blocks then."""

_DISCONNECT_S = 5.0
"""How long vLLM's app may take to notice a disconnect."""

_STREAM_LOGGERS = tuple(f"vllm.entrypoints.openai.{module}.serving" for module in ("chat_completion", "completion"))


class OpenAIApp:
    """Answers forwarded HTTP requests, several at once, on the replica's event loop."""

    def __init__(self, app: Any, llm: AsyncLLM, replica_id: str) -> None:
        """Wraps vLLM's FastAPI app with its state."""
        self._app, self._llm, self._replica_id = app, llm, replica_id
        self._running: dict[tuple[int, str], CallState] = {}

    @classmethod
    async def make(cls, llm: AsyncLLM, config: OutriderConfig, replica_id: str) -> OpenAIApp:
        """Builds vLLM's app over the replica's engine.

        Raises ConfigError for a chat template, a parser or an option under ``openai`` that vLLM refuses.
        """
        # The ingress checks keys, for every route. vLLM's own check covers some of them.
        os.environ.pop("VLLM_API_KEY", None)
        if config.serving.most_replicas > 1:
            # A stored response is in one replica, and the next request may come to another.
            os.environ["VLLM_ENABLE_RESPONSES_API_STORE"] = "0"
        co_located = config.co_located.method if config.co_located is not None else None
        engine: Any = OpenAIEngine(
            llm, config.num_speculative_tokens, config.serving.structured_output, co_located, config.serving
        )
        try:
            args = server_args(config, llm)
            tasks = await llm.get_supported_tasks()
            app = build_app(args, supported_tasks=tasks, model_config=llm.model_config)
            await init_app_state(engine, app.state, args, supported_tasks=tasks)
            if config.target.takes_new_weights:
                register_rl_api_routers(app)
        except (TypeError, ValueError, KeyError, ImportError, OSError) as error:
            raise ConfigError(f"openai: {' '.join(str(error).split())}") from error
        app.state.server = SimpleNamespace()  # vLLM's error handlers tell it to exit; Serve replaces replicas here
        for name in _STREAM_LOGGERS:
            logging.getLogger(name).addFilter(_is_no_client_error)
        return cls(app, llm, replica_id)

    @property
    def adapters(self) -> dict[str, LoRARequest]:
        """Returns vLLM's registry of LoRA adapters, by name; adapters that are loaded later appear in it."""
        requests: dict[str, LoRARequest] = self._app.state.openai_serving_models.lora_requests
        return requests

    @property
    def args(self) -> Namespace:
        """Returns the arguments of ``vllm serve`` that the app was made with."""
        args: Namespace = self._app.state.args
        return args

    async def answer(self, call: HttpCall) -> AsyncGenerator[HttpHead | bytes, None]:
        """Yields the response's head, then its body's parts. Closing or cancelling the generator aborts the request.

        Raises ReplicaLost when the engine has died before any part of the body.
        """
        note_request(call.request_id)
        state, key = CallState(call), (call.caller, call.request_id)
        if call.routed is not None:
            if key in self._running:
                raise RequestIdInUse(call.request_id)
            self._running[key] = state
        left, parts = asyncio.Event(), asyncio.Queue[HttpHead | bytes | None](_MOST_WAITING)
        task = asyncio.create_task(self._run(call, state, left, parts))
        begun = False
        try:
            while (part := await parts.get()) is not None:
                if not begun and self._llm.errored:
                    raise ReplicaLost(self._replica_id, "its engine is dead")
                begun = begun or isinstance(part, bytes)
                yield part
        finally:
            left.set()
            if self._running.get(key) is state:
                del self._running[key]
            while not parts.empty():
                parts.get_nowait()
            # vLLM's handlers end their requests when the client disconnects, and not when they are cancelled.
            _, unfinished = await asyncio.wait([task], timeout=_DISCONNECT_S)
            for each in unfinished:
                each.cancel()

    async def whole_answer(self, call: HttpCall) -> tuple[int, bytes]:
        """Returns status and body of the response to call. See ``answer`` for errors."""
        status, parts = 500, []
        async for part in self.answer(call):
            if isinstance(part, HttpHead):
                status = part.status
            else:
                parts.append(part)
        return status, b"".join(parts)

    async def abort(self, owner: int, request_id: str) -> bool:
        """Ends one of the owner's requests, by its id or its answer's, with finish reason ``abort``.

        Returns whether the request was here.
        """
        names = (request_id, request_id.removeprefix("chatcmpl-").removeprefix("cmpl-"))
        found = next(filter(None, (self._running.get((owner, name)) for name in names)), None)
        if found is None or not found.engine_ids:
            return False
        await self._llm.abort(list(found.engine_ids))
        return True

    async def _run(
        self, call: HttpCall, state: CallState, left: asyncio.Event, parts: asyncio.Queue[HttpHead | bytes | None]
    ) -> None:
        CURRENT_CALL.set(state)
        unread = [{"type": "http.request", "body": call.body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if unread:
                return unread.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if left.is_set():
                raise OSError("the client has disconnected")
            if message["type"] == "http.response.start":
                await parts.put(HttpHead(message["status"], tuple(map(tuple, message.get("headers", ())))))
            elif body := message.get("body", b""):
                await parts.put(bytes(body))

        try:
            await self._app(_scope(call), receive, send)
        except OSError:
            pass  # the client has disconnected
        except Exception as error:  # noqa: BLE001 - vLLM's app has answered with a 500 by now
            logging.getLogger("ray.serve.outrider.openai").error("%s failed: %s", call.path, type(error).__name__)
        finally:
            if not left.is_set():
                await parts.put(None)


def server_args(config: OutriderConfig, llm: AsyncLLM) -> Namespace:
    """Returns the arguments of ``vllm serve`` for this deployment. Raises ConfigError for an unknown one."""
    parsers = answer_parsers(config, llm.model_config)
    modules = [LoRAModulePath(module.name, module.path) for module in config.target.lora_modules]
    own = config.openai.frontend_args
    if unknown := own.keys() - {field.name for field in fields(FrontendArgs)}:
        raise ConfigError(f"openai.{min(unknown)}: vLLM's server has no such argument; remove it")
    frontend = FrontendArgs(
        **{
            "disable_fastapi_docs": True,
            "enable_tokenizer_info_endpoint": True,
            "chat_template": config.openai.chat_template,
            "enable_auto_tool_choice": parsers.tool_call is not None,
            "tool_call_parser": parsers.tool_call,
            "lora_modules": modules if config.target.serves_lora else None,
            **own,
        }
    )
    engine = AsyncEngineArgs(model=config.target.model, served_model_name=[config.served_model_name])
    args = Namespace(**{**vars(engine), **vars(frontend)})
    args.structured_outputs_config = llm.vllm_config.structured_outputs_config
    return args


def _scope(call: HttpCall) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": call.method,
        "scheme": "http",
        "path": call.path,
        "raw_path": call.path.encode(),
        "query_string": call.query,
        "root_path": "",
        "headers": list(call.headers),
        "client": None,
        "server": None,
        "state": {},
    }


def _is_no_client_error(record: logging.LogRecord) -> bool:
    """Filters tracebacks of streams that ended by the request's own fault, which may show what the client sent."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, (VLLMClientError, ValueError))
