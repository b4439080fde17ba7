"""vLLM's ``LLM`` and ``AsyncLLM`` with drafts from a drafter on its own accelerators.

    from outrider import LLM, SamplingParams

    llm = LLM("Qwen/Qwen3-32B", tensor_parallel_size=4, speculative_config={
        "method": "draft_model", "model": "Qwen/Qwen3-0.6B", "num_speculative_tokens": 5})
    print(llm.generate(["The future of AI is"], SamplingParams(max_tokens=64))[0].outputs[0].text)

Prompts, sampling parameters, outputs and metrics are vLLM's own.
"""

from __future__ import annotations

import asyncio
import atexit
import os
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Any

import vllm
from vllm.entrypoints import llm as vllm_llm
from vllm.outputs import RequestOutput
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor import Executor

from outrider.actors.vllm_adapter.input_parameters import serve_all_parameters
from outrider.actors.vllm_adapter.updatable_llm import UpdatableLLM, check_sleep
from outrider.cluster.config import OutriderConfig
from outrider.deploy.llm.arguments import NOT_ARGUMENTS, config_from_arguments
from outrider.deploy.llm.local import LocalReplica

_OF_THE_LLM = ("chat_template", "runner", "convert", "hf_token", "pooler_config")
"""Arguments of ``vllm.LLM`` that it uses itself, or that only make sense for models that do not generate."""


class _ChecksNames(type(vllm.SamplingParams)):  # type: ignore[misc]
    def __call__(cls, *args: Any, **kwargs: Any) -> vllm.SamplingParams:
        for name in kwargs:
            if name in NOT_ARGUMENTS:
                raise TypeError(f"{name}: is not a sampling parameter; give LLM(...) a speculative_config instead")
        return vllm.SamplingParams(*args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, vllm.SamplingParams)


class SamplingParams(vllm.SamplingParams, metaclass=_ChecksNames):
    """Makes vLLM's sampling parameters. Names that former versions of vLLM had end with what is written today."""


class LLM(vllm.LLM):
    """Generates text offline, as ``vllm.LLM`` does, with drafts from a drafter on its own accelerators.

    Args:
        model: Checkpoint directory or hub id of the target.
        speculative_config: vLLM's mapping: ``method``, ``model``, ``num_speculative_tokens``,
            ``draft_tensor_parallel_size`` and so on. Methods ``draft_model``, ``ngram`` and ``suffix`` run in a
            drafter actor with accelerators of its own, others in the target's engine. Keys of the sections ``drafter``
            and ``speculation`` of docs/configuration.md may stand beside them.
        **arguments: vLLM's engine arguments.

    Raises:
        ConfigError: Names the argument that is wrong.
    """

    def __init__(self, model: str, *, speculative_config: Mapping[str, Any] | None = None, **arguments: Any) -> None:
        own = {name: arguments.pop(name) for name in _OF_THE_LLM if name in arguments}
        config = config_from_arguments(model, speculative_config, **arguments)
        self._replica = LocalReplica(config)
        atexit.register(self.shutdown)
        try:
            with _engine_of(self._replica):
                super().__init__(model, **own)
            self._replica.wait_for_drafter()
            if config.drafts_in_rounds:
                self.collective_rpc("open_link")
            self._replica.wait_for_link(lambda: self.collective_rpc("round_status"))
        except BaseException:
            self.shutdown()
            raise

    def shutdown(self) -> None:
        """Ends the engine, the drafter and, where this object started it, Ray. A second call does nothing."""
        atexit.unregister(self.shutdown)
        engine = getattr(self, "llm_engine", None)
        if engine is not None:
            engine.engine_core.shutdown()
        self._replica.close()

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Puts the engine to sleep, see ``vllm.LLM.sleep``. Raises NotImplementedError as ``check_sleep`` does."""
        check_sleep(level)
        super().sleep(level, mode)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Puts the new weights into service, and drops the prefix cache, which the former weights have made."""
        super().finish_weight_update(weight_version)
        self.reset_prefix_cache(reset_running_requests=True)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    def __getattr__(self, name: str) -> Any:
        if name == "agenerate":
            raise AttributeError("agenerate: is not a method of LLM; iterate over AsyncLLM(...).generate(...)")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


