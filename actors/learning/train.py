"""Trains a drafter on the target's texts, by a plain loop in PyTorch.

accelerate would add nothing here: there is one process on one device, and mixed precision is a line of torch's.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

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
WIDTH, POSITIONS = 32, 64
"""What a step computes is filled up to multiples of these: kernels are made for each new shape on a CPU, and kept for
so many of them."""


class Predictions(NamedTuple):
    """Holds what predicts P tokens of the answers: token starts + ahead of all answers, each int64 [P] on the CPU, as
    draft number `ahead` of a round that starts at token `starts`. hidden: [P, H], the output head's input."""

    hidden: Tensor
    starts: Tensor
    ahead: Tensor


def fastest_dtype(device: str) -> torch.dtype:
    """Chooses the type of a forward pass: bfloat16 on a GPU and on a CPU that multiplies it faster than float32.

    Intel's without AMX does not, for all its AVX-512 bf16: matrix products take 1.8 times as long, a step 1.5 times.
    """
    if device != "cpu":
        return torch.bfloat16
    known = torch.cpu.get_capabilities()
    fast = known.get("amx_bf16") or (known.get("avx512_bf16") and "Intel" not in known.get("cpu_name", ""))
    return torch.bfloat16 if fast else torch.float32


class Trainer:
    """Updates a drafter in place, and measures it. Kinds of drafters differ in `_predictions`."""

    num_drafts = 1
    """Drafts that are predicted from one text; a sequential drafter's others depend on the drafts before them."""

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
        self.drafter = drafter
        if drafter.device.type == "cpu":
            drafter.set_attn_implementation("eager")  # torch's fused one takes far longer backwards there
        drafter.requires_grad_(True)
        for module in (drafter.get_input_embeddings(), drafter.get_output_embeddings()):
            module.weight.requires_grad_(False)
            module.weight.data = module.weight.data.to(dtype)
        trained = {name: parameter for name, parameter in drafter.named_parameters() if parameter.requires_grad}
        self._set_up(trained, drafter.get_output_embeddings().weight, learning_rate, dtype, named_ids, seed)

    def _set_up(
        self,
        trained: dict[str, Tensor],
        head: Tensor,
        learning_rate: float,
        dtype: torch.dtype,
        named_ids: Tensor | None,
        seed: int,
    ) -> None:
        """Keeps what is trained, by name, and the output head [V, H], which may be trained too."""
        self.trained, self._head = trained, head
        self._learning_rate, self._dtype, self._seed = learning_rate, dtype, seed
        self._device = head.device
        self.named_ids = named_ids
        self.vocab_size = head.shape[0]
        self.skipped = 0
        """Steps whose gradient was not finite: one such update would leave a drafter of nothing else."""

        self.optimizer = torch.optim.AdamW(
            trained.values(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )

    def step(self, number: int, rate: float, batch: Sequence[Text]) -> tuple[float, float]:
        """Makes one update. rate: share of the learning rate. Returns the loss and the mean overlap.

        The same number draws the same tokens, so that a resumed run does what an uninterrupted one does.
        """
        chance = random.Random(f"{self._seed}:{number}")
        ids = self._draft_ids(batch, chance.getrandbits(62))
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate * rate
        loss, overlap = self._loss(batch, ids, chance.getrandbits(62))
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
        """Yields for each text, by the token of its answer [A, num_drafts] at which a round starts and by draft,
        whether the likeliest draft is the text's token, and the overlap; float32 on the CPU, 0 behind the answer's end.
        The likeliest draft is of all tokens, draft vocabulary or not."""
        every = DraftIds.every(self.vocab_size, self._device)
        size = max(EVAL_BATCH // self.num_drafts, 1)
        with torch.no_grad():
            for batch in (texts[at : at + size] for at in range(0, len(texts), size)):
                ids, top_ids, top_log_p = self._answers(batch)
                same, overlap = torch.zeros(2, len(ids), self.num_drafts)
                for hidden, starts, ahead in zip(
                    *(part.split(EVAL_ROWS) for part in self._predictions(batch)), strict=True
                ):
                    logits, at = self._logits(hidden, None), (starts + ahead).to(self._device)
                    same[starts, ahead] = (logits.argmax(-1) == ids[at]).float().cpu()
                    overlap[starts, ahead] = distances(*every.log_q(logits, top_ids[at]), top_log_p[at])[1].cpu()
                lengths = [len(text.ids) - text.start for text in batch]
                yield from zip(same.split(lengths), overlap.split(lengths), strict=True)

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

    def _precision(self) -> torch.autocast:
        return torch.autocast(self._device.type, dtype=self._dtype, enabled=self._dtype != torch.float32)

    def _answers(self, texts: Sequence[Text]) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the tokens of all answers, int64 [A], and the target's likeliest at each: int64, float32 [A, T]."""
        parts = [text.ids[text.start :] for text in texts], [text.top_ids for text in texts]
        ids, top_ids = (torch.from_numpy(np.concatenate(part)).long().to(self._device) for part in parts)
        return ids, top_ids, torch.from_numpy(np.concatenate([t.top_log_p for t in texts])).float().to(self._device)

    def _padded(self, texts: Sequence[Text]) -> Tensor:
        """Returns the texts' tokens, filled up behind, where it is not seen: no mask is needed."""
        ids = pad_sequence([torch.from_numpy(text.ids).long() for text in texts], batch_first=True)
        return functional.pad(ids, (0, -ids.shape[1] % WIDTH)).to(self._device)

    def _predictions(self, texts: Sequence[Text], seed: int | None = None) -> Predictions:
        """Runs the drafter over texts. seed: of what a kind of drafter leaves out in training; None: nothing."""
        self.drafter.train(torch.is_grad_enabled())
        with self._precision():
            states = self.drafter.model(self._padded(texts), use_cache=False).last_hidden_state
        hidden = torch.cat([states[row, text.start - 1 : len(text.ids) - 1] for row, text in enumerate(texts)])
        starts = torch.arange(len(hidden))
        return Predictions(hidden, starts, torch.zeros_like(starts))

    def _logits(self, hidden: Tensor, ids: Tensor | None) -> Tensor:
        with self._precision():
            return head(hidden, self._head, ids)

    def _loss(self, texts: Sequence[Text], ids: DraftIds, seed: int) -> tuple[Tensor, Tensor]:
        """Returns the mean over the drafts of a round of the loss, and of the overlap without gradient."""
        hidden, starts, ahead = self._predictions(texts, seed)
        _, top_ids, top_log_p = self._answers(texts)
        count = len(hidden)
        places = torch.arange(count + -count % POSITIONS)
        real, places = places < count, places.clamp(max=count - 1)  # the last one again, of no weight
        at, ahead = (starts + ahead)[places].to(self._device), ahead[places]
        log_q, named = ids.log_q(self._logits(hidden[places.to(self._device)], ids.ids), top_ids[at])
        terms = distances(log_q, named, top_log_p[at])
        weights = [(real & (ahead == draft)).float().to(self._device) for draft in range(self.num_drafts)]
        losses, overlaps = zip(*(mixed(*terms, weight) for weight in weights), strict=True)
        return torch.stack(losses).mean(), torch.stack(overlaps).mean()
