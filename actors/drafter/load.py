"""Loads the proposer that a drafter's configuration asks for, and warms it up."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray

from outrider.actors.drafter.ngram import NgramProposer
from outrider.actors.drafter.proposer import Proposer
from outrider.actors.drafter.suffix import SuffixProposer
from outrider.actors.drafter.suffix_index import SuffixLimits
from outrider.actors.drafter.vocabulary import DraftVocabulary, trained_on
from outrider.cluster.config import (
    ConfigError,
    DraftModelConfig,
    NgramConfig,
    RemoteConfig,
    SpeculationConfig,
    SuffixConfig,
)
from outrider.cluster.link.messages import Commit, DraftSampling, Open
from outrider.cluster.modes import Mode
from outrider.cluster.placement import RankPlacement

if TYPE_CHECKING:
    from outrider.actors.vllm_adapter.draft_engine import DraftEngine

_CUT_VOCAB_SIZE = 32768
_MIN_CUT_VOCAB_SIZE = 2048
"""The minimum size of a cut LM head, where a drafter was trained on fewer tokens; larger than any draft_top_n."""

_SIDE_BRANCHES = DraftSampling(Mode.COUPLED, temperature=1e6, top_k=3)
"""Makes three tokens equally likely, whatever the model, so that side branches begin, whose first block is a copy."""


def load_proposer(
    config: RemoteConfig,
    speculation: SpeculationConfig,
    ranks: RankPlacement | None,
    placement_group: Any,
    num_common_tokens: int | None = None,
) -> Proposer[Any]:
    """Returns the proposer, its model loaded.

    Args:
        num_common_tokens: ids from there on mean other tokens to the target, or none. A draft model proposes none of
            them.
    """
    if isinstance(config, SuffixConfig):
        return _suffix_proposer(config)
    if isinstance(config, NgramConfig):
        return _ngram_proposer(config)
    from outrider.actors.drafter.draft_model import DraftModelProposer
    from outrider.actors.drafter.planner import LookaheadLimits
    from outrider.actors.vllm_adapter.draft_engine import DraftEngine
    from outrider.actors.vllm_adapter.engine_args import drafter_vllm_config

    if ranks is not None and ray.get_runtime_context().was_current_actor_reconstructed:
        # The ranks of the life before may still be on their way out, and hold their names.
        ranks = replace(ranks, actor_names=[f"{name}#{os.getpid()}" for name in ranks.actor_names])
    adapters = [module.path for module in config.lora_modules]
    vllm_config = drafter_vllm_config(config, ranks, placement_group)
    engine = DraftEngine(vllm_config, ranks is None, adapters, config.parallel_drafting)
    limits = LookaheadLimits(
        ahead=speculation.draft_ahead,
        max_side_branches=speculation.max_side_branches,
        max_rows=config.max_draft_rows,
    )
    vocabulary = cut_head(config, engine, num_common_tokens)
    proposer = DraftModelProposer(engine, config.prefill_chunk_tokens, limits, vocabulary, one_pass=engine.one_pass)
    if num_common_tokens is not None:
        proposer.limit_vocabulary(num_common_tokens)
    if not config.beside:
        return proposer
    from outrider.actors.drafter.lookup_drafters import LookupDrafters

    return LookupDrafters(proposer, {method: _look_up(method) for method in config.beside})


def _look_up(method: str) -> Proposer[Any]:
    """Returns a look-up with the settings that it has by default as a drafter of its own."""
    if method == "suffix":
        return _suffix_proposer(SuffixConfig(method="suffix"))
    return _ngram_proposer(NgramConfig(method="ngram"))


def _ngram_proposer(config: NgramConfig) -> NgramProposer:
    return NgramProposer(config.prompt_lookup_min, config.prompt_lookup_max)


def _suffix_proposer(config: SuffixConfig) -> SuffixProposer:
    limits = SuffixLimits(
        config.suffix_decoding_max_tree_depth,
        config.suffix_decoding_max_spec_factor,
        config.suffix_decoding_min_token_prob,
    )
    return SuffixProposer(limits, config.suffix_decoding_max_cached_requests)


def cut_head(
    config: DraftModelConfig, engine: DraftEngine, num_common_tokens: int | None = None
) -> DraftVocabulary | None:
    """Cuts the engine's output head and returns what it is cut to; None: it stays whole.

    Raises:
        ConfigError: the configuration asks for more tokens than there are.
    """
    size = config.draft_vocab_size
    if size == 0 or (size is None and config.tensor_parallel_size > 1):
        return None
    vocabulary = vocabulary_to_cut_to(size, config.model, engine.vocab_size, engine.end_token_ids, num_common_tokens)
    if vocabulary is not None:
        engine.cut_head(vocabulary.token_ids)
    return vocabulary


def vocabulary_to_cut_to(
    size: int | None, model: str, vocab_size: int, end_token_ids: Iterable[int], num_common_tokens: int | None
) -> DraftVocabulary | None:
    """Returns the vocabulary that a draft model on one rank is cut to; None: it is not cut.

    Args:
        size: as drafter.draft_vocab_size.

    Raises:
        ConfigError: the configuration asks for more tokens than there are.
    """
    if size == 0:
        return None
    most = min(vocab_size, num_common_tokens or vocab_size)
    try:
        own = [token for token in trained_on(model) if token < most]
    except ValueError as error:
        raise ConfigError(f"drafter.model: {error}; assemble the drafter again: outrider distill --assemble") from None
    if size is None:
        is_big = vocab_size >= 2 * _CUT_VOCAB_SIZE
        if not (own or is_big):
            return None
        size = min(max(len(own), _MIN_CUT_VOCAB_SIZE) if own else _CUT_VOCAB_SIZE, most)
    if size > most:
        has = f"the model has {most} tokens" if most == vocab_size else f"{most} are the target's, too"
        raise ConfigError(f"drafter.draft_vocab_size: {size}, {has}; set fewer, or 0 for all")
    return DraftVocabulary(vocab_size, size, always=end_token_ids, at_first=own)


def warm_up(proposer: Proposer[Any], draft_top_n: int) -> None:
    """Prefills and drafts in every way, side branches included, so that no live step of a draft model sets up anything
    lazily. Call it on the thread that runs the steps."""
    from outrider.actors.drafter.draft_model import DraftModelProposer
    from outrider.actors.drafter.lookup_drafters import LookupDrafters

    model = proposer.model if isinstance(proposer, LookupDrafters) else proposer
    if not isinstance(model, DraftModelProposer):
        return
    scratch = model.scratch()
    samplings = (
        DraftSampling(),
        DraftSampling(Mode.REJECTION, temperature=1.0, top_n=draft_top_n),
        DraftSampling(Mode.REJECTION, temperature=1.0, top_p=0.9, top_n=draft_top_n),
        DraftSampling(Mode.COUPLED, temperature=1.0),
        DraftSampling(Mode.COUPLED, temperature=1.0, top_p=0.9),
        _SIDE_BRANCHES,
    )
    for handle, sampling in enumerate(samplings):
        sequence = scratch.new_sequence((0, handle))
        sequence.take_prompt(Open(handle, [0] * 64, num_speculative_tokens=2, sampling=sampling))
        scratch.open(sequence)
        _work_off(scratch)
        scratch.commit(sequence, Commit(handle, 64, [0], num_wanted=2, num_on_miss=2))
        _work_off(scratch)
        scratch.close(sequence)
    _work_off(scratch)


def _work_off(proposer: Proposer[Any]) -> None:
    while (work := proposer.plan()) is not None:
        work.execute()
        proposer.complete(work)
