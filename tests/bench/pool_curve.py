"""What one drafter gives so many targets, by simulation: seconds where the emulation takes hours.

    python -m tests.bench.pool_curve --profiles 70b-8b,70b-1b,32b-0.6b --k 4,8,6 --batches 1,8 --plot curve.png
    python -m tests.bench.pool_curve --profiles 70b-1b,32b-0.6b --k 12 --batches 1 --one-pass --num-paths 8

The drafter's own policy (`DraftModelProposer`) and the targets' own (`LengthController`) play against each other on a
clock of the simulation's own, with an emulated pair's step times and text. What is not there: vLLM, Ray, the link, and
with them all host work but a fixed time for each round and each draft step. `tests.bench.emulated_speed` has those;
docs/performance.md holds the two against each other.

The rivals are arithmetic: a drafter in-process adds its steps to the target's, and has no other overhead.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from outrider.actors.drafter.draft_model import DraftModelProposer
from outrider.actors.drafter.engine import Drawn, StepPlan
from outrider.actors.drafter.model_sequence import ModelSequence
from outrider.actors.drafter.planner import LookaheadLimits
from outrider.actors.drafter.proposer import Outgoing
from outrider.actors.round.length import Estimate, LengthController
from outrider.actors.round.paths import PathBudget
from outrider.cluster.link.messages import Commit, DraftPath, DraftSampling, Open, PrefetchedProposal, ProposalStatus
from tests.bench.emulation.measurement import ceiling, sides_of
from tests.bench.emulation.profiles import PROFILES, TEXTS, Profile
from tests.bench.emulation.step_time import StepTime
from tests.bench.emulation.text_process import Text, TokenRange, ranked_tokens

ROUND_HOST_S, STEP_HOST_S = 0.4e-3, 0.1e-3
"""Beside the devices' times: a round's, and a draft step's. As measured beside a host 16 times as fast."""

PATHS_HOST_S = 0.9e-3
"""What a round with several paths has more, as measured beside a host 4 times as fast."""

CONFIDENCES = (0.9997, 0.0002, 0.0001)
"""Of a draft and its alternatives, as an emulated model has them."""

RIVALS = ("in-process", "in-process-tp", "in-process-one-pass")
RIVALS_K = range(1, 17)
PROMPT_TOKENS = 32
TOKENS = TokenRange.of(256, 1 << 15, lanes=256)
MASK = 1 << 15


def _drawn(first: int, *others: int) -> Drawn:
    return Drawn(first, confidence=CONFIDENCES[0], alternatives=tuple(zip(others, CONFIDENCES[1:], strict=True)))


