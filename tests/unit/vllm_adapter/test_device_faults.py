"""Serves rounds on vLLM's scheduler and runner with a faulty drafter, and compares them with plain decoding."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.request import Request

from outrider.actors.round.round import Round
from outrider.cluster.link.messages import Commit, Message, Proposals
from tests.unit.round.scripted_link import FakeLink
from tests.unit.vllm_adapter.book import EOS, ahead_config, make_scheduler, serve
from tests.unit.vllm_adapter.device_rank import (
    Drafter,
    Group,
    Linked,
    V,
    context,
    counting,
    grouped,
    make_ranks,
    model,
)

pytestmark = pytest.mark.timeout(300)  # hundreds of steps on a device that is simulated

TARGET = model(1)
DRAFT = model(2, likes=TARGET, noise=0.15)
FAULTS = ["death", "garbled", "late", "lost", "not drawn", "another id", "of another"]


class Troubled(Linked):
    """A drafter that fails in every way there is, and a new one some while after each death."""

    def __init__(self, table: torch.Tensor, chance: random.Random, right: int = 8) -> None:
        """right: answers that are, for one of each fault."""
        super().__init__(table)
        self._chance, self._right = chance, right
        self._held: list[Proposals] = []
        self._deaths = 0
        self.seen = Counter[str]()

    def join(self, round_: Round) -> None:
        self._round = round_
        self._link_up()

    def clock(self) -> float:
        """Each look at it is a moment: a new drafter is up when one has been dead for some."""
        self.now += 1e-4
        if self._link.broken and self._chance.random() < 0.1:
            self._link_up()
        return self.now

    def _link_up(self) -> None:
        self._held, drafter = [], Drafter(self.table)
        self._link = link = FakeLink(lambda message: self._answer(link, drafter, message), self.sleep)
        self._round.offer_link(link)

    def _answer(self, link: FakeLink, drafter: Drafter, message: Message) -> list[Proposals]:
        answers = [*self._held, *drafter(message)]
        self._held = []
        if not isinstance(message, Commit):
            return answers
        fault = self._chance.choice(["none"] * self._right + FAULTS)
        self.seen[fault] += 1
        if fault in ("death", "garbled"):  # an id out of range ends a link as a wrong checksum does
            link.broken = "the peer is gone" if fault == "death" else "a frame is not what was sent"
        elif fault == "late":
            self._held, answers = answers, []
        elif fault == "lost":
            answers = []
        elif fault != "none":
            answers = [self._corrupt(fault, each) if each.token_ids else each for each in answers]
        return [] if link.broken else answers

    def _corrupt(self, fault: str, proposals: Proposals) -> Proposals:
        """Spoil it as a drafter with a fault of its own would: checksums are right."""
        ids, q, base = list(proposals.token_ids), proposals.q, proposals.base_committed_len
        if fault == "of another":
            base += 1
        if fault == "another id":
            ids[self._chance.randrange(len(ids))] = self._chance.randrange(V)
            q = None
        corrupt = Proposals(proposals.request, base, ids, q=q)
        if fault == "not drawn" and q is not None:
            q.probs[:, 0] += 0.5
        return corrupt


def ask(number: int, prompt: list[int], max_tokens: int, temperature: float, **changes: Any) -> Request:
    bad_words = changes.pop("bad_words", None)
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, stop_token_ids=[EOS], **changes)
    params._bad_words_token_ids = bad_words
    params.update_from_generation_config({}, EOS)
    return Request(f"r{number}", prompt, params, None)


def by(verification: str) -> dict[str, Any]:
    return {"extra_args": {"outrider": {"verification": verification}}}


CHANGES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.2, "logit_bias": {20: 2.0}},
    {"presence_penalty": 0.9, "frequency_penalty": 0.4},
    {"allowed_token_ids": list(range(EOS, 60)), "logprobs": 2},
    {"min_tokens": 1, "min_p": 0.02},
    {"bad_words": [[n] for n in range(20, 40)] + [[50, 51], [60, 61, 62]]},
]
"""What changes logits, or asks for more than tokens."""


def mixed(chance: random.Random, count: int) -> list[Request]:
    """Makes requests of every mode, in any order, every second one with CHANGES."""
    asked = []
    for number in range(count):
        changes = dict(CHANGES[number // 2 % len(CHANGES)]) if number % 2 else {}
        temperature, kind = 0.8, chance.choice(["greedy", "coupled", "coupled", "rejection", "block"])
        if kind == "greedy":
            temperature = 0.0
        else:
            changes |= {"seed": number, "top_p": chance.choice([1.0, 0.9]), **by(kind)}
        prompt = [chance.randrange(10, 90) for _ in range(chance.randint(1, 30))]
        asked.append(ask(number, prompt, chance.choice([1, 5, 20, 30]), temperature, **changes))
    return asked


@pytest.fixture(scope="module")
def vllm_config(tmp_path_factory):
    return ahead_config(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize(("seed", "world_size", "blocks"), [(1, 1, 200), (2, 2, 200), (3, 2, 40)])
def test_whatever_becomes_of_the_drafter_the_tokens_are_those_of_plain_decoding(vllm_config, seed, world_size, blocks):
    with grouped(Group(1)):
        requests = mixed(random.Random(seed), 20)
        plain = serve(make_scheduler(vllm_config, 200), make_ranks(1, TARGET, None), requests, random.Random(seed))
    requests = mixed(random.Random(seed), 20)
    link = Troubled(DRAFT, random.Random(seed))
    with counting() as device, grouped(Group(world_size)) as group:
        ranks = make_ranks(world_size, TARGET, device, link)
        found = serve(make_scheduler(vllm_config, blocks), ranks, requests, random.Random(seed))
        status = ranks.ranks[0].round.status()
    for request in requests:
        ours = request.sampling_params.extra_args
        if ours is None or ours["outrider"]["verification"] == "coupled":
            assert found[request.request_id] == plain[request.request_id], request.request_id
        assert found[request.request_id]
    assert ranks.steps > 30
    assert len(group.sent) == (ranks.steps if world_size > 1 else 0)
    assert min(link.seen[fault] for fault in FAULTS) > 0
    assert status["accepted"] > 20
    assert status["late_rounds"] > 0
    assert status["dropped_proposals"] > 0
    assert any(request.num_preemptions for request in requests) == (blocks == 40)


def test_an_abort_disturbs_nobody(vllm_config):
    with grouped(Group(1)):
        plain = serve(
            make_scheduler(vllm_config, 200), make_ranks(1, TARGET, None), mixed(random.Random(5), 12), random.Random(5)
        )
    requests = mixed(random.Random(5), 12)
    with counting() as device, grouped(Group(1)):
        ranks = make_ranks(1, TARGET, device, Linked(DRAFT))
        found = serve(make_scheduler(vllm_config, 60), ranks, requests, random.Random(5), aborts=3)
    same = [request.sampling_params.extra_args is None for request in requests]
    whole = 0
    for request, is_same in zip(requests, same, strict=True):
        tokens = found[request.request_id]
        if is_same:
            assert tokens == plain[request.request_id][: len(tokens)]
            whole += tokens == plain[request.request_id]
    assert whole >= sum(same) - 3


def exact(prompt: list[int], length: int, temperature: float, top_k: int) -> dict[tuple[int, ...], float]:
    """Probability of each way to go on, by plain decoding."""
    found = {(): 1.0}
    for _ in range(length):
        longer = {}
        for line, so_far in found.items():
            values, ids = TARGET[context([*prompt, *line])].topk(top_k)
            for token, p in zip(ids.tolist(), (values / temperature).softmax(0).tolist(), strict=True):
                longer[*line, token] = so_far * p
        found = longer
    return found


def tail_of_chi_square(statistic: float, freedom: int) -> float:
    half = torch.tensor([freedom, statistic], dtype=torch.float64) / 2
    return float(torch.special.gammaincc(*half))


def check_distribution(answers: Collection[list[int]], prompt: list[int], temperature: float, top_k: int) -> None:
    """Compare the first three tokens of all answers to a prompt with plain decoding's."""
    count = len(answers)
    seen = Counter(tuple(tokens[:3]) for tokens in answers)
    expected = {line: count * p for line, p in exact(prompt, 3, temperature, top_k).items()}
    assert set(seen) <= set(expected)
    common = [line for line, number in expected.items() if number >= 5]
    rest = [sum(seen.values()) - sum(seen[line] for line in common), count - sum(expected[line] for line in common)]
    cells = [(seen[line], expected[line]) for line in common] + ([tuple(rest)] if rest[1] >= 5 else [])
    statistic = sum((there - should) ** 2 / should for there, should in cells)
    assert len(cells) > 8
    assert tail_of_chi_square(statistic, len(cells) - 1) > 1e-5


@pytest.mark.exhaustive
@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_sampled_tokens_are_distributed_as_those_of_plain_decoding(tmp_path, verification):
    """Given a seed each, so that the test is the same every time."""
    temperature, top_k, count = 2.0, 3, 400
    prompt = [33, 44, 55]
    requests = [
        ask(number, list(prompt), 5, temperature, top_k=top_k, seed=number, ignore_eos=True, **by(verification))
        for number in range(count)
    ]
    for request in requests:
        request.sampling_params.stop_token_ids = None
    config = ahead_config(tmp_path, max_num_seqs=64, max_num_batched_tokens=512)
    link = Troubled(DRAFT, random.Random(7), right=1000)
    with counting() as device, grouped(Group(1)):
        ranks = make_ranks(1, TARGET, device, link, 64)
        found = serve(make_scheduler(config, 2000), ranks, requests, random.Random(7), most=64)
        status = ranks.ranks[0].round.status()
    check_distribution(found.values(), prompt, temperature, top_k)
    assert link.seen.total() - link.seen["none"] > 0
    assert status["accepted"] > count / 2
    assert status["drafted"] - status["accepted"] > count / 4
