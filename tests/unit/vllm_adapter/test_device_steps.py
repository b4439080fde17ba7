"""Whole target steps on the device that counts: every rank reads it once, whatever its requests ask for, and the tokens
are those of the host, and of plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.output import CachedRequestData, GrammarOutput, NewRequestData, SchedulerOutput
from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor

from outrider.actors.vllm_adapter import async_drafts
from outrider.actors.vllm_adapter.target_sampler import _MinTokens
from tests.unit.vllm_adapter.book import K
from tests.unit.vllm_adapter.device_rank import CPU, Group, Linked, Ranks, V, counting, grouped, make_ranks, model

CHUNK = 5
"""Tokens of a prompt in a step."""

STOP = 8
TARGET = model(1)
DRAFT = model(2, likes=TARGET, noise=0.15)


def params(
    temperature: float = 0.0, *, bad_words: Sequence[list[int]] = (), masked: bool = False, **changes: Any
) -> Any:
    made = SamplingParams(temperature=temperature, max_tokens=14, **changes)
    made._bad_words_token_ids = list(bad_words) or None
    made.update_from_generation_config({}, STOP)
    if masked:
        made.structured_outputs = StructuredOutputsParams(regex="of the test's own")
    return made


def by(verification: str, seed: int, **changes: Any) -> Any:
    return params(0.9, seed=seed, extra_args={"outrider": {"verification": verification}}, **changes)


EXACT = {
    "greedy": params(),
    "repetition": params(repetition_penalty=1.4),
    "presence, frequency": params(0.8, seed=5, presence_penalty=0.9, frequency_penalty=0.4, top_p=0.9),
    "bad words": params(bad_words=[[n] for n in range(20, 40)] + [[50, 51], [60, 61, 62]]),
    "allowed": params(0.7, seed=6, allowed_token_ids=list(range(STOP, 60))),
    "fewest": params(min_tokens=9, stop_token_ids=list(range(10, 40))),
    "bias": params(1.0, seed=7, min_p=0.02, logit_bias={11: 4.0, 12: -100.0, 13: 3.0}),
    "logprobs": params(logprobs=2),
    "mask": params(masked=True),
    "mask, coupled": params(0.9, seed=8, masked=True, repetition_penalty=1.2, top_k=20),
    "mask, fewest": params(masked=True, min_tokens=10, stop_token_ids=list(range(10, 70))),
}
"""Their tokens do not depend on the drafts."""

ALL = {
    **EXACT,
    "rejection": by("rejection", 9, top_p=0.95),
    "rejection, penalties": by("rejection", 10, repetition_penalty=1.2, logit_bias={30: 1.0}),
    "block": by("block", 11),
}


def allowed(position: int) -> np.ndarray:
    """bool [V], of a grammar that counts: one token in seven, and once the stop token and one that is not to be
    said before it alone."""
    tokens = np.arange(V)
    return (tokens == STOP) | (tokens == 9 + position % 50) if position % 6 == 0 else (tokens + position) % 7 == 0


def bits(rows: Sequence[np.ndarray]) -> np.ndarray:
    """int32 [rows, words], as a grammar's masks travel."""
    padded = np.zeros((len(rows), -(-V // 32) * 32), bool)
    padded[:, :V] = rows
    return np.packbits(padded, axis=1, bitorder="little").view(np.int32)


class Core:
    """As vLLM's: a step is scheduled with a slot for every draft that there could be, and masks are made for all of
    them when the forward pass has run."""

    def __init__(self, ranks: Ranks, wanted: dict[str, Any]) -> None:
        self._ranks, self._wanted = ranks, wanted
        # Prompts of one step, of many, and of different ends.
        self._texts = {name: [(31 * n + 7 * i) % V for i in range(3 + 3 * n)] for n, name in enumerate(ALL)}
        self._prompts = {name: len(text) for name, text in self._texts.items()}
        self._computed = dict.fromkeys(wanted, 0)
        self._waiting, self._running, self._finished = list(wanted), [], set[str]()
        self.kinds: set[tuple[bool, bool]] = set()
        """Which steps had requests in their prompts, and masks."""

    def answers(self) -> dict[str, list[int]]:
        while self._waiting or self._running:
            self._step()
        return {name: self._texts[name][self._prompts[name] :] for name in self._wanted}

    def _step(self) -> None:
        scheduled = SchedulerOutput.make_empty()
        scheduled.finished_req_ids, self._finished = self._finished, set()
        cached, counts = CachedRequestData.make_empty(), scheduled.num_scheduled_tokens
        new = self._waiting[:2]
        self._waiting = self._waiting[2:]
        for name in new:
            prompt = self._texts[name]
            scheduled.scheduled_new_reqs.append(
                NewRequestData(name, list(prompt), [], self._wanted[name], None, ([0],), 0, None, None)
            )
        self._running += new
        for name in self._running:
            left = self._prompts[name] - self._computed[name]
            counts[name] = min(left, CHUNK) if left > 0 else 1 + K
            if left <= 0:
                scheduled.scheduled_spec_decode_tokens[name] = [async_drafts.UNKNOWN] * K
            if name not in new:
                cached.req_ids.append(name)
                cached.num_computed_tokens.append(self._computed[name])
                cached.new_block_ids.append(None)
                cached.num_output_tokens.append(len(self._texts[name]) - self._prompts[name])
        scheduled.scheduled_cached_reqs = cached
        scheduled.total_num_scheduled_tokens = sum(counts.values())
        scheduled.has_structured_output_requests = scheduled.pending_structured_output_tokens = True
        slots = {name: len(ids) for name, ids in scheduled.scheduled_spec_decode_tokens.items()}
        taken = {name: min(count, self._prompts[name]) for name, count in counts.items() if name not in slots}
        assert self._ranks.execute(scheduled) is None
        output = self._ranks.sample(self._masks(slots, taken))
        for name, chosen in zip(output.req_ids, output.sampled_token_ids, strict=True):
            self._keep(name, chosen, taken.get(name, 0))

    def _masks(self, slots: dict[str, int], taken: dict[str, int]) -> GrammarOutput | None:
        drafts = self._ranks.ranks[0].take_draft_token_ids()
        drafted = dict(zip(drafts.req_ids, drafts.draft_token_ids, strict=True))
        masked, rows, fitting = [], [], []
        for name in self._running:
            if self._wanted[name].structured_outputs is None:
                continue
            if name in taken and self._computed[name] + taken[name] < self._prompts[name]:
                continue
            end = len(self._texts[name])
            rows += [allowed(end + j) for j in range(1 + slots.get(name, 0))]
            fits = [bool(allowed(end + j)[token]) for j, token in enumerate(drafted.get(name, ()))]
            fitting.append([*fits, False].index(False))
            masked.append(name)
        self.kinds.add((bool(taken), bool(masked)))
        return GrammarOutput(masked, bits(rows), fitting) if masked else None

    def _keep(self, name: str, chosen: list[int], taken: int) -> None:
        text, of = self._texts[name], self._wanted[name]
        if not chosen:
            self._computed[name] += taken
            return
        ends = of.all_stop_token_ids
        last = next((i for i, token in enumerate(chosen) if token in ends), len(chosen) - 1)
        text += chosen[: last + 1]
        del text[self._prompts[name] + of.max_tokens :]
        self._computed[name] = len(text) - 1
        if text[-1] in ends or len(text) - self._prompts[name] == of.max_tokens:
            self._running.remove(name)
            self._finished.add(name)


def plainly(name: str) -> list[int]:
    """What the host answers to a request alone, without a drafter."""
    with grouped(Group(1)):
        return Core(make_ranks(1, TARGET, None), {name: ALL[name]}).answers()[name]


@pytest.fixture(scope="module")
def on_the_host():
    with grouped(Group(1)):
        return Core(make_ranks(1, TARGET, None, Linked(DRAFT), len(ALL)), ALL).answers()


@pytest.mark.parametrize("world_size", [1, 2])
def test_whatever_is_asked_for_every_rank_reads_its_device_once_a_step(on_the_host, world_size):
    with counting() as device, grouped(Group(world_size)) as group:
        ranks = make_ranks(world_size, TARGET, device, Linked(DRAFT), len(ALL))
        core = Core(ranks, ALL)
        assert core.answers() == on_the_host
        status = ranks.ranks[0].round.status()
    assert core.kinds >= {(True, True), (True, False), (False, True)}
    assert status["accepted"] > 50
    if world_size > 1:
        assert len(group.sent) == ranks.steps > 10


def test_fewest_tokens_under_a_grammar_are_vllm_s():
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        logits = torch.randn(6, 12, generator=generator)
        logits[torch.rand(6, 12, generator=generator) < 0.8] = -torch.inf
        logits[torch.rand(6, 12, generator=generator) < 0.05] = torch.nan
        stops = torch.tensor([0, 0, 0, 2, 2, 5, 3]), torch.tensor([1, 2, 3, 1, 4, 0, 7])
        rows = tuple(part[:6] for part in stops)
        masked = []
        for kind in (MinTokensLogitsProcessor, _MinTokens):
            masked.append(logits.clone())
            kind(None, CPU, False)._mask_stop_token_logits(masked[-1], stops, rows)
        torch.testing.assert_close(*masked, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", EXACT)
def test_the_tokens_are_those_of_plain_decoding(on_the_host, name):
    assert on_the_host[name] == plainly(name)
