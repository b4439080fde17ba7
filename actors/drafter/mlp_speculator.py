"""Predicts the next tokens from the target's last hidden state, by one small head for each token.

The method is that of "Accelerating Production LLMs with Combined Token/Embedding Speculators" (arXiv 2404.19124), whose
checkpoints name the architecture ``MLPSpeculatorPreTrainedModel``. vLLM is not loaded here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from outrider.actors.drafter.draw import draw
from outrider.actors.drafter.engine import Draw, Drawn
from outrider.actors.learning.draft_models import tensors_of
from outrider.actors.verification.transfer import to_device
from outrider.cluster.config import ConfigError
from outrider.cluster.link.messages import DraftSampling
from outrider.cluster.modes import Mode

ARCHITECTURE = "MLPSpeculatorPreTrainedModel"

_EPSILON = 1e-6
_PREFIX = "speculator."
"""Begins the tensors' names in checkpoints of the first kind."""


@dataclass(frozen=True, slots=True)
class SpeculatorShape:
    """Holds the sizes of an MLP speculator, under the names of its config.json.

    emb_dim: width of the target's hidden states. inner_dim: width of the speculator's own states. n_predict: number of
    heads. tie_weights: all heads share their weights, but for the first projection. scale_input: the target's hidden
    states are normalised first.
    """

    vocab_size: int
    emb_dim: int
    inner_dim: int
    n_predict: int
    tie_weights: bool = False
    scale_input: bool = False

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> SpeculatorShape:
        """Reads a decoded config.json. Raises ConfigError."""
        if ARCHITECTURE not in (document.get("architectures") or [ARCHITECTURE]):
            raise ConfigError(
                f"drafter.model: is a {document['architectures'][0]}, and method mlp_speculator takes {ARCHITECTURE}; "
                "use another checkpoint or method"
            )
        try:
            sizes = {name: int(document[name]) for name in ("vocab_size", "emb_dim", "n_predict")}
            inner = int(document.get("inner_dim") or 0) or sizes["emb_dim"]
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"drafter.model: config.json of an MLP speculator lacks {error}; use another checkpoint"
            ) from None
        tie_weights, scale_input = (bool(document.get(name, False)) for name in ("tie_weights", "scale_input"))
        return cls(**sizes, inner_dim=inner, tie_weights=tie_weights, scale_input=scale_input)

    def check(self, vocab_size: int | None, hidden_size: int | None, num_speculative_tokens: int) -> None:
        """Raises ConfigError unless it fits a target of these sizes, if known, and drafts that many tokens."""
        for field, its, what, target in (
            ("vocab_size", self.vocab_size, "tokens", vocab_size),
            ("emb_dim", self.emb_dim, "numbers in a hidden state", hidden_size),
        ):
            if target is not None and its != target:
                raise ConfigError(
                    f"drafter.model: was made for {its} {what} ({field}), the target has {target}; use the checkpoint "
                    "that was trained for target.model"
                )
        if num_speculative_tokens > self.n_predict:
            raise ConfigError(
                f"speculation.num_speculative_tokens: {num_speculative_tokens} is above the {self.n_predict} heads of "
                "drafter.model (n_predict); lower it"
            )


class Head(NamedTuple):
    """Holds the weights that predict one token: emb [V, D], proj [D, H or D], scale and shift [D], head [V, D]."""

    emb: Tensor
    proj: Tensor
    scale: Tensor
    shift: Tensor
    head: Tensor