class AsyncLLM(UpdatableLLM):
    """Generates text as asynchronous streams, as vLLM's ``AsyncLLM`` does. Arguments are those of ``LLM``.

    It starts a process for the engine's core, so the program's main module needs ``if __name__ == "__main__":``. The
    first ``generate`` waits until the drafter has loaded and is linked. If it cannot be, this and later ones raise
    ConfigError.
    """

    def __init__(self, model: str, *, speculative_config: Mapping[str, Any] | None = None, **arguments: Any) -> None:
        self._start(config_from_arguments(model, speculative_config, **arguments))

    @classmethod
    def from_config(cls, config: OutriderConfig) -> AsyncLLM:
        """Makes one of a whole configuration; its sections ``serving`` and ``openai`` have no effect here."""
        llm = cls.__new__(cls)
        llm._start(config)
        return llm

    @property
    def config(self) -> OutriderConfig:
        """The configuration, with the defaults of this machine's devices."""
        return self._replica.config

    def _start(self, config: OutriderConfig) -> None:
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # a fork would share Ray's connection
        self._replica = LocalReplica(config)
        atexit.register(self.shutdown)
        self._opening: asyncio.Task[None] | None = None
        try:
            vllm_config = self._replica.vllm_config()
            super().__init__(
                vllm_config,
                Executor.get_class(vllm_config),
                log_stats=True,
                usage_context=UsageContext.ENGINE_CONTEXT,
            )
            serve_all_parameters(self.input_processor, vllm_config)
        except BaseException:
            self.shutdown()
            raise

    async def generate(self, *args: Any, **kwargs: Any) -> AsyncGenerator[RequestOutput, None]:
        """Streams the outputs of one request. Arguments are those of vLLM's ``AsyncLLM.generate``."""
        if self._opening is None:
            self._opening = asyncio.create_task(self._open_link())
        await asyncio.shield(self._opening)
        async with aclosing(super().generate(*args, **kwargs)) as outputs:
            async for output in outputs:
                yield output

    async def _open_link(self) -> None:
        if not self._replica.config.drafts_in_rounds:
            return
        loop = asyncio.get_running_loop()
        await asyncio.to_thread(self._replica.wait_for_drafter)
        await self.collective_rpc("open_link")

        def status() -> list[Any]:
            return asyncio.run_coroutine_threadsafe(self.collective_rpc("round_status"), loop).result()

        await asyncio.to_thread(self._replica.wait_for_link, status)

    def shutdown(self, timeout: float | None = None) -> None:
        """Ends the engine, the drafter and, where this object started it, Ray. A second call does nothing."""
        atexit.unregister(self.shutdown)
        if hasattr(self, "engine_core"):
            super().shutdown(timeout)
        self._replica.close()


@contextmanager
def _engine_of(replica: LocalReplica) -> Iterator[None]:
    """Has ``vllm.LLM`` take its engine from replica instead of making one by its own arguments."""

    class Engine(LLMEngine):
        @classmethod
        def from_engine_args(cls, *args: Any, **kwargs: Any) -> LLMEngine:
            vllm_config = replica.vllm_config()
            # The core runs in this process, whose Ray connection it shares. Ranks are processes of their own.
            engine = LLMEngine(
                vllm_config,
                Executor.get_class(vllm_config),
                log_stats=True,
                usage_context=UsageContext.LLM_CLASS,
                multiprocess_mode=False,
            )
            serve_all_parameters(engine.input_processor, vllm_config)
            return engine

    stock, vllm_llm.LLMEngine = vllm_llm.LLMEngine, Engine
    try:
        yield
    finally:
        vllm_llm.LLMEngine = stock
