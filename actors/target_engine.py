"""The target's engine inside a replica: vLLM's AsyncLLM, in our types. The only actor module that loads it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.exceptions import VLLMClientError
from vllm.inputs import TokensPrompt
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from actors.engine_load import EngineLoad
from actors.engine_requests import prompt_ids, refusal, round_outputs, sampling_params
from actors.generation import GenerationRequest, RoundOutput


class TargetEngine:
    """Loads the model at construction (tens of seconds to minutes), in processes and actors of its own."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._load = EngineLoad()
        self._llm = AsyncLLM.from_vllm_config(vllm_config, stat_loggers=[self._load.factory])
        # vLLM's front door refuses min_p and logit_bias under speculation, since its own rejection sampler does not
        # apply them to drafted tokens (vllm#42744). Ours does, on every row; nothing else we use there looks at this.
        self._llm.input_processor.speculative_config = None
        self._tokenizer = self._llm.get_tokenizer()
        self._max_model_len = self._llm.model_config.max_model_len
        self._vocab_size = self._llm.model_config.get_vocab_size()

    async def warm_up(self) -> None:
        """The first steps pay for what is set up lazily (tens of seconds for CPU ranks that share cores)."""
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        async for _ in self._llm.generate(TokensPrompt(prompt_token_ids=[0, 0]), params, "warm-up"):
            pass

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[RoundOutput, None]:
        """One RoundOutput per round and answer, an answer's last one with finish_reason; those of n answers are
        interleaved. Closing the generator aborts the request, all of its answers.

        Raises RequestError for what the model cannot serve, TimeoutError when the request's deadline passes,
        SamplingFailed when no next token can be chosen, ConnectionError when the engine is gone.
        """
        ids = prompt_ids(request, self._tokenizer, self._vocab_size, self._max_model_len)
        params = sampling_params(request, len(ids), self._max_model_len)
        stream = self._llm.generate(TokensPrompt(prompt_token_ids=ids), params, request.request_id)
        num_tokens: dict[int, int] = {}
        async with aclosing(stream):
            while True:
                try:
                    async with asyncio.timeout(request.seconds_left()):
                        output = await anext(stream)
                except StopAsyncIteration:
                    return
                except EngineDeadError as error:
                    raise ConnectionError("the engine is gone") from error
                except VLLMClientError as error:
                    raise refusal(error, request, self._vocab_size) from None
                except EngineGenerateError as error:
                    # vLLM wraps what it did not raise as a validation error. Before any output it is about the request.
                    if num_tokens or not isinstance(error.__cause__, ValueError):
                        raise
                    raise refusal(error.__cause__, request, self._vocab_size) from None
                for round_output in round_outputs(output, request, num_tokens):
                    yield round_output
                if output.finished:
                    return

    async def call_ranks(self, method: str) -> list[Any]:
        """Call a method of the ranks' worker between two steps. Replies, plain values only, in rank order."""
        replies: list[Any] = await self._llm.collective_rpc(method)
        return replies

    def load(self) -> dict[str, Any]:
        """``running`` and ``waiting`` requests, ``kv_cache_usage`` 0..1."""
        return self._load.snapshot()

    async def check_health(self) -> None:
        """Raises EngineDeadError when the engine is dead."""
        await self._llm.check_health()

    def shutdown(self) -> None:
        self._llm.shutdown()
