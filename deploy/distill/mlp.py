"""Trains an MLP speculator on the target's texts, as IBM's speculators were trained.

Head i predicts token n + i + 2 of a text from the target's last hidden state at token n and the tokens up to n + i + 1,
and the losses of all heads are averaged (arXiv 2404.19124; the loss is ours). Hidden states are computed when a text is
first trained on, and kept in memory as far as there is room.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outrider.actors.drafter.mlp_speculator import ARCHITECTURE, Head, MLPSpeculator, SpeculatorShape
from outrider.actors.learning.train import Predictions, Trainer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from outrider.actors.learning.texts import Text

KEPT_BYTES = 4 << 30
"""The most hidden states that are kept: of 1.9 million tokens of SmolLM2-135M in float32."""


def config_of(document: Mapping[str, Any], num_heads: int) -> dict[str, Any]:
    """Returns the config.json of a speculator for a target. document: the target's."""
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "mlp_speculator",
        "vocab_size": document["vocab_size"],
        "emb_dim": document["hidden_size"],
        "inner_dim": document["hidden_size"],
        "n_predict": num_heads,
        "tie_weights": True,
        "scale_input": True,
    }


def from_target(target: PreTrainedModel, config: Mapping[str, Any], seed: int) -> MLPSpeculator:
    """Returns a float32 speculator with the target's embeddings, scaled as random ones would be, and its head.

    Few texts name each token too seldom to learn its embedding from nothing; IBM trained on billions of tokens.
    """
    shape = SpeculatorShape.of(config)
    generator = torch.Generator().manual_seed(seed)
    deviation = shape.inner_dim**-0.5

    emb, head = (each().weight.detach().float() for each in (target.get_input_embeddings, target.get_output_embeddings))

    def projection(columns: int) -> Tensor:
        return (torch.randn(shape.inner_dim, columns, generator=generator) * deviation).to(head.device)

    first = Head(
        emb * (deviation / emb.std()),
        projection(shape.emb_dim),
        head.new_ones(shape.inner_dim),
        head.new_zeros(shape.inner_dim),
        head.clone(),
    )
    others = first._replace(proj=projection(shape.inner_dim))
    return MLPSpeculator(shape, [first, *[others] * (shape.n_predict - 1)])


class MLPTrainer(Trainer):
    """Trains a speculator in place. The target stays as it is."""

    def __init__(
        self,
        target: PreTrainedModel,
        speculator: MLPSpeculator,
        learning_rate: float,
        dtype: torch.dtype,
        seed: int = 0,
    ) -> None:
        self._target, self._speculator = target, speculator
        self.num_drafts = speculator.shape.n_predict
        self._kept: dict[Text, Tensor] = {}
        self._room = KEPT_BYTES
        trained = tensors_of(speculator)
        for tensor in trained.values():
            tensor.requires_grad_(True)
        self._set_up(trained, speculator.heads[0].head, learning_rate, dtype, None, seed)

    def _predictions(self, texts: Sequence[Text], seed: int | None = None) -> Predictions:
        lengths = torch.tensor([len(text.ids) - text.start for text in texts])
        rows = torch.arange(len(texts)).repeat_interleave(lengths)
        sizes = torch.tensor([len(text.ids) for text in texts])
        ends, starts = sizes[rows], torch.arange(len(rows))
        places = starts - (lengths.cumsum(0) - sizes)[rows]  # of the token at which a round starts, in its text
        ids = self._padded(texts)
        state = self._speculator.first_state(torch.cat(self._hidden(texts)))
        parts = []
        for index in range(self.num_drafts):
            inside = places + index < ends
            state, rows, ends, starts, places = (each[inside] for each in (state, rows, ends, starts, places))
            with self._precision():
                state = self._speculator.next(index, state, ids[rows, places + index - 1])
            parts.append(Predictions(state, starts, torch.full_like(starts, index)))
        return Predictions(*(torch.cat(each) for each in zip(*parts, strict=True)))

    def _hidden(self, texts: Sequence[Text]) -> list[Tensor]:
        """Returns what the rounds of each text are drafted from, [A, H]: the target's hidden state at the position
        before the last token."""
        found = {text: self._kept[text] for text in texts if text in self._kept}
        if new := [text for text in texts if text not in found]:
            with torch.no_grad(), self._precision():
                states = self._target.model(self._padded(new), use_cache=False).last_hidden_state
            for text, hidden in zip(new, states, strict=True):
                places = torch.arange(text.start - 2, len(text.ids) - 2).clamp(min=0)
                found[text] = hidden[places]
                self._room -= found[text].nbytes
                if self._room > 0:
                    self._kept[text] = found[text]
        return [found[text] for text in texts]


def tensors_of(speculator: MLPSpeculator) -> dict[str, Tensor]:
    """Returns the tensors of a speculator with tied weights, under the names that they have in a checkpoint."""
    first, last = speculator.heads[0], speculator.heads[-1]
    names = ("emb.0.weight", "proj.0.weight", "ln.0.weight", "ln.0.bias", "head.0.weight")
    found = dict(zip(names, first, strict=True))
    if first is not last:
        found["proj.1.weight"] = last.proj
    return {f"speculator.{name}": tensor for name, tensor in found.items()}
