"""Runs one rank of the draft model: vLLM's worker with a step over the drafter's rows (``paged_forward.py``).

`CutHead` is the model's output head cut to the tokens of a draft vocabulary, where there is one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.lora.request import LoRARequest

from outrider.actors.drafter.draw import draw
from outrider.actors.drafter.engine import Drawn, StepPlan
from outrider.actors.verification.search import TokenSubset
from outrider.actors.verification.transfer import to_device, wait_for
from outrider.actors.vllm_adapter.engine_args import worker_class
from outrider.actors.vllm_adapter.paged_forward import PagedForward
from outrider.cluster.config import ConfigError


class CutHead:
    """Computes the logits of some tokens, by a copy of their rows of the output head, [N, hidden size]."""

    def __init__(self, model: Any, token_ids: Sequence[int]) -> None:
        """Raises ConfigError for a model whose head is no plain matrix on one rank."""
        model = model.get_language_model() if hasattr(model, "get_language_model") else model
        head, processor = getattr(model, "lm_head", None), getattr(model, "logits_processor", None)
        weight = getattr(head, "weight", None)
        if not isinstance(weight, Tensor) or processor is None or not weight.is_floating_point() or weight.ndim != 2:
            raise ConfigError(
                "drafter.draft_vocab_size: this draft model's output head is not a plain matrix (quantised, or under "
                "another name); set draft_vocab_size: 0"
            )
        self._whole, self._bias = weight, getattr(head, "bias", None)
        self._soft_cap, self._scale = processor.soft_cap, processor.scale
        self._ids = torch.tensor(token_ids, dtype=torch.int64, device=weight.device)
        self._weight = weight.detach()[self._ids].contiguous()
        self._subset: TokenSubset | None = None

    @property
    def subset(self) -> TokenSubset:
        """Returns the tokens that the columns of `logits` stand for."""
        if self._subset is None:
            self._subset = TokenSubset(self._ids)
        return self._subset

    def replace(self, changes: Sequence[tuple[int, int]]) -> None:
        """Replaces the tokens in some slots, given as (slot, token id). Does not wait for a GPU."""
        if not changes:
            return
        slots, tokens = to_device([*np.array(changes, np.int64).T], self._ids.device)
        self._ids = self._ids.index_copy(0, slots, tokens)
        self._weight.index_copy_(0, slots, self._whole.detach()[tokens])
        self._subset = None

    def forbid(self, logits: Tensor, token_id: int) -> None:
        """Sets the logit of a token to minus infinity, where it has a column."""
        logits.masked_fill_(self._ids == token_id, -math.inf)

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits, [rows, N], of hidden states, [rows, hidden size]."""
        bias = None if self._bias is None else self._bias[self._ids]
        logits = torch.nn.functional.linear(hidden, self._weight, bias)
        if self._soft_cap is not None:
            logits = torch.tanh(logits / self._soft_cap) * self._soft_cap
        return logits if self._scale == 1.0 else logits * self._scale


class DraftWorker(worker_class()):  # type: ignore[misc]
    """Adds draft steps, weights of a version and a cut head to vLLM's worker."""

    _paged: PagedForward | None = None
    _head: CutHead | None = None
    _adapters: Sequence[LoRARequest] = ()
    _mask_id: int | None = None

    @torch.inference_mode()
    def draft(self, plan: StepPlan) -> list[list[Drawn]]:
        """Runs one step, and waits for the device once, at its end.

        Rank 0 returns what was drawn for each row. The others return nothing: their next tokens come with the next
        plan, so ranks cannot disagree.
        """
        forward = self._paged
        if forward is None:
            forward = self._paged = PagedForward(self.model_runner, self._adapters, self._mask_id or 0)
        for copies in (plan.restores, plan.copies):
            if copies:
                forward.copy_blocks(copies)
        head = self._head
        if head is not None:
            head.replace(plan.vocabulary_changes)
        hidden = forward(plan.rows)
        logits = None
        if len(hidden):
            logits = self.model_runner.model.compute_logits(hidden) if head is None else head.logits(hidden)
        if logits is None or self.rank != 0:
            # The next step builds attention metadata in pinned buffers that this step's copies still read (FlashInfer's
            # plan keeps one), and this step's time must not count as the next one's.
            wait_for(self.model_runner.device)
            return [[] for _ in plan.rows] if self.rank == 0 else []
        if head is None and plan.num_drawable is not None:
            logits = logits[:, : plan.num_drawable].contiguous()
        if self._mask_id is not None and head is not None:
            head.forbid(logits, self._mask_id)
        elif self._mask_id is not None:
            logits[:, self._mask_id : self._mask_id + 1] = -math.inf
        draws = [one for row in plan.rows for one in row.draws]
        drawn = iter(draw(logits, draws, None if head is None else head.subset))
        return [list(itertools.islice(drawn, len(row.draws))) for row in plan.rows]

    def load_weights_of_version(self, tensors: dict[str, Tensor]) -> None:
        """Replaces the named weights. vLLM shards and packs them as when it loaded the checkpoint."""
        self.model_runner.reload_weights(weights_iterator=iter(tensors.items()))

    def load_adapters(self, paths: list[str]) -> None:
        """Loads LoRA adapters. Rows name them by their number, from 1."""
        self._adapters = [LoRARequest(path, number, path) for number, path in enumerate(paths, start=1)]
        for adapter in self._adapters:
            self.add_lora(adapter)

    def set_mask(self, mask_id: int) -> None:
        """Sets the token of masks, which is never drawn. Call it before the first step."""
        self._mask_id = mask_id

    def cut_head(self, token_ids: list[int]) -> None:
        """Cuts the output head to these tokens."""
        self._head = CutHead(self.model_runner.model, token_ids)
