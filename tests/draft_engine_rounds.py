"""Rounds over a real draft model's engine: `python draft_engine_rounds.py MODEL SECTION`. Prints one JSON object.

SECTION: JSON, what the engine's section has besides.

Every commit is answered twice: by a drafter that drafts ahead, with side branches and maybe a cut vocabulary,
and by one that drafts everything at the last moment. The verifier is played here and forces hits of both kinds, misses
and stale drafts. A process of its own, because an engine stays in the process that started it.
"""

import itertools
import json
import os
import random
import sys
from collections import Counter

import numpy as np

VOCAB = 256
ROUNDS = 40
NUM_BLOCKS = 500
"""As an engine argument of vLLM's; memory for four times as many is there."""


class GraphHits:
    """Counts the graphs that vLLM's dispatcher chooses in the first rank, which runs in this process."""

    def __init__(self, engine):
        """engine: a DraftEngine that was made with ``in_process``."""
        self._hits = Counter()
        dispatcher = engine._core.model_executor.driver_worker.worker.model_runner.cudagraph_dispatcher
        inner = dispatcher.dispatch

        def dispatch(*args, **kwargs):
            mode, descriptor = inner(*args, **kwargs)
            self._hits[f"{mode.name} {descriptor.num_tokens}"] += 1
            return mode, descriptor

        dispatcher.dispatch = dispatch

    def take(self):
        """Returns the steps since the last call by mode and padded tokens (``FULL 16``). A CPU has none."""
        found = dict(self._hits)
        self._hits.clear()
        return found


class Side:
    """One drafter, which works until it has answered."""

    def __init__(self, link, proposer):
        self.link, self.proposer = link, proposer
        self.sequence = None

    def open(self, request, prompt, sampling):
        self.sequence = self.proposer.new_sequence((self.link, request))
        self.sequence.take_prompt(Open(request, prompt, 4, sampling))
        self.proposer.open(self.sequence)
        self.work_off()

    def commit(self, commit):
        self.proposer.outbox.drain()
        self.proposer.commit(self.sequence, commit)
        while not (answers := self.answers()):
            work = self.proposer.plan()
            work.execute()
            self.proposer.complete(work)
        return answers

    def answers(self):
        return [said for _, said in self.proposer.outbox.drain() if isinstance(said, Proposals)]

    def work_off(self):
        while (work := self.proposer.plan()) is not None:
            work.execute()
            self.proposer.complete(work)


def outcome(rng, sequence, drafts):
    """Return what the verifier commits, and how it comes about."""
    kind = rng.choice(["main line", "main line", "side branch", "side branch", "other", "stale"])
    if kind == "main line" and sequence.num_drafted > len(drafts):
        return kind, sequence.main.ids(sequence.committed_len, sequence.committed_len + len(drafts) + 1)
    if kind == "side branch" and sequence.sides:
        position, token = rng.choice(sorted(sequence.sides))
        return kind, [*drafts[: position - sequence.committed_len], token]
    accepted = rng.randint(0, len(drafts)) if kind == "other" else 0
    return kind, [*drafts[:accepted], rng.randrange(VOCAB)]


def alike(mine, theirs):
    """Return whether q is the same but for rounding, which depends on the shape of the batch."""
    if mine is None or theirs is None:
        return mine is theirs
    dense = np.zeros((2, len(mine.ids), VOCAB + 16))
    for half, q in zip(dense, (mine, theirs), strict=True):
        np.put_along_axis(half, q.ids, q.probs, axis=1)
    return np.allclose(dense[0], dense[1], atol=1e-3)


