"""Training a drafter on the target's texts: a plain loop in PyTorch.

accelerate would add nothing here: there is one process on one device, and mixed precision is a line of torch's. Every
step draws its batch from a generator of (seed, step), so a resumed run does what an uninterrupted one does.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from outrider.actors.learning.draft_models import end_tokens
from outrider.actors.learning.loss import DraftIds, distances, head, mixed
from outrider.actors.learning.own_tokens import Branches, grown, reach, rooted, to_device
from outrider.actors.learning.rounds import Tally, walk
from outrider.actors.learning.text import TOP, Text, answer_positions, padded

if TYPE_CHECKING:
    from transformers import PreTrainedModel

EVAL_K = 3
EVAL_BATCH = 16
EVAL_ROWS = 512
"""Positions whose logits are in memory at once."""

SAMPLED_IDS = 2048
"""Tokens beside the named ones that stand for all others, drawn anew every step."""

_BF16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16")

WARM_UP = 0.05
"""Share of the training in which the rate rises."""

MAX_GRADIENT = 1.0
_WIDTH, _POSITIONS = 32, 64
"""What a step computes is filled up to multiples of these: kernels are made for each new shape on a CPU, and kept for
so many of them."""

_DRAWN = 8
"""Times as many texts as a batch has, to choose it from."""


@dataclass(frozen=True)
class Recipe:
    """What, with the texts, decides how a drafter turns out."""

    seed: int = 0
    learning_rate: float = 1e-3
    batch_size: int = 8
    """Texts a step."""

    own_share: float = 0.25
    """Of the steps: on the drafter's own tokens too, with a quarter of the texts, since the target judges them anew."""


@dataclass(frozen=True)
class Held:
    """Acceptance on held-out greedy answers, in rounds of EVAL_K drafts."""

    tally: Tally
    overlap: float
    """Mean probability that a draft drawn at temperature 1 is accepted, at every token alike."""


def fastest_dtype(device: str) -> torch.dtype:
    """Of a forward pass: bfloat16 on a GPU and on a CPU with instructions for it, float32 on others."""
    if device != "cpu":
        return torch.bfloat16
    known = torch.cpu.get_capabilities()
    return torch.bfloat16 if any(known.get(name) for name in _BF16_INSTRUCTIONS) else torch.float32


def rate_at(done: float) -> float:
    """Share of the learning rate when that share of the training is done: up, then down as a cosine, to a twentieth."""
    if done < WARM_UP:
        return max(done / WARM_UP, 0.02)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min((done - WARM_UP) / (1 - WARM_UP), 1.0)))


def draft_vocabulary(texts: Sequence[Text], size: int, vocab_size: int, always: set[int]) -> Tensor:
    """The tokens that the target gives most probability to in these texts, ascending, int64 [size]."""
    expected = torch.zeros(vocab_size, dtype=torch.float64)
    for text in texts:
        expected.index_add_(0, text.top_ids.flatten(), text.top_log_p.flatten().double().exp())
    expected[sorted(always)] = math.inf
    # Ties by id: a stable order is the same on every machine.
    return expected.sort(descending=True, stable=True).indices[:size].sort().values


