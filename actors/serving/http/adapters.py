"""``POST /v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``, by vLLM's names: adapters that come and go while the
server runs, on all replicas. There where ``target.lora.load_from`` is set."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from typing import Any

import ray
from fastapi import FastAPI, Request
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.responses import PlainTextResponse, Response

from outrider.actors.replica_calls import Broadcast, RequestError
from outrider.actors.request_checks import shown
from outrider.actors.serving.answers import answer_within
from outrider.actors.serving.http.body import read_json_object
from outrider.actors.serving.openai.errors import HttpError, HttpFailure
from outrider.cluster.adapters import AdapterError, beneath
from outrider.cluster.limits import LimitsConfig
from outrider.cluster.lora_config import NAME, LoraConfig

logger = logging.getLogger("ray.serve.outrider.ingress")

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"

LOAD_WITHIN_S = 300.0
"""On all replicas: weights are read from a disk that may be far away."""

_REGISTRY_WITHIN_S = 5.0
_NOT_HERE = {
    "load_inplace": (False, "prompts that are cached for the old weights would be taken for the new ones; unload the "
                     "adapter, and load the new weights from a directory of their own"),
    "is_3d_lora_weight": (False, "the format is found in the files; leave it out"),
    "lora_int_id": (None, "adapters go by their names; leave it out"),
}  # fmt: skip
"""Fields of vLLM's that are taken with one value only, and why."""


class AdapterCalls:
    """Of one ingress replica."""

    def __init__(
        self,
        target: DeploymentHandle,
        broadcast: Broadcast,
        lora: LoraConfig,
        served_model_name: str,
        registry: Callable[[], Any],
    ) -> None:
        """registry: the handle of the application's. Raises ValueError without one."""
        self._target, self._broadcast, self._lora = target, broadcast, lora
        self._served_model_name, self._registry = served_model_name, registry
        self._configured = frozenset(adapter.name for adapter in lora.adapters)

    async def load(self, body: dict[str, Any]) -> str:
        """Raises RequestError, and HttpError when not every replica answers."""
        name, path = _text(body, "lora_name"), _text(body, "lora_path")
        _check_fields(body, {"lora_name", "lora_path", "load_inplace", "is_3d_lora_weight"})
        if not re.fullmatch(NAME, name):
            raise RequestError(
                "lora_name", f"{shown(name)} is no name", "send 1 to 128 printable characters, no spaces"
            )
        if name == self._served_model_name or name in self._configured:
            raise RequestError("lora_name", f"{shown(name)} is taken by the configuration", "send another name")
        assert self._lora.load_from is not None
        try:
            path = await asyncio.to_thread(beneath, self._lora.load_from, path)
        except (AdapterError, OSError, ValueError, RuntimeError) as error:  # the latter of links that lead nowhere
            raise _of_path(error if isinstance(error, AdapterError) else "cannot be looked up") from None
        if (problem := await self._ask_registry("add_adapter", name, path)) is not None:
            raise RequestError("lora_name", problem, "unload it first, or send another name")
        problems = await self._tell_replicas("load_adapter", name, path)
        if problems:
            await self._ask_registry("remove_adapter", name)
            await self._tell_replicas("unload_adapter", name)
            raise _of_path(problems[0])
        logger.info("adapter %r loaded from %s", name, path)
        return f"Success: LoRA adapter '{name}' added successfully."

    async def unload(self, body: dict[str, Any]) -> str:
        """Raises likewise."""
        name = _text(body, "lora_name")
        _check_fields(body, {"lora_name", "lora_int_id"})
        if name in self._configured:
            raise RequestError("lora_name", f"{shown(name)} is the configuration's", "remove it there and start anew")
        if not await self._ask_registry("remove_adapter", name):
            raise HttpError(HttpFailure(404, f"the adapter {shown(name)} is not loaded", "lora_name"))
        await self._tell_replicas("unload_adapter", name)
        logger.info("adapter %r unloaded", name)
        return f"Success: LoRA adapter '{name}' removed successfully."

    async def _ask_registry(self, method: str, *args: str) -> Any:
        try:
            answer = getattr(self._registry(), method).remote(*args)
            return await answer_within(answer, _REGISTRY_WITHIN_S)
        except (ray.exceptions.RayError, TimeoutError, ValueError) as error:
            logger.warning("the registry does not answer: %s", error)
            raise HttpError(HttpFailure(503, "the registry does not answer; retry")) from None

    async def _tell_replicas(self, method: str, *args: str) -> list[str]:
        """What is wrong, where something is. One that does not answer follows the registry when it can."""
        try:
            replies = await self._broadcast(self._target, method, *args, timeout_s=LOAD_WITHIN_S)
        except (DeploymentUnavailableError, ConnectionError) as error:
            logger.warning("%s: no replica could be asked: %s", method, error)
            return []
        for reply in replies:
            if not reply.ok:
                logger.warning("%s: %s", method, reply.error)
        return [reply.value for reply in replies if reply.ok and reply.value]


def add_adapter_routes(app: FastAPI, calls: AdapterCalls, limits: LimitsConfig) -> None:

    @app.post(LOAD)
    async def load(request: Request) -> Response:
        return PlainTextResponse(await calls.load(await read_json_object(request, limits)))

    @app.post(UNLOAD)
    async def unload(request: Request) -> Response:
        return PlainTextResponse(await calls.unload(await read_json_object(request, limits)))


def _text(body: dict[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str) or not value:
        raise RequestError(name, "is missing" if value in (None, "") else "is no text", "send a text")
    return value


def _check_fields(body: dict[str, Any], known: set[str]) -> None:
    for name, value in body.items():
        if name not in known:
            raise RequestError(
                name, "is not a field of this request", f"send {', '.join(sorted(known - {*_NOT_HERE}))}"
            )
        if name in _NOT_HERE and value not in (None, _NOT_HERE[name][0]):
            problem, _, fix = _NOT_HERE[name][1].partition("; ")
            raise RequestError(name, problem, fix)


def _of_path(problem: object) -> RequestError:
    text, _, fix = str(problem).rpartition("; ")
    return RequestError("lora_path", text or fix, fix if text else "send the path of an adapter")