class MLPSpeculator:
    """Drafts for many requests at once. Head i turns state i and token i into state i + 1 and the logits of a token."""

    def __init__(self, shape: SpeculatorShape, heads: Sequence[Head]) -> None:
        self.shape, self.heads = shape, heads
        state_weight = 0.5 ** (0.5 / shape.n_predict)
        token_weight = math.sqrt((1 - state_weight**2) * (shape.inner_dim / 2))
        # The sum is normalised, so only the ratio of the weights counts.
        self._token_weight = token_weight / state_weight

    @classmethod
    def load(cls, directory: Path, dtype: torch.dtype, device: torch.device | str) -> MLPSpeculator:
        """Reads a checkpoint directory. Raises ConfigError for one that lacks weights or has others' shapes."""
        try:
            shape = SpeculatorShape.of(json.loads((directory / "config.json").read_text()))
        except (OSError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"drafter.model: {directory}/config.json cannot be read ({error})") from None
        tensors = {name.removeprefix(_PREFIX): each.to(device, dtype) for name, each in tensors_of(directory)}
        return cls(shape, _heads(shape, tensors))

    @property
    def num_bytes(self) -> int:
        """Returns the memory of its weights, tied ones once."""
        weights = {id(weight): weight.nbytes for head in self.heads for weight in head}
        return sum(weights.values())

    def warm_up(self, num_drafts: int, top_n: int) -> None:
        """Drafts once in every mode, which compiles kernels on an accelerator."""
        top_n = min(top_n, self.shape.vocab_size)
        hidden = self.heads[0].proj.new_zeros(1, self.shape.emb_dim)
        for mode in Mode:
            for top_p in (1.0, 0.9):
                sampling = DraftSampling(mode, 1.0, top_p=top_p, top_n=top_n if mode.samples_q else 0)
                self.draft(hidden, [0], [sampling], [1], [num_drafts])

    def next(self, index: int, state: Tensor, token_ids: Tensor) -> Tensor:
        """Applies one head up to its output layer. Returns the next state [B, D].

        Args:
            index: of the head.
            state: [B, H] of the target before head 0 (see `first_state`), [B, D] of the head before it else.
            token_ids: int64 [B], the tokens that follow the positions of the states.
        """
        head = self.heads[index]
        state = functional.linear(state, head.proj)
        state = state + functional.embedding(token_ids, head.emb) * self._token_weight
        return functional.gelu(_normalised(state) * head.scale + head.shift)

    def first_state(self, hidden: Tensor) -> Tensor:
        """Returns what head 0 takes of the target's hidden states [B, H]."""
        return _normalised(hidden) / math.sqrt(2) if self.shape.scale_input else hidden

    @torch.inference_mode()
    def draft(
        self, hidden: Tensor, token_ids: Sequence[int], samplings: Sequence[DraftSampling],
        positions: Sequence[int], counts: Sequence[int],
    ) -> list[list[Drawn]]:  # fmt: skip
        """Drafts counts[i] tokens after the last token of each text. A draft that cannot be drawn ends its request's.

        Args:
            hidden: [B, H], the target's at the position before each text's last token.
            token_ids: the texts' last tokens.
            samplings: the requests'.
            positions: the lengths of the texts: where the first draft stands, and its round starts.
            counts: 0 to n_predict.
        """
        drafts: list[list[Drawn]] = [[] for _ in token_ids]
        rows, last, state = list(range(len(counts))), list(token_ids), self.first_state(hidden)
        for index in range(max(counts, default=0)):
            going = [i for i, row in enumerate(rows) if counts[row] > index and len(drafts[row]) == index]
            if len(going) < len(rows):
                rows = [rows[i] for i in going]
                state = state[to_device([np.array(going, np.int64)], state.device)[0]]
            if not rows:
                break
            (tokens,) = to_device([np.array([last[row] for row in rows])], state.device)
            state = self.next(index, state, tokens)
            logits = functional.linear(state, self.heads[index].head)
            draws = [Draw(samplings[row], positions[row] + index, positions[row]) for row in rows]
            for row, drawn in zip(rows, draw(logits, draws), strict=True):
                if drawn.usable:
                    drafts[row].append(drawn)
                    last[row] = drawn.token
        return drafts


def _normalised(x: Tensor) -> Tensor:
    """Divides rows by their root mean square."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + _EPSILON)


def _heads(shape: SpeculatorShape, tensors: Mapping[str, Tensor]) -> list[Head]:
    """Returns the weights of every head. Tied ones may be stored once, under any head's name."""
    wide = (shape.vocab_size, shape.inner_dim)

    def weight(part: str, index: int, size: tuple[int, ...]) -> Tensor:
        kind, _, which = part.partition(".")
        names = [f"{kind}.{index}.{which}"]
        if shape.tie_weights and part != "proj.weight":
            names += [f"{kind}.{other}.{which}" for other in range(shape.n_predict)]
        elif shape.tie_weights and index:  # the first projection is of another size
            names += [f"{kind}.{other}.{which}" for other in range(1, shape.n_predict)]
        found = next((tensors[name] for name in names if name in tensors), None)
        if found is None or found.shape != size:
            has = "is missing" if found is None else f"is {list(found.shape)}"
            raise ConfigError(
                f"drafter.model: {names[0]} {has}, and must be {list(size)} by its config.json; fetch the checkpoint "
                "again"
            )
        return found

    return [
        Head(
            weight("emb.weight", index, wide),
            weight("proj.weight", index, (shape.inner_dim, shape.inner_dim if index else shape.emb_dim)),
            weight("ln.weight", index, wide[1:]),
            weight("ln.bias", index, wide[1:]),
            weight("head.weight", index, wide),
        )
        for index in range(shape.n_predict)
    ]