class Trainer:
    def __init__(
        self,
        drafter: PreTrainedModel,
        target: PreTrainedModel | None,
        trained: Sequence[str],
        recipe: Recipe,
        dtype: torch.dtype,
        named_ids: Tensor | None,
    ) -> None:
        """drafter and target: on one device; None: no target is at hand, and recipe.own_share is 0. trained: names of
        the drafter's tensors that are. dtype: of its forward pass; bfloat16 is mixed with float32 where torch says so.
        named_ids: see draft_vocabulary; None: all that the target has among its likeliest in a step's texts, where
        their answers are all that is learned from."""
        self.drafter, self.target, self._recipe, self._dtype = drafter, target, recipe, dtype
        self._device = drafter.device
        if self._device.type == "cpu" and not recipe.own_share:  # with it there are masks that this does not take
            drafter.set_attn_implementation("eager")  # torch's fused one takes far longer backwards there
        self._head: Tensor = drafter.get_output_embeddings().weight
        self.named_ids = named_ids
        self._vocab_size = self._head.shape[0]
        self._pad = int((target or drafter).generation_config.pad_token_id)
        parameters = dict(drafter.named_parameters())
        self.trained = {name: parameters[name] for name in trained}
        self.skipped = 0
        """Steps whose gradient was not finite: one such update would leave a drafter of nothing else."""

        self.optimizer = torch.optim.AdamW(
            self.trained.values(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )

    def step(self, number: int, rate: float, texts: Sequence[Text]) -> tuple[float, float]:
        """One update. rate: share of the learning rate. Returns the loss and the mean overlap."""
        chance = random.Random(f"{self._recipe.seed}:{number}")
        generator = torch.Generator().manual_seed(chance.getrandbits(62))
        own = chance.random() < self._recipe.own_share
        size = min(max(self._recipe.batch_size // (4 if own else 1), 1), len(texts))
        batch = alike(texts, size, chance)
        ids = self._draft_ids(None if own else batch, generator)
        self.drafter.train()
        for group in self.optimizer.param_groups:
            group["lr"] = self._recipe.learning_rate * rate
        terms = self._own_terms(batch, ids, generator) if own else self._terms(batch, ids)
        loss, overlap = mixed(*terms)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.trained.values(), MAX_GRADIENT)
        if torch.isfinite(norm):
            self.optimizer.step()
        else:
            self.skipped += 1
        return float(loss.detach()), float(overlap)

    def evaluate(self, texts: Sequence[Text]) -> Held:
        """On greedy texts. A draft of the drafter's is its likeliest token of all, draft vocabulary or not."""
        tally, overlaps = Tally(EVAL_K), []
        for same, overlap in self.drafted(texts):
            tally.add(walk(same.tolist()[1:], same.tolist()[1:], EVAL_K))
            overlaps.append(overlap)
        return Held(tally, float(torch.cat(overlaps).mean()))

    def acceptance(self, texts: Sequence[Text]) -> list[float]:
        """Mean over the tokens of each text: of greedy ones whether the likeliest draft is the token, of others the
        probability that a draft drawn at temperature 1 is accepted."""
        return [
            float((same if text.sample == 0 else overlap).mean())
            for text, (same, overlap) in zip(texts, self.drafted(texts), strict=True)
        ]

    def drafted(self, texts: Sequence[Text]) -> Iterator[tuple[Tensor, Tensor]]:
        """Of each text, at each token of its answer: whether the likeliest draft is the token, and the overlap; float32
        on the CPU."""
        self.drafter.eval()
        every = self._every()
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
                    yield (drafted == text.ids[text.start :]).float(), shared

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Trained tensors, and the optimizer's."""
        return {name: parameter.detach() for name, parameter in self.trained.items()}, self.optimizer.state_dict()

    def restore(self, tensors: dict[str, Tensor], optimizer: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, parameter in self.trained.items():
                parameter.copy_(tensors[name])
        self.optimizer.load_state_dict(optimizer)

    def _every(self) -> DraftIds:
        ids = DraftIds.every(self._vocab_size)
        return DraftIds(None, ids.num_named, ids.place.to(self._device))

    def _draft_ids(self, answers: Sequence[Text] | None, generator: torch.Generator) -> DraftIds:
        """answers: all that the step learns from; None: the drafter's own tokens too, of which nobody knows yet what
        the target has to say."""
        named = self.named_ids
        if named is None and answers is not None:
            named = torch.cat([text.top_ids.flatten() for text in answers]).unique()
            named = named[named < self._vocab_size]
        if named is None or len(named) + SAMPLED_IDS >= self._vocab_size:
            return self._every()
        ids = DraftIds.sampled(named, self._vocab_size, SAMPLED_IDS, generator)
        assert ids.ids is not None
        return DraftIds(ids.ids.to(self._device), ids.num_named, ids.place.to(self._device), ids.log_weight)

    def _precision(self) -> AbstractContextManager[Any]:
        if self._dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self._dtype)

    def _predicting(self, texts: Sequence[Text]) -> tuple[Tensor, Tensor, Tensor]:
        """The drafter's hidden states [P, H] that predict the answers' tokens, and the target's likeliest there."""
        ids, _ = padded(texts, self._pad)  # nothing sees the padding, which is behind; without a mask it is faster
        ids = functional.pad(ids, (0, -ids.shape[1] % _WIDTH), value=self._pad)
        rows, places = answer_positions(texts)
        with self._precision():
            states = self.drafter.model(ids.to(self._device), use_cache=False).last_hidden_state
        return states[rows.to(self._device), places.to(self._device)], *self._tops(texts)

    def _tops(self, texts: Sequence[Text]) -> tuple[Tensor, Tensor]:
        top_ids, top_log_p = (torch.cat(part) for part in zip(*((t.top_ids, t.top_log_p) for t in texts), strict=True))
        return top_ids.to(self._device), top_log_p.to(self._device)

    def _terms(self, texts: Sequence[Text], ids: DraftIds) -> tuple[Tensor, Tensor, Tensor]:
        """KL, overlap and weight [P]: at every token of the answers, and of no weight the last one again."""
        hidden, top_ids, top_log_p = self._predicting(texts)
        places = torch.arange(len(hidden) + -len(hidden) % _POSITIONS, device=self._device)
        weight = (places < len(hidden)).float()
        hidden, top_ids, top_log_p = (each[places.clamp(max=len(each) - 1)] for each in (hidden, top_ids, top_log_p))
        return *distances(*ids.log_q(self._logits(hidden, ids), top_ids), top_log_p), weight

    def _own_terms(
        self, texts: Sequence[Text], ids: DraftIds, generator: torch.Generator
    ) -> tuple[Tensor, Tensor, Tensor]:
        """KL, overlap and weight [P]: at every token of the answers, and after drafts of the drafter's own."""
        with torch.no_grad():
            branches = to_device(rooted(texts, self._pad, generator), self._device)
            branches, q = grown(branches, lambda so_far, columns: self._drawn(so_far, columns, ids, generator))
            top_ids, top_log_p, p = self._judged(branches)
        size = len(texts)
        index = torch.arange(size, device=self._device)[:, None]
        with self._precision():
            states = self._states(self.drafter, branches)
        after = torch.cat([states[index, branches.columns(d)].flatten(0, 1) for d in range(1, branches.depth + 1)])
        rows, places = answer_positions(texts)
        in_text = states[rows.to(self._device), places.to(self._device)]
        text_ids, text_log_p = self._tops(texts)
        # D first, as `after` is.
        weight = torch.cat([torch.ones(len(in_text), device=self._device), reach(p, q).permute(2, 0, 1).flatten()])
        logits = self._logits(torch.cat([in_text, after]), ids)
        log_q, named = ids.log_q(logits, torch.cat([text_ids, top_ids]))
        return *distances(log_q, named, torch.cat([text_log_p, top_log_p])), weight

    def _logits(self, hidden: Tensor, ids: DraftIds) -> Tensor:
        return head(hidden, self._head, ids.ids)

    def _states(self, model: PreTrainedModel, branches: Branches) -> Tensor:
        out = model.model(branches.ids, attention_mask=branches.sees, position_ids=branches.positions, use_cache=False)
        states: Tensor = out.last_hidden_state
        return states

    def _drawn(
        self, branches: Branches, columns: Tensor, ids: DraftIds, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """A token of the drafter's at each column, drawn at temperature 1 among the named ones."""
        index = torch.arange(len(columns), device=self._device)[:, None]
        with self._precision():
            states = self._states(self.drafter, branches)[index, columns].flatten(0, 1)
        named = None if ids.ids is None else ids.ids[: ids.num_named]
        q = head(states, self._head, named).softmax(-1).cpu()
        drawn = torch.multinomial(q, 1, generator=generator)
        tokens = drawn.to(self._device) if named is None else named[drawn.to(self._device)]
        return tokens.view_as(columns), q.gather(1, drawn).to(self._device).view_as(columns)

    def _judged(self, branches: Branches) -> tuple[Tensor, Tensor, Tensor]:
        """The target's likeliest tokens [D x B x A, TOP] after every branch's token, and the probability that it gives
        the branches' own tokens, [B, A, D]."""
        index = torch.arange(len(branches.ids), device=self._device)[:, None]
        assert self.target is not None
        states, weight = self._states(self.target, branches), self.target.get_output_embeddings().weight
        probabilities, tops = [], []
        for depth in range(branches.depth + 1):
            log_p = head(states[index, branches.columns(depth)].flatten(0, 1), weight, None).log_softmax(-1)
            if depth:
                tops.append(log_p.topk(min(TOP, log_p.shape[1]), dim=-1))
            if depth < branches.depth:
                tokens = branches.ids[index, branches.columns(depth + 1)]
                probabilities.append(log_p.gather(1, tokens.flatten()[:, None]).exp().view_as(tokens))
        top_ids = torch.cat([top.indices for top in tops])
        return top_ids, torch.cat([top.values for top in tops]), torch.stack(probabilities, -1)


def alike(texts: Sequence[Text], size: int, chance: random.Random) -> Sequence[Text]:
    """So many of the texts, of nearly one length, so that little of a batch is padding; any of them is as likely."""
    drawn = chance.sample(range(len(texts)), min(_DRAWN, len(texts) // size) * size)
    ordered = sorted(drawn, key=lambda index: len(texts[index].ids))
    start = chance.randrange(len(drawn) // size) * size
    return [texts[index] for index in ordered[start : start + size]]


def vocabulary_for(
    texts: Sequence[Text], size: int | None, drafter: PreTrainedModel, target: PreTrainedModel
) -> Tensor | None:
    """The draft vocabulary, if there is to be one: the drafter's tokens only, end tokens always."""
    vocab_size = min(drafter.get_output_embeddings().weight.shape[0], target.get_output_embeddings().weight.shape[0])
    if size is None or size >= vocab_size:
        return None
    return draft_vocabulary(texts, size, vocab_size, {token for token in end_tokens(target) if token < vocab_size})
