"""Generates answers and their top log-probabilities in batches, by vLLM's offline engine in a process of its own.

The process isolates the engine's memory, random state and thread binding. The engine core runs within it and in step
with the calls, so the same prompts and seed give the same answers on the same machine.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from types import TracebackType

TOGETHER = 256
"""The most sequences in a batch."""

_FEWEST, _KV_BYTES = 64, 4 << 30
"""Sequences that run at once: at least the first number, and more if the second holds their KV cache."""

_BLOCK_TOKENS = 128
"""The most tokens that a sequence's last KV block leaves unused."""

_ENDS_WITHIN_S = 30.0


class Answer(NamedTuple):
    """Holds an answer and the likeliest tokens at each of its positions.

    token_ids: at least one, with the end token if it was reached. top_ids: int32 [N, top], likeliest first;
    top_log_p: float32 [N, top], their log-probabilities at temperature 1.
    """

    token_ids: list[int]
    top_ids: np.ndarray
    top_log_p: np.ndarray


@dataclass(frozen=True)
class Engine:
    """Describes the engine to start.

    document: the checkpoint's config.json. max_model_len: tokens of prompt and answer. top: see Answer.
    ends: tokens that end an answer.
    """

    checkpoint: str
    document: Mapping[str, Any]
    dtype: str
    device: str
    max_model_len: int
    top: int
    ends: tuple[int, ...]

    @property
    def at_once(self) -> int:
        """Returns how many sequences run at once."""
        return min(max(_KV_BYTES // self._sequence_bytes, _FEWEST), TOGETHER)

    @property
    def kv_cache_bytes(self) -> int:
        """Returns the KV cache's size, for as many whole sequences as run at once."""
        return (self.at_once + 1) * self._sequence_bytes

    @property
    def _sequence_bytes(self) -> int:
        config = self.document
        heads = int(config["num_attention_heads"])
        size = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
        a_token = 2 * int(config["num_hidden_layers"]) * int(config.get("num_key_value_heads") or heads) * size
        width = {"float32": 4}.get(self.dtype, 2)
        return (self.max_model_len + _BLOCK_TOKENS) * a_token * width


class OfflineAnswers:
    """Runs the engine within a context. Entering takes as long as vLLM takes to start."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __enter__(self) -> OfflineAnswers:
        """Starts the engine. Raises RuntimeError with vLLM's own words where it does not start."""
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, self._engine), name="offline answers", daemon=True)
        self._process.start()
        other.close()
        try:
            self._heard()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def of(self, prompts: Sequence[Sequence[int]], max_tokens: int, seed: int | None) -> list[Answer]:
        """Generates an answer to each prompt. Raises RuntimeError.

        seed: samples at temperature 1 with this seed; None is greedy.
        """
        self._pipe.send(([list(prompt) for prompt in prompts], max_tokens, seed))
        answers: list[Answer] = self._heard()
        return answers

    def _heard(self) -> Any:
        try:
            done, value = self._pipe.recv()
        except EOFError:
            self._process.join(_ENDS_WITHIN_S)
            code = self._process.exitcode
            raise RuntimeError(f"the engine that generates text died (exit code {code}); its log is above") from None
        if not done:
            raise RuntimeError(f"the engine that generates text failed: {value}")
        return value

    def _end(self) -> None:
        self._pipe.close()
        self._process.join(_ENDS_WITHIN_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(pipe: Connection, engine: Engine) -> None:
    """Runs the process: answers requests until the pipe closes."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # the caller prints its progress
    try:
        from vllm import LLM

        llm = LLM(
            model=engine.checkpoint,
            dtype=engine.dtype,
            max_model_len=engine.max_model_len,
            max_num_seqs=engine.at_once,
            max_logprobs=engine.top,
            kv_cache_memory_bytes=engine.kv_cache_bytes,
            enable_prefix_caching=False,  # answers must not depend on earlier batches
            async_scheduling=False,
            skip_tokenizer_init=True,
            disable_log_stats=True,
            generation_config="vllm",
            enforce_eager=engine.device == "cpu",
        )
        pipe.send((True, None))
        while True:
            pipe.send((True, _answers(llm, engine, *pipe.recv())))
    except (EOFError, BrokenPipeError):
        return
    except Exception as error:  # noqa: BLE001 - the caller must hear of any error
        pipe.send((False, f"{type(error).__name__}: {error}"))


def _answers(llm: Any, engine: Engine, prompts: list[list[int]], max_tokens: int, seed: int | None) -> list[Answer]:
    import torch
    from vllm import SamplingParams

    if seed is not None:
        torch.manual_seed(seed)  # a generator per request makes sampling four times as slow on a CPU
    params = SamplingParams(
        temperature=0.0 if seed is None else 1.0,
        max_tokens=max_tokens,
        logprobs=engine.top,
        flat_logprobs=True,
        stop_token_ids=list(engine.ends),
        detokenize=False,
    )
    done = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    answers = []
    for request in done:
        out = request.outputs[0]
        # vLLM lists the chosen token of each position first, then the likeliest ones.
        shape = (len(out.token_ids), 1 + engine.top)
        ids = np.array(out.logprobs.token_ids, np.int32).reshape(shape)[:, 1:]
        log_p = np.array(out.logprobs.logprobs, np.float32).reshape(shape)[:, 1:]
        answers.append(Answer(list(out.token_ids), ids, log_p))
    return answers
