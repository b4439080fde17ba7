"""Chooses every token of the target, on the Verifier: prefill and rounds, with drafts and without.

One pipeline for all rows, in the order of vLLM's plain sampler: grammar mask (applied before, by the runner), allowed
ids, bad words, min_tokens, logit_bias, penalties; then temperature, min_p, top_k, top_p and the choice, which are
verification's. vLLM's own path under speculation knows another order and not all of them (vllm#42744).

A row is treated as a request of its own whose output so far ends with the drafts before it, so vLLM's processors
apply to drafted positions unchanged.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import LogitBiasLogitsProcessor, MinTokensLogitsProcessor
from vllm.v1.sample.logits_processor.interface import BatchUpdate
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from outrider.actors.round.request import Draft, Request
from outrider.actors.verification.batch import Sampling, VerificationBatch
from outrider.actors.verification.dispatch import kernel_for
from outrider.actors.verification.transfer import to_device
from outrider.cluster.link.messages import DraftSampling, SparseQ
from outrider.cluster.modes import Mode

PROFILED_LOGPROBS = 20
"""Logprobs of a token while memory is profiled: vLLM's own limit, unless it is raised."""


class TargetSampler:
    """Applies vLLM's logits processors to drafted rows too, and verifies."""

    def __init__(self, vllm_config: VllmConfig, sampler: Sampler, device: torch.device) -> None:
        if sampler.logprobs_mode != "raw_logprobs":
            raise ValueError(f"logprobs_mode {sampler.logprobs_mode!r} is not supported; leave it at raw_logprobs")
        self._sampler, self._device = sampler, device
        self._verify = kernel_for(device)
        kinds: tuple[Any, ...] = (MinTokensLogitsProcessor, LogitBiasLogitsProcessor)
        self._processors = LogitsProcessors(kind(vllm_config, device, is_pin_memory=False) for kind in kinds)
        self._num_rows = 0
        """The rows that the processors were last told of."""

    def __call__(
        self,
        logits: Tensor,
        requests: Sequence[Request],
        drafts: Sequence[Draft],
        width: int,
        metadata: SamplingMetadata,
    ) -> SamplerOutput:
        """Chooses a step's tokens.

        Returns, with logprobs where a request asked for them, int32 [B, width + 1]: the committed ids padded with
        -1, then the request's `verification.batch.Status`, so that one read of the device gives both.

        Args:
            logits: [R, V], request after request, a row for each of its drafts and one more, changed in place.
            requests: one stands here several times where several paths of its draft tree are verified.
            metadata: vLLM's, of the same rows.
        """
        logits = logits.to(torch.float32)
        ids = [draft.ids for draft in drafts]
        raw, wants_logprobs = logits, metadata.max_num_logprobs is not None or bool(metadata.logprob_token_ids)
        if _is_processed(requests, metadata):
            if wants_logprobs:
                raw = logits.clone()
            logits = self._process(logits, requests, ids, metadata)
        batch = verification_batch(
            logits,
            [request.sampling for request in requests],
            [len(request.token_ids) for request in requests],
            ids,
            [draft.q for draft in drafts],
        )
        result = self._verify(batch)
        chosen = torch.nn.functional.pad(result.token_ids, (0, width + 1 - result.token_ids.shape[1]), value=-1)
        chosen[:, -1] = result.status
        logprobs = None
        if wants_logprobs:
            count, named = metadata.max_num_logprobs or 0, metadata.logprob_token_ids or {}
            logprobs = self._logprobs(raw, batch, chosen[:, :-1], count, named)
        return SamplerOutput(chosen, logprobs)

    def warm_up(self, vocab_size: int, num_drafts: int, top_n: int) -> None:
        """Compiles what verification compiles on first use, so that no request waits for it.

        num_drafts, top_n: of the deployment, 0 without a drafter.
        """
        draws = {mode: DraftSampling(mode, float(mode is not Mode.GREEDY)) for mode in Mode}
        q = _uniform_q(num_drafts, min(top_n, vocab_size))
        for modes in ([Mode.GREEDY], [Mode.REJECTION], [Mode.COUPLED], list(Mode)):
            for top_p, proposed, k in itertools.product((1.0, 0.9), (None, q), {0, num_drafts}):
                samplings = [replace(draws[mode], top_p=top_p) for mode in modes]
                logits = torch.zeros(len(modes) * (k + 1), vocab_size, device=self._device)
                b = len(modes)
                q_of_all = [proposed if k else None] * b
                self._verify(verification_batch(logits, samplings, [0] * b, [[0] * k] * b, q_of_all))

    def profile(self, logits: Tensor, num_drafts: int, top_n: int) -> None:
        """Allocates what the largest step does: sampled drafts, top_p, and logprobs of processed logits.

        Processors' own memory is left out, as in vLLM. logits: [R, V], num_drafts + 1 rows for each request. top_n: as
        in warm_up.
        """
        logits = logits.to(torch.float32)
        raw = logits.clone()
        b = len(logits) // (num_drafts + 1)
        sampling = DraftSampling(Mode.REJECTION, 1.0, top_p=0.9)
        q = _uniform_q(num_drafts, min(top_n, logits.shape[1]))
        batch = verification_batch(logits, [sampling] * b, [0] * b, [[0] * num_drafts] * b, [q] * b)
        self._logprobs(raw, batch, self._verify(batch).token_ids, min(PROFILED_LOGPROBS, logits.shape[1]))

    def _process(
        self, logits: Tensor, requests: Sequence[Request], drafts: Sequence[list[int]], metadata: SamplingMetadata
    ) -> Tensor:
        num_rows = [len(ids) + 1 for ids in drafts]
        (owner,) = to_device([np.arange(len(requests)).repeat(num_rows)], self._device)
        outputs: list[list[int]] = []
        for request, ids in zip(requests, drafts, strict=True):
            output = request.output_token_ids if reads_output(request.params) else None
            outputs += [[] if output is None else [*output, *ids[:j]] for j in range(len(ids) + 1)]
        self._tell_processors(requests, num_rows)
        starts = [0, *itertools.accumulate(num_rows)]
        rows = replace(
            metadata,
            output_token_ids=outputs,
            allowed_token_ids_mask=_of_rows(metadata.allowed_token_ids_mask, owner),
            bad_words_token_ids={
                row: words
                for index, words in metadata.bad_words_token_ids.items()
                for row in range(starts[index], starts[index + 1])
            },
            prompt_token_ids=_of_rows(metadata.prompt_token_ids, owner),
            logitsprocs=self._processors,
            spec_token_ids=None,
        )
        if not metadata.no_penalties:
            rows.presence_penalties = metadata.presence_penalties[owner]
            rows.frequency_penalties = metadata.frequency_penalties[owner]
            rows.repetition_penalties = metadata.repetition_penalties[owner]
        return self._sampler.apply_logits_processors(logits, rows, predict_bonus_token=False)

    def _tell_processors(self, requests: Sequence[Request], num_rows: Sequence[int]) -> None:
        """Tells vLLM's processors of min_tokens and logit_bias that every row is a request.

        min_tokens looks only at the length of an output.
        """
        added: list[Any] = []
        for request, count in zip(requests, num_rows, strict=True):
            for length in range(request.num_output_tokens, request.num_output_tokens + count):
                added.append((len(added), request.params, None, range(length)))
        gone = range(len(added), self._num_rows)
        self._num_rows = len(added)
        for processor in self._processors.all:
            processor.update_state(BatchUpdate(batch_size=len(added), removed=gone, added=added, moved=[]))

    def _logprobs(
        self,
        raw: Tensor,
        batch: VerificationBatch,
        token_ids: Tensor,
        count: int,
        named: Mapping[int, list[int]] = MappingProxyType({}),
    ) -> LogprobsTensors:
        """Returns the logprobs of token_ids [B, W] flattened, as vLLM's parser of drafted rounds takes them.

        raw: float32 [R, V]. named: by the index of a request, the tokens it asked for instead of the most likely ones
        (`logprob_token_ids`).
        """
        offset = torch.arange(token_ids.shape[1], device=self._device)
        exists = offset <= batch.num_drafts.unsqueeze(1)
        row = torch.where(exists, batch.first_row.unsqueeze(1) + offset, 0).flatten()
        chosen = token_ids.flatten().clamp_min(0).to(torch.int64)
        logprobs, width = self._sampler.compute_logprobs(raw)[row], token_ids.shape[1]
        likely = self._sampler.gather_logprobs(logprobs, max(count, *map(len, named.values()), 0), chosen)
        for index, ids in named.items():
            rows = slice(index * width, (index + 1) * width)
            (wanted,) = to_device([np.array(ids)], self._device)
            likely.logprob_token_ids[rows, 1 : len(ids) + 1] = wanted.to(likely.logprob_token_ids.dtype)
            likely.logprobs[rows, 1 : len(ids) + 1] = logprobs[rows][:, wanted]
        return likely