def play(rng, ahead, at_once, sampling, request):
    """Returns the number of answers that agree, the differences, answers by origin, and what was drafted."""
    # One of CATCH_UP_TOKENS is read with the first commit, and would be answered NOT_READY by the second drafter alone.
    prompt = [rng.randrange(20) for _ in range(rng.choice([5, CATCH_UP_TOKENS - 1, CATCH_UP_TOKENS + 1, 70]))]
    ahead.open(request, prompt, sampling)
    at_once.open(request, prompt, sampling)
    length, drafts = len(prompt), []
    agree, differ, origins, drafted = 0, [], {}, []
    for _ in range(ROUNDS):
        if not drafts:
            kind, tokens = "other", [rng.randrange(20)]
        else:
            kind, tokens = outcome(rng, ahead.sequence, drafts)
        commit = Commit(request, length, tokens, 4, 4)
        length += len(tokens)
        (mine,), (theirs,) = ahead.commit(commit), at_once.commit(commit)
        same = mine.token_ids == theirs.token_ids and alike(mine.q, theirs.q)
        agree += same
        if not same:
            differ.append([kind, length, mine.token_ids, theirs.token_ids])
        origins[mine.origin.name] = origins.get(mine.origin.name, 0) + 1
        drafts = mine.token_ids
        drafted.append([int(token) for token in drafts])
        if kind == "stale":
            continue  # the next commit comes while what is drafted ahead is half done
        ahead.work_off()
    for side in (ahead, at_once):
        side.proposer.close(side.sequence)
    return agree, differ, origins, drafted


def main(model, section):
    from outrider.actors.vllm_adapter.draft_engine import DraftEngine
    from outrider.actors.vllm_adapter.engine_args import drafter_vllm_config
    from outrider.cluster.config import DraftModelConfig

    config = DraftModelConfig(
        method="draft_model",
        model=model,
        dtype="float32",
        max_model_len=512,
        kv_cache_memory_bytes=64 << 20,
        engine_args={
            "enable_prefix_caching": False,  # else one side would find what the other has computed
            "num_gpu_blocks_override": NUM_BLOCKS,
            **section.pop("engine_args", {}),
        },
        **section,
    )
    vllm_config = drafter_vllm_config(config, None, None)
    engine = DraftEngine(vllm_config, in_process=True, parallel_drafting=config.parallel_drafting)
    one_pass = {"one_pass": engine.one_pass}
    all_blocks = engine.take_blocks(NUM_BLOCKS - 1)  # vLLM keeps one to itself
    assert all_blocks is not None
    assert engine.take_blocks(1) is None
    engine.free_blocks(all_blocks)
    limits = LookaheadLimits(True, 12, 128)
    hits = GraphHits(engine)
    report = {}
    for cut in (False, True):
        vocabulary = None
        if cut:
            vocabulary = DraftVocabulary(engine.vocab_size, 200)
            engine.cut_head(vocabulary.token_ids)
        for name, sampling in SAMPLINGS.items():
            rng = random.Random(5)
            # Changes of the vocabulary between the two answers would be differences: the second follows the first.
            clock = itertools.count().__next__
            ahead = Side(1, DraftModelProposer(engine, 16, limits, vocabulary, clock, **one_pass))
            at_once = Side(2, DraftModelProposer(engine, 16, LookaheadLimits(False, 12, 128), **one_pass))
            agree, differ, origins, drafted = 0, [], {}, []
            for request in range(3):
                same, other, seen, drafts = play(rng, ahead, at_once, sampling, request)
                agree, differ, drafted = agree + same, differ + other, drafted + drafts
                origins = {origin: origins.get(origin, 0) + seen.get(origin, 0) for origin in {*origins, *seen}}
            ahead.work_off(), at_once.work_off()
            proposer = ahead.proposer
            report[f"{name}{', cut' if cut else ''}"] = {
                "agree": agree,
                "differ": differ,
                "origins": origins,
                "drafted": drafted,
                "graphs": hits.take(),
                "usage": {**proposer.usage(), "kv_cache_usage": engine.kv_cache_usage},
            }
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from outrider.actors.drafter.draft_model import DraftModelProposer
    from outrider.actors.drafter.model_sequence import CATCH_UP_TOKENS
    from outrider.actors.drafter.planner import LookaheadLimits
    from outrider.actors.drafter.vocabulary import DraftVocabulary
    from outrider.cluster.link.messages import Commit, DraftSampling, Open, Proposals
    from outrider.cluster.modes import Mode

    SAMPLINGS = {
        "greedy": DraftSampling(),
        "coupled": DraftSampling(Mode.COUPLED, temperature=1.0, seed=11),
        "rejection": DraftSampling(Mode.REJECTION, temperature=1.0, seed=12, top_n=16),
    }
    main(sys.argv[1], json.loads(sys.argv[2]))