class World:
    """Time, and what happens when."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, seconds: float, then: Callable[[], None]) -> None:
        heapq.heappush(self._events, (seconds, next(self._numbers), then))

    def pass_until(self, end: float) -> None:
        while self._events and self._events[0][0] <= end:
            self.now, _, then = heapq.heappop(self._events)
            then()
        self.now = end

    def pass_to_next(self) -> None:
        self.pass_until(self._events[0][0])


class PlayedEngine:
    """Implements Engine: a step takes its time, and there is room for everything."""

    max_model_len, max_num_batched_tokens, block_sizes = 1 << 20, 1 << 16, (1 << 12,)
    kv_cache_usage = 0.0

    def __init__(self, world: World, time: StepTime, text: Text) -> None:
        self._world, self._time, self._text = world, time, text

    def run(self, plan: StepPlan) -> list[list[Drawn]]:
        num_tokens = sum(row.num_fed for row in plan.rows)
        self._world.pass_until(self._world.now + self._time.step_ms(num_tokens) / 1e3 + STEP_HOST_S)
        last = [token for row in plan.rows for token in (row.token_ids[-1], *[MASK] * row.num_masks)]
        positions = [
            row.start + len(row.token_ids) - 1 + index for row in plan.rows for index in range(1 + row.num_masks)
        ]
        ranked = iter(ranked_tokens(torch.tensor(last), torch.tensor(positions), TOKENS, self._text, MASK).tolist())
        return [[_drawn(*next(ranked)) for _ in range(1 + row.num_masks)][: len(row.draws)] for row in plan.rows]

    def start(self, request_id: str, token_ids: list[int], sampling: Any) -> int:
        return 0

    def append(self, request_id: str, token_ids: list[int]) -> None: ...

    def allocate(self, request_id: str, num_computed: int, num_new: int, num_lookahead: int) -> bool:
        return True

    def give_back(self, request_id: str) -> None: ...

    num_free_blocks = 1 << 30

    def missing(self, request_id: str) -> int:
        return 0

    def block_ids(self, request_id: str) -> tuple[list[int], ...]:
        return ([0] * (self.max_model_len // self.block_sizes[0]),)

    def take_blocks(self, count: int) -> list[int]:
        return [0] * count

    def free_blocks(self, block_ids: list[int]) -> None: ...

    def finish(self, request_id: str) -> None: ...

    def load_weights(self, tensors: Mapping[str, Any]) -> None: ...


@dataclass(eq=False)
class Request:
    sequence: ModelSequence
    estimate: Estimate
    drafts: list[int] = field(default_factory=list)
    paths: tuple[DraftPath, ...] = ()
    waits: bool = False


class Target:
    """One batch, whose requests never end."""

    def __init__(
        self, link_id: int, batch: int, k: int, num_paths: int, time: StepTime, world: World, proposer: Any
    ) -> None:
        self._time, self._world, self._proposer, self._num_paths = time, world, proposer, num_paths
        self._lengths, self._paths = LengthController(k), PathBudget()
        self.requests: dict[Any, Request] = {}
        self.rounds = self.tokens = 0
        self._wait_s = self._asked_s = self._step_s = self.first_s = 0.0
        for handle in range(batch):
            sequence = proposer.new_sequence((link_id, handle))
            prompt = [(link_id * batch + handle) % TOKENS.lanes] * PROMPT_TOKENS
            sequence.take_prompt(Open(handle, prompt, k, DraftSampling()))
            self.requests[sequence] = Request(sequence, self._lengths.track(k))
            proposer.open(sequence)

    def begin(self) -> None:
        self._world.at(self._world.now, self._step)

    def count_from_now(self) -> None:
        self.rounds = self.tokens = 0
        self.first_s = self._world.now

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / (self._world.now - self.first_s)

    def hear(self, outgoing: Outgoing) -> None:
        request, proposals = self.requests[outgoing.sequence], outgoing.message
        if isinstance(proposals, PrefetchedProposal):
            return  # there is no way to save: what is at hand is answered at once
        if proposals.status is not ProposalStatus.OK or proposals.base_committed_len != request.sequence.committed_len:
            return
        waited_s = self._world.now - self._asked_s
        request.drafts, request.paths, request.waits = list(proposals.token_ids), proposals.paths, False
        self._lengths.observe_answer(
            request.estimate, proposals.origin, len(request.drafts), proposals.step_us / 1e6, waited_s
        )
        if not any(each.waits for each in self.requests.values()):
            self._step()

    def _step(self) -> None:
        requests = dict(enumerate(self.requests.values()))
        drafted = [(number, request.drafts) for number, request in requests.items()]
        proposed = {str(number): request.paths for number, request in requests.items() if request.paths}
        if proposed:
            paths = self._paths.choose(proposed, self._lengths.token_price())
            drafted += [(int(number), path.token_ids) for number, path in paths]
            for number in proposed:
                requests[int(number)].paths = tuple(path for owner, path in paths if owner == number)
        num_tokens = sum(1 + len(ids) for _, ids in drafted)
        host_s = ROUND_HOST_S + PATHS_HOST_S * any(request.paths for request in requests.values())
        self._step_s = self._time.step_ms(num_tokens) / 1e3 + host_s
        self._world.at(self._world.now + self._step_s, lambda: self._commit(drafted, num_tokens))

    def _commit(self, drafted: Sequence[tuple[int, list[int]]], num_tokens: int) -> None:
        """drafted: the number of each row's request, and the row's drafts. The first rows are the main lines."""
        requests = list(self.requests.values())
        self._lengths.observe_step(num_tokens, self._step_s)
        rows = [[requests[number].sequence.text[-1], *ids] for number, ids in drafted]
        ends = [requests[number].sequence.committed_len for number, _ in drafted]
        ids = torch.tensor([token for row in rows for token in row])
        positions = torch.tensor(
            [end - 1 + index for row, end in zip(rows, ends, strict=True) for index in range(len(row))]
        )
        chosen = iter(ranked_tokens(ids, positions, TOKENS)[:, 0].tolist())
        committed: list[list[int]] = []
        gained = [0] * len(requests)
        for (number, drafts), row in zip(drafted, rows, strict=True):
            right = list(itertools.islice(chosen, len(row)))
            accepted = next((i for i, draft in enumerate(drafts) if draft != right[i]), len(drafts))
            if number == len(committed):
                committed.append(right[: accepted + 1])
            elif (more := accepted + 1 - len(committed[number])) > 0:
                committed[number] = right[: accepted + 1]
                gained[number] += more
        for request, ids_, more in zip(requests, committed, gained, strict=True):
            if request.paths:
                self._paths.observe(sum(path.gain for path in request.paths), more)
            if request.drafts:
                self._lengths.observe_round(request.estimate, len(request.drafts), len(ids_) - 1 - more)
        self.rounds += 1
        self.tokens += sum(map(len, committed))
        self._asked_s = self._world.now
        trees = self._num_paths > 1 and self._paths.wants_paths(
            self._lengths.token_price(), self._lengths.round_price()
        )
        lengths = self._lengths.choose([request.estimate for request in requests], trees)
        for request, ids_, wanted in zip(requests, committed, lengths, strict=True):
            request.drafts, request.paths, request.waits = [], (), wanted.k > 0
            k_miss = min(wanted.k_miss, wanted.k)
            num_paths = self._num_paths if trees and k_miss else 1
            commit = Commit(
                request.sequence.key[1], request.sequence.committed_len, ids_, wanted.k, k_miss, num_paths=num_paths
            )
            self._proposer.commit(request.sequence, commit)
        at_hand = self._proposer.outbox.drain()
        for outgoing in at_hand:
            outgoing.message.step_us = self._proposer.step_us()
        if not any(request.waits for request in requests):
            self._step()
        for outgoing in at_hand:
            self.hear(outgoing)


def simulate(
    profile: Profile, text: Text, num_targets: int, batch: int, k: int, rounds: int, one_pass: bool, num_paths: int
) -> tuple[float, float]:
    """Tokens a second of one target on average, and a round's tokens of one request."""
    world = World()
    engine = PlayedEngine(world, profile.drafter, text)
    proposer = DraftModelProposer(
        engine, 2048, LookaheadLimits(True, 12, 128), clock=lambda: world.now, one_pass=one_pass
    )
    targets = [
        Target(link_id, batch, k, num_paths, profile.target, world, proposer) for link_id in range(1, num_targets + 1)
    ]

    proposer.outbox.drain()  # all are ready

    def hear() -> None:
        for outgoing in proposer.outbox.drain():
            outgoing.message.step_us = proposer.step_us()
            targets[outgoing.sequence.key[0] - 1].hear(outgoing)

    def work_off(until: Callable[[], bool]) -> None:
        while not until():
            work = proposer.plan()
            hear()
            if work is None:
                world.pass_to_next()
                continue
            work.execute()
            proposer.complete(work)
            hear()

    for target in targets:
        world.at(world.now, target.begin)
        world.pass_until(world.now + profile.target.base_ms * 0.37e-3)  # each out of step with the others
    warm = max(rounds // 10, 20)
    work_off(lambda: min(target.rounds for target in targets) >= warm)
    for target in targets:
        target.count_from_now()
    work_off(lambda: min(target.rounds for target in targets) >= rounds)
    speeds = [target.tokens_per_s for target in targets]
    return sum(speeds) / num_targets, sum(t.tokens for t in targets) / sum(t.rounds for t in targets) / batch


def best_rivals(profile: Profile, text: Text, batch: int) -> dict[str, tuple[int, float]]:
    """By side: its best K and what it gives, tok/s."""
    sides = sides_of(profile)
    found = {}
    for name in RIVALS:
        speeds = {k: ceiling(sides[name], profile.target, text, batch, k).expected for k in RIVALS_K}
        best = max(speeds, key=lambda k: speeds[k])
        found[name] = best, speeds[best]
    return found


def plot(found: Mapping[tuple[str, int], Mapping[int, float]], out: Path) -> None:
    """found: by profile and batch, of so many targets how much an accelerator gives over the sharded rival's."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for (profile, batch), gains in found.items():
        style = {"linestyle": "-" if batch == 1 else "--", "color": f"C{list(PROFILES).index(profile)}"}
        axes.plot(list(gains), list(gains.values()), marker="o", label=f"{profile}, batch {batch}", **style)
    axes.axhline(1.0, color="grey", linewidth=0.8)
    targets = sorted({number for gains in found.values() for number in gains})
    axes.set_xscale("log", base=2)
    axes.set_xticks(targets, list(map(str, targets)))
    axes.set_xlabel("targets that share a drafter")
    axes.set_ylabel("tokens/s per accelerator, over in-process-tp")
    axes.legend(fontsize="small")
    figure.savefig(out, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profiles", default="70b-8b", help=f"of {', '.join(PROFILES)}")
    parser.add_argument("--text", choices=list(TEXTS), default="stated")
    parser.add_argument("--targets", default="1,2,4,8", help="that share the drafter")
    parser.add_argument("--batches", default="1,8", help="of each target")
    parser.add_argument("--k", default="4", help="of each profile, or one of all: tokens drafted a round at most")
    parser.add_argument("--rounds", type=int, default=1000, help="of each target")
    parser.add_argument("--one-pass", action="store_true", help="the drafter drafts a round in one pass")
    parser.add_argument("--num-paths", type=int, default=1, help="of a one-pass drafter, that a step may verify")
    parser.add_argument("--plot", type=Path, metavar="OUT.png")
    options = parser.parse_args()
    text = TEXTS[options.text]
    columns = ("profile", "K", "batch", "targets", "tok/s a target", "per acc.", "tokens a round", "of one target's",
               *(f"per acc. over {name} (K)" for name in RIVALS))  # fmt: skip
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    profiles = [PROFILES[name] for name in options.profiles.split(",")]
    lengths = list(map(int, options.k.split(",")))
    found: dict[tuple[str, int], dict[int, float]] = {}
    for profile, k in zip(profiles, lengths * (len(profiles) if len(lengths) == 1 else 1), strict=True):
        ours, theirs = sides_of(profile)["outrider"], profile.target_accelerators
        for batch in map(int, options.batches.split(",")):
            rivals = best_rivals(profile, text, batch)
            own = 0.0
            for num_targets in map(int, options.targets.split(",")):
                drafting = options.one_pass, options.num_paths
                speed, tokens = simulate(profile, text, num_targets, batch, k, options.rounds, *drafting)
                own = own or speed
                per_accelerator = speed / ours.accelerators_of(num_targets)
                gains = {name: per_accelerator / (rival / theirs) for name, (_, rival) in rivals.items()}
                found.setdefault((profile.name, batch), {})[num_targets] = gains["in-process-tp"]
                cells = [profile.name, k, batch, num_targets, f"{speed:.1f}", f"{per_accelerator:.1f}", f"{tokens:.2f}"]
                cells += [f"{speed / own:.2f}", *(f"{gain:.2f} ({rivals[name][0]})" for name, gain in gains.items())]
                print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    if options.plot is not None:
        plot(found, options.plot)


if __name__ == "__main__":
    main()