def _is_processed(requests: Sequence[Request], metadata: SamplingMetadata) -> bool:
    return (
        not metadata.no_penalties
        or bool(metadata.bad_words_token_ids)
        or metadata.allowed_token_ids_mask is not None
        or any(
            request.params.logit_bias or request.num_output_tokens < request.params.min_tokens for request in requests
        )
    )


def reads_output(params: Any) -> bool:
    """Returns whether a choice depends on the tokens before it. params: vLLM's SamplingParams."""
    penalties = params.presence_penalty, params.frequency_penalty, params.repetition_penalty
    return bool(params.bad_words_token_ids) or penalties != (0.0, 0.0, 1.0)


def _of_rows(values: Tensor | None, owner: Tensor) -> Tensor | None:
    return None if values is None else values[owner]


def verification_batch(
    logits: Tensor,
    samplings: Sequence[DraftSampling],
    positions: Sequence[int],
    drafts: Sequence[Sequence[int]],
    q: Sequence[SparseQ | None],
) -> VerificationBatch:
    """Builds the kernels' batch.

    Args:
        logits: float32 [R, V]. All else has one entry for each request.
        positions: in the sequence, of the token of a request's first row.
        q: as in Draft.
    """
    num_drafts = np.array([len(ids) for ids in drafts], np.int64)
    draft_ids = np.array([token for ids in drafts for token in ids], np.int64)
    sampling = Sampling(
        mode=np.array([int(each.mode) for each in samplings], np.int64),
        temperature=np.array([each.temperature for each in samplings], np.float32),
        top_k=np.array([each.top_k for each in samplings], np.int64),
        top_p=np.array([each.top_p for each in samplings], np.float32),
        min_p=np.array([each.min_p for each in samplings], np.float32),
        seed=np.array([each.seed for each in samplings], np.int64),
        position=np.array(positions, np.int64),
    )
    q_rows = _q_rows(q, num_drafts.tolist(), draft_ids, logits.shape[1])
    return VerificationBatch.build(logits, num_drafts, draft_ids, sampling, *q_rows)


