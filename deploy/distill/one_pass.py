"""Trains a draft model that predicts all drafts of a round in one pass, by mask tokens behind the text (PARD).

A round's input is the text and K - 1 mask tokens. In training, a text of N tokens stands once, and the mask tokens of
its rounds stand behind it. They see the text up to their round and the mask tokens before them in it. Their number
would be K - 1 times the text's, so later ones are left out at random, and with a mask token all that come after it in
its round (conditional drop, An et al., arXiv 2504.18583).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from outrider.actors.learning.train import POSITIONS, Predictions, Trainer
from outrider.cluster.config import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

    from outrider.actors.learning.texts import Text

RETENTION, LEAST_RETENTION = 0.7, 0.2
"""Share of the rounds whose next mask token is kept, and the lowest share of all: the paper's."""


def choose_mask_token(checkpoint: Path, vocab_size: int, texts: Sequence[Text]) -> int:
    """Returns an id that stands in no text: one without a token, else a special token. Raises ConfigError."""
    from outrider.deploy.distill.models import ends_of, load_tokenizer

    tokenizer = load_tokenizer(checkpoint)
    if len(tokenizer) < vocab_size:
        return vocab_size - 1
    used = ends_of(checkpoint).union(*(text.ids.tolist() for text in texts))
    special = [token for token, about in tokenizer.added_tokens_decoder.items() if about.special and token not in used]
    if not special:
        raise ConfigError("--one-pass: TARGET has no unused special token to mark drafts with; use another target")
    return max(special)


class OnePassTrainer(Trainer):
    """Trains a draft model in place."""

    def __init__(
        self,
        drafter: PreTrainedModel,
        mask_token: int,
        num_drafts: int,
        learning_rate: float,
        dtype: torch.dtype,
        named_ids: Tensor | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(drafter, learning_rate, dtype, named_ids, seed)
        self._mask_token, self.num_drafts = mask_token, num_drafts

    def _predictions(self, texts: Sequence[Text], seed: int | None = None) -> Predictions:
        ids = self._padded(texts)
        width = ids.shape[1]
        chance = None if seed is None else torch.Generator().manual_seed(seed)
        drafts = [self._drafts(len(text.ids) - text.start, chance) for text in texts]
        # The first draft of a round comes from the last token of the text, each other one from a mask token.
        masks = [
            (text.start - 1 + starts[ahead > 0], ahead[ahead > 0])
            for text, (starts, ahead) in zip(texts, drafts, strict=True)
        ]
        last, order = (_filled_up(part) for part in zip(*masks, strict=True))
        self.drafter.train(torch.is_grad_enabled())
        with self._precision():
            states = self.drafter.model(
                torch.cat([ids, torch.full_like(last, self._mask_token, device=ids.device)], 1),
                attention_mask=self._attention(width, last, order).to(ids.device),
                position_ids=torch.cat([_places(ids), (last + order).clamp(min=0)], 1).to(ids.device),
                use_cache=False,
            ).last_hidden_state
        hidden, begins, num_tokens = [], [], 0
        for row, (text, (starts, ahead)) in enumerate(zip(texts, drafts, strict=True)):
            behind = width - 1 + (ahead > 0).cumsum(0)
            hidden.append(states[row, torch.where(ahead > 0, behind, text.start - 1 + starts)])
            begins.append(num_tokens + starts)
            num_tokens += len(text.ids) - text.start
        return Predictions(torch.cat(hidden), torch.cat(begins), torch.cat([ahead for _, ahead in drafts]))

    def _drafts(self, length: int, chance: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Returns which drafts of the rounds at each token of an answer are predicted: starts and ahead, int64 [D]."""
        ahead = torch.arange(self.num_drafts)
        kept = torch.arange(length)[:, None] + ahead < length
        if chance is not None:
            shares = (RETENTION**ahead).clamp(min=LEAST_RETENTION)
            kept &= torch.rand(length, 1, generator=chance) < shares  # one number a round: no gaps
        starts, ahead = kept.nonzero(as_tuple=True)
        return starts, ahead

    def _attention(self, width: int, last: Tensor, order: Tensor) -> Tensor:
        """Returns what is added to the attention's logits, [B, 1, width + R, width + R]: 0 where a token sees another.

        Args:
            width: tokens of a text.
            last: int64 [B, R], the last token of the text that a mask token sees.
            order: int64 [B, R], its number in its round, from 1.
        """
        text = _places(last.new_empty(len(last), width))
        last_seen = torch.cat([text, last], 1)[:, :, None]
        own_order = torch.cat([torch.zeros_like(text), order], 1)[:, :, None]
        same_round = (last[:, None] == last_seen) & (order[:, None] <= own_order) & (own_order != 0)
        sees = torch.cat([text[:, None] <= last_seen, same_round], 2)
        return torch.zeros(sees.shape, dtype=self._dtype).masked_fill(~sees, torch.finfo(self._dtype).min)[:, None]


def _places(ids: Tensor) -> Tensor:
    """Returns the place of each token in its text, int64 as ids [B, N], on the CPU."""
    return torch.arange(ids.shape[1]).expand(*ids.shape)


def _filled_up(rows: Sequence[Tensor]) -> Tensor:
    """Returns rows of different lengths as one tensor [B, R], with -1 behind them, which no text's token is."""
    filled = pad_sequence(list(rows), batch_first=True, padding_value=-1)
    return functional.pad(filled, (0, -filled.shape[1] % POSITIONS), value=-1)
