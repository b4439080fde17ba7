"""A rank of the draft model: vLLM's worker, plus a step over rows that the drafter plans (``paged_forward.py``).

`CutHead` is the model's output head cut to the tokens of a draft vocabulary, where there is one.
"""

from __future__ import annotations

from collections import Counter
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
    """Holds a copy of some rows of the head, [N, hidden size], and what vLLM's logits processor does after it."""

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
        """What the columns of `logits` stand for."""
        if self._subset is None:
            self._subset = TokenSubset(self._ids)
        return self._subset

    def replace(self, changes: Sequence[tuple[int, int]]) -> None:
        """(slot, token id): other tokens in some places. Does not wait for a GPU."""
        if not changes:
            return
        slots, tokens = to_device([*np.array(changes, np.int64).T], self._ids.device)
        self._ids = self._ids.index_copy(0, slots, tokens)
        self._weight.index_copy_(0, slots, self._whole.detach()[tokens])
        self._subset = None

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, N] of hidden states [rows, hidden size]."""
        bias = None if self._bias is None else self._bias[self._ids]
        logits = torch.nn.functional.linear(hidden, self._weight, bias)
        if self._soft_cap is not None:
            logits = torch.tanh(logits / self._soft_cap) * self._soft_cap
        return logits if self._scale == 1.0 else logits * self._scale


class DraftWorker(worker_class()):  # type: ignore[misc]
    _paged: PagedForward | None = None
    _head: CutHead | None = None
    _adapters: Sequence[LoRARequest] = ()
    _graph_hits: Counter[str]

    @torch.inference_mode()
    def draft(self, plan: StepPlan) -> list[Drawn | None]:
        """Runs one step and waits once for the device, at its end: by the read of what was drawn, or without one.

        Rank 0 returns what was drawn after each row, None where nothing was. The others return nothing: what they feed
        next comes with the next plan, so ranks cannot disagree.
        """
        forward = self._paged
        if forward is None:
            forward = self._paged = PagedForward(self.model_runner, self._adapters)
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
            # The next step's attention metadata is built in pinned buffers that this step's copies read (FlashInfer's
            # plan keeps one), and this step's time must not count as the next one's.
            wait_for(self.model_runner.device)
            return [None] * len(plan.rows) if self.rank == 0 else []
        if head is None and plan.num_drawable is not None:
            logits = logits[:, : plan.num_drawable].contiguous()
        draws = [row.draw for row in plan.rows if row.draw is not None]
        drawn = iter(draw(logits, draws, None if head is None else head.subset))
        return [None if row.draw is None else next(drawn) for row in plan.rows]

    def load_weights_of_version(self, tensors: dict[str, Tensor]) -> None:
        """In place of those that are there; what is not named stays. vLLM shards and packs them as when it loaded the
        checkpoint."""
        self.model_runner.reload_weights(weights_iterator=iter(tensors.items()))

    def load_adapters(self, paths: list[str]) -> None:
        """Rows name them by their places, counted from 1."""
        self._adapters = [LoRARequest(path, number, path) for number, path in enumerate(paths, start=1)]
        for adapter in self._adapters:
            self.add_lora(adapter)

    def cut_head(self, token_ids: list[int]) -> None:
        """From now on draft from these tokens alone."""
        self._head = CutHead(self.model_runner.model, token_ids)

    def count_graphs(self) -> None:
        """Once: from now on each CUDA graph that vLLM's dispatcher gives a step is counted."""
        hits = self._graph_hits = Counter()
        dispatcher = self.model_runner.cudagraph_dispatcher
        inner = dispatcher.dispatch

        def dispatch(*args: Any, **kwargs: Any) -> Any:
            mode, descriptor = inner(*args, **kwargs)
            hits[f"{mode.name} {descriptor.num_tokens}"] += 1
            return mode, descriptor

        dispatcher.dispatch = dispatch

    def take_graph_hits(self) -> dict[str, int]:
        """By mode and padded tokens (``FULL 16``): steps since the last call. A CPU asks for none."""
        found = dict(self._graph_hits)
        self._graph_hits.clear()
        return found