def _uniform_q(num_drafts: int, n: int) -> SparseQ | None:
    """Returns a uniform distribution over n tokens for each of num_drafts drafts; None without drafts."""
    if not num_drafts or not n:
        return None
    ids = np.tile(np.arange(n, dtype=np.int32), (num_drafts, 1))
    return SparseQ(ids, np.full(ids.shape, 1 / n, dtype=np.float32))


def _q_rows(
    q: Sequence[SparseQ | None], num_drafts: Sequence[int], draft_ids: NDArray[np.int64], vocab_size: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]] | tuple[()]:
    """Returns ids and probabilities of all drafts' q, [D, n] each; nothing where no request has a q.

    A request without q gets one-hot rows, the distribution of a drafter that does not sample. All q of one link have
    the same n.
    """
    n = next((entry.ids.shape[1] for entry in q if entry is not None), 0)
    if not n:
        return ()
    ids = (draft_ids[:, None] + np.arange(n)) % vocab_size
    probs = np.zeros(ids.shape, np.float32)
    probs[:, 0] = 1.0
    start = 0
    for entry, count in zip(q, num_drafts, strict=True):
        if entry is not None:
            ids[start : start + count], probs[start : start + count] = entry.ids[:count], entry.probs[:count]
        start += count
    return ids, probs
