"""A replica's LoRA adapters: which there are, by their names, and which of vLLM's requests for one goes with a request.

vLLM loads an adapter on every rank when it is told of it, and knows it by a number from then on. Numbers are never used
twice, so that an adapter that takes another's name is no more taken for it than by its prompts' cached blocks, which
vLLM keeps apart by name and path: a path whose files have changed is therefore refused.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from vllm.lora.request import LoRARequest

from outrider.actors.request_checks import unknown_adapter
from outrider.cluster.adapters import AdapterError, base_shapes, check_adapter, fingerprint
from outrider.cluster.config import ConfigError, LoraConfig

logger = logging.getLogger("ray.serve.outrider.target")


class Engine(Protocol):
    """AsyncLLM, as far as adapters go."""

    async def add_lora(self, lora_request: LoRARequest) -> bool: ...

    async def remove_lora(self, lora_id: int) -> bool: ...


class Adapters:
    """Belongs to one event loop.

    requests: by name, what vLLM's serving classes look adapters up in; those that a request may name now.
    """

    def __init__(self, engine: Engine, model: str, lora: LoraConfig | None) -> None:
        """model: the target's checkpoint."""
        self.requests: dict[str, LoRARequest] = {}
        self._engine, self._model, self._lora = engine, model, lora
        self._ids = itertools.count(1)
        self._changing = asyncio.Lock()
        self._in_use: Counter[int] = Counter()
        self._leaving: set[int] = set()
        """Without a name any more, and in use."""

        self._fingerprints: dict[str, str] = {}
        """Path -> what its files held when they were loaded."""

    @property
    def names(self) -> list[str]:
        return list(self.requests)

    @property
    def paths(self) -> dict[str, str]:
        """By name."""
        return {name: request.lora_path for name, request in self.requests.items()}

    async def load_configured(self) -> None:
        """Raises ConfigError for one that vLLM does not take."""
        for adapter in [] if self._lora is None else self._lora.adapters:
            try:
                await self.load(adapter.name, adapter.path)
            except AdapterError as error:
                raise ConfigError(f"target.lora.adapters: {adapter.name}: {error}") from None

    def find(self, name: str | None) -> LoRARequest | None:
        """None: without one. Raises RequestError for a name that there is not."""
        if name is None:
            return None
        if (found := self.requests.get(name)) is None:
            raise unknown_adapter("adapter", name, self.names)
        return found

    @contextmanager
    def using(self, request: LoRARequest | None) -> Iterator[None]:
        """It stays loaded meanwhile. Raises RequestError when it has been unloaded since it was found."""
        if request is None:
            yield
            return
        number = request.lora_int_id
        if self.requests.get(request.lora_name) is not request:
            raise unknown_adapter("adapter", request.lora_name, self.names)
        self._in_use[number] += 1
        try:
            yield
        finally:
            self._in_use[number] -= 1
            if not self._in_use[number]:
                del self._in_use[number]
                if number in self._leaving:
                    self._freeing = asyncio.ensure_future(self._free_later())

    async def load(self, name: str, path: str) -> None:
        """On every rank. Returns when requests may name it. Raises AdapterError."""
        assert self._lora is not None
        async with self._changing:
            if (there := self.requests.get(name)) is not None:
                if there.lora_path == path:
                    return
                raise AdapterError(f"another is called {name!r}; unload it first, or send another name")
            await self._free()
            held = len(self.requests) + len(self._leaving)
            if held >= self._lora.max_loras:
                waits = f", {len(self._leaving)} of them for running requests alone" if self._leaving else ""
                raise AdapterError(
                    f"{held} adapters are loaded{waits}, which is all that target.lora.max_loras lets be; unload one"
                )
            await asyncio.to_thread(self._check, path)
            request = LoRARequest(name, next(self._ids), path)
            try:
                await self._engine.add_lora(request)
            except Exception as error:
                raise AdapterError(f"vLLM does not take it: {last_line(error)}") from error
            self.requests[name] = request
            logger.info("adapter %r loaded from %s", name, path)

    async def unload(self, name: str) -> bool:
        """New requests may not name it from now on; its memory is free when those that run have ended. Returns whether
        there was one."""
        async with self._changing:
            request = self.requests.pop(name, None)
            if request is None:
                return False
            logger.info("adapter %r unloaded", name)
            self._leaving.add(request.lora_int_id)
            await self._free()
        return True

    async def _free_later(self) -> None:
        async with self._changing:
            await self._free()

    async def _free(self) -> None:
        """The memory of what has no name any more and is not in use."""
        for number in [number for number in self._leaving if not self._in_use[number]]:
            await self._engine.remove_lora(number)
            self._leaving.discard(number)

    def _check(self, path: str) -> None:
        assert self._lora is not None
        check_adapter(path, self._lora.max_lora_rank, base_shapes(self._model))
        found = fingerprint(path)
        if self._fingerprints.setdefault(path, found) != found:
            raise AdapterError(
                f"{path} held other weights when it was loaded before, and prompts are cached for these; store the new "
                "ones in a directory of their own"
            )


def last_line(error: Exception) -> str:
    """A rank's error comes with its traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
