"""Trains a drafter on the target's texts, by a plain loop in PyTorch.

accelerate would add nothing here: there is one process on one device, and mixed precision is a line of torch's.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from outrider.actors.learning.loss import DraftIds, distances, head, mixed
from outrider.actors.learning.texts import Text

if TYPE_CHECKING:
    from transformers import PreTrainedModel

EVAL_BATCH = 16
EVAL_ROWS = 512
"""Positions whose logits are in memory at once."""

SAMPLED_IDS = 2048
"""Tokens beside the named ones that stand for all others, drawn anew every step. A step takes 0.46 s with these and
1.47 s with the whole head of 49,152, for the same gain (docs/learning.md)."""

MAX_GRADIENT = 1.0
_WIDTH, _POSITIONS = 32, 64
"""What a step computes is filled up to multiples of these: kernels are made for each new shape on a CPU, and kept for
so many of them."""


def fastest_dtype(device: str) -> torch.dtype:
    """Chooses the type of a forward pass: bfloat16 on a GPU and on a CPU with instructions for it, else float32."""
    if device != "cpu":
        return torch.bfloat16
    known = torch.cpu.get_capabilities()
    return torch.bfloat16 if known.get("avx512_bf16") or known.get("amx_bf16") else torch.float32


class Trainer:
    """Updates a drafter in place, and measures it."""

    def __init__(
        self,
        drafter: PreTrainedModel,
        learning_rate: float,
        dtype: torch.dtype,
        named_ids: Tensor | None = None,
        seed: int = 0,
    ) -> None:
        """drafter: float32; its embeddings and head stay as they are, in dtype. dtype: of its forward pass; bfloat16 is
        mixed with float32 where torch says so. named_ids: the draft vocabulary, ascending; None: what the target names
        in a step's texts."""
        self.drafter, self._learning_rate, self._dtype, self._seed = drafter, learning_rate, dtype, seed
        self._device = drafter.device
        if self._device.type == "cpu":
            drafter.set_attn_implementation("eager")  # torch's fused one takes far longer backwards there
        drafter.requires_grad_(True)
        for module in (drafter.get_input_embeddings(), drafter.get_output_embeddings()):
            module.weight.requires_grad_(False)
            module.weight.data = module.weight.data.to(dtype)
        self._head: Tensor = drafter.get_output_embeddings().weight
        self.named_ids = named_ids
        self.vocab_size = self._head.shape[0]
        self.trained = {name: parameter for name, parameter in drafter.named_parameters() if parameter.requires_grad}
        self.skipped = 0
        """Steps whose gradient was not finite: one such update would leave a drafter of nothing else."""

        self.optimizer = torch.optim.AdamW(
            self.trained.values(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )

    def step(self, number: int, rate: float, batch: Sequence[Text]) -> tuple[float, float]:
        """Makes one update. rate: share of the learning rate. Returns the loss and the mean overlap.

        The same number draws the same tokens, so that a resumed run does what an uninterrupted one does.
        """
        ids = self._draft_ids(batch, random.Random(f"{self._seed}:{number}").getrandbits(62))
        self.drafter.train()
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate * rate
        loss, overlap = mixed(*self._terms(batch, ids))
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.trained.values(), MAX_GRADIENT)
        if torch.isfinite(norm):
            self.optimizer.step()
        else:
            self.skipped += 1
        return float(loss.detach()), float(overlap)

    def acceptance(self, texts: Sequence[Text]) -> list[float]:
        """Returns the mean over the tokens of each text: of greedy ones whether the likeliest draft is the token, of
        others the probability that a draft drawn at temperature 1 is accepted."""
        return [
            float((same if text.sample == 0 else overlap).mean())
            for text, (same, overlap) in zip(texts, self.drafted(texts), strict=True)
        ]

    def drafted(self, texts: Sequence[Text]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields for each text, at each token of its answer, whether the likeliest draft is the token, and the overlap;
        float32 on the CPU. The likeliest draft is of all tokens, draft vocabulary or not."""
        self.drafter.eval()
        every = DraftIds.every(self.vocab_size, self._device)
        with torch.no_grad():
            for at in range(0, len(texts), EVAL_BATCH):
                batch = texts[at : at + EVAL_BATCH]
                likeliest, overlaps = [], []
                for hidden, top_ids, top_log_p in zip(
                    *(part.split(EVAL_ROWS) for part in self._predicting(batch)), strict=True
                ):
                    logits = head(hidden, self._head, None)
                    likeliest.append(logits.argmax(-1).cpu())
                    overlaps.append(distances(*every.log_q(logits, top_ids), top_log_p)[1].cpu())
                lengths = [len(text.ids) - text.start for text in batch]
                drafts, overlap = torch.cat(likeliest).split(lengths), torch.cat(overlaps).split(lengths)
                for text, drafted, shared in zip(batch, drafts, overlap, strict=True):
                    yield (drafted == torch.from_numpy(text.ids[text.start :])).float(), shared

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies tensors into those that are trained."""
        with torch.no_grad():
            for name, parameter in self.trained.items():
                parameter.copy_(tensors[name])

    def _draft_ids(self, batch: Sequence[Text], seed: int) -> DraftIds:
        named = self.named_ids
        if named is None:
            named = torch.from_numpy(np.unique(np.concatenate([text.top_ids.ravel() for text in batch]))).long()
            named = named[named < self.vocab_size]
        return DraftIds.sampled(named, self.vocab_size, SAMPLED_IDS, seed, self._device)

    def _precision(self) -> AbstractContextManager[Any]:
        if self._dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self._dtype)

    def _predicting(self, texts: Sequence[Text]) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the drafter's hidden states [P, H] that predict the answers' tokens, and the target's likeliest."""
        ids = pad_sequence([torch.from_numpy(text.ids).long() for text in texts], batch_first=True)
        ids = functional.pad(ids, (0, -ids.shape[1] % _WIDTH))  # behind, where it is not seen: no mask is needed
        with self._precision():
            states = self.drafter.model(ids.to(self._device), use_cache=False).last_hidden_state
        hidden = [states[row, text.start - 1 : len(text.ids) - 1] for row, text in enumerate(texts)]
        top_ids, top_log_p = (
            torch.from_numpy(np.concatenate(part)).to(self._device)
            for part in ([text.top_ids for text in texts], [text.top_log_p for text in texts])
        )
        return torch.cat(hidden), top_ids.long(), top_log_p.float()

    def _terms(self, texts: Sequence[Text], ids: DraftIds) -> tuple[Tensor, Tensor, Tensor]:
        """Returns KL, overlap and weight [P]: at every token of the answers, and of no weight the last one again."""
        parts = self._predicting(texts)
        count = len(parts[0])
        places = torch.arange(count + -count % _POSITIONS, device=self._device)
        hidden, top_ids, top_log_p = (each[places.clamp(max=count - 1)] for each in parts)
        log_q, named = ids.log_q(head(hidden, self._head, ids.ids), top_ids)
        return *distances(log_q, named, top_log_p), (places < count).float()
