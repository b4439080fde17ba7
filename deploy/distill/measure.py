"""Acceptance without a server: the target answers prompts, and a drafter's rounds are walked along its answers.

A draft model's forward pass over an answer gives what it would have drafted at every token of it (`rounds.walk`).
Look-up drafters are the served ones' own strategies, told the text round by round; beside a draft model each round is
the one's that the served judge (drafter/several.py) chooses.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.actors.drafter.draft_model import verified
from outrider.actors.drafter.judge import MODEL, Judge, Offer
from outrider.actors.learning import draft_models
from outrider.actors.learning.draft_models import end_tokens
from outrider.actors.learning.rounds import StepTimes, Tally, look_up, walk
from outrider.cluster.config import ConfigError, NgramConfig, SpeculationConfig, SuffixConfig
from outrider.deploy.bench.machine import machine, versions
from outrider.deploy.distill import models
from outrider.deploy.distill.prompts import PromptFile, spread, tokens_of
from outrider.deploy.models.identity import check_made_for
from outrider.deploy.progress import Progress

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from outrider.actors.drafter.vocabulary import DraftVocabulary

TOGETHER = 16
TOP_N = 64
"""Tokens of q that travel to the verifier, as DraftSampling.top_n has it."""

LookUp = NgramConfig | SuffixConfig

BESIDE: dict[str, LookUp] = {"ngram": NgramConfig(method="ngram"), "suffix": SuffixConfig(method="suffix")}
"""As `drafter.beside` has them."""

ChooseNext = Callable[["torch.Tensor", "torch.Tensor"], "torch.Tensor"]
"""(logits float32 [B, V], tokens before int64 [B]) -> token ids [B]."""


@dataclass(frozen=True)
class Settings:
    target: Path
    drafter: Path | LookUp
    """The checkpoint of a draft model, or the look-up's own configuration."""

    data: PromptFile
    limit: int | None
    chat: bool
    temperature: float
    """Above 0: answers drawn at it are measured too."""

    k: int
    max_tokens: int
    seed: int
    times: StepTimes | None
    device: str
    dtype: torch.dtype
    beside: tuple[str, ...] = ()
    """Look-ups beside a draft model: of BESIDE."""

    draft_vocab_size: int | None = None
    """What a draft model's output head is cut to, as drafter.draft_vocab_size has it."""


@dataclass
class ByMode:
    """Rounds of one way to verify, for every number of drafts up to K."""

    tallies: list[Tally]
    overlaps: list[float] = field(default_factory=list)
    """At every token alike: the probability that a draft there is accepted. Of draft models only."""

    moves: list[list[float]] = field(default_factory=list)
    """Of each text, at every token but the first: the probability that a draft moved the round on. Likewise."""

    chosen: dict[str, int] | None = None
    """Of several drafters, whose drafts were sent in how many rounds of K."""

    @staticmethod
    def up_to(k: int) -> ByMode:
        return ByMode([Tally(size) for size in range(1, k + 1)])

    def walk(self, overlap: list[float], moves_on: list[float]) -> None:
        self.overlaps += overlap
        self.moves.append(moves_on)
        for tally in self.tallies:
            tally.add(walk(overlap, moves_on, tally.k))

    def document(self, times: StepTimes | None) -> dict[str, Any]:
        rows = []
        for tally in self.tallies:
            row: dict[str, Any] = {
                "k": tally.k,
                "tokens_per_round": tally.tokens_per_round,
                "accepted_per_round": tally.tokens_per_round - 1.0,
                "proposed_per_round": tally.proposed_per_round,
                "acceptance_rate": tally.acceptance_rate,
            }
            if times is not None:
                row["speedup_in_turn"] = times.in_turn(tally.tokens_per_round, tally.k)
                row["speedup_hidden"] = times.hidden(tally.tokens_per_round, tally.k)
            rows.append(row)
        last = self.tallies[-1]
        return {
            "acceptance_rate": last.acceptance_rate,
            "per_token_acceptance": last.per_token,
            "by_position": last.by_position,
            "rounds": last.rounds,
            "overlap": sum(self.overlaps) / len(self.overlaps) if self.overlaps else None,
            "by_k": rows,
            **({} if self.chosen is None else {"chosen": self.chosen}),
        }


def measure(settings: Settings, progress: Progress) -> dict[str, Any]:
    """The report. Raises ConfigError."""
    prompts = spread(settings.data.prompts, settings.limit)
    document = models.check_architecture(settings.target, "TARGET")
    room = int(document.get("max_position_embeddings") or 1 << 20) - settings.max_tokens
    tokens = tokens_of(
        prompts, models.load_tokenizer(settings.target), room, settings.chat, "lower --max-tokens", "--dataset"
    )
    drafter: PreTrainedModel | None = None
    if isinstance(settings.drafter, Path):
        models.check_same_words(settings.target, settings.drafter)
        check_made_for(settings.target, settings.drafter, every_tensor=True)
        drafter = draft_models.load(settings.drafter, settings.dtype, settings.device)
    target = draft_models.load(settings.target, settings.dtype, settings.device)
    found: dict[str, ByMode] = {}
    look_ups: dict[str, dict[str, ByMode]] = {name: {} for name in settings.beside}
    together: dict[str, ByMode] = {}
    answers = answered = 0
    head: CutHead | None = None
    for temperature in (0.0,) if settings.temperature == 0 else (0.0, settings.temperature):
        texts = []
        for prompt, answer in _answers(target, tokens, settings, temperature):
            texts.append((prompt, answer))
            answers, answered = answers + 1, answered + len(answer)
            progress.wait("answers:", f"{len(texts)} of {len(tokens)} at temperature {temperature:g}")
        if drafter is None:
            assert not isinstance(settings.drafter, Path)
            modes = {"greedy" if temperature == 0 else "sampled": _looked_up(texts, settings.drafter, settings.k)}
        else:
            head = _cut_head(target, drafter, settings)
            modes = _walked(target, drafter, head, texts, settings, temperature)
            for name in settings.beside:
                look_ups[name]["sampled" if temperature else "greedy"] = _looked_up(texts, BESIDE[name], settings.k)
            if settings.beside:
                together |= {mode: _together(texts, modes[mode], mode, settings) for mode in modes}
        found |= modes
    chosen = "greedy" if settings.temperature == 0 else next(mode for mode in found if mode != "greedy")
    return {
        "acceptance_rate": found[chosen].tallies[-1].acceptance_rate,
        "mode": chosen,
        "temperature": settings.temperature,
        "k": settings.k,
        "target": str(settings.target),
        "drafter": {"method": "draft_model", "model": str(settings.drafter), "beside": list(settings.beside)}
        if isinstance(settings.drafter, Path)
        else settings.drafter.model_dump(exclude_none=True, include=_ABOUT),
        "dataset": {"path": str(settings.data.path), "sha256": settings.data.sha256, "prompts": len(prompts)},
        "answers": answers,
        "tokens": answered,
        "max_tokens": settings.max_tokens,
        "chat": settings.chat,
        "seed": settings.seed,
        "dtype": str(settings.dtype).removeprefix("torch."),
        "draft_vocabulary": None if head is None else head.document(),
        "modes": _documents(found, settings.times),
        "look_ups": {name: _documents(modes, None) for name, modes in look_ups.items()},
        "together": _documents(together, settings.times),
        "step_times": None
        if settings.times is None
        else {"target_ms": settings.times.target_ms, "draft_ms": settings.times.draft_ms},
        "machine": machine(()),
        "versions": versions(),
        "ended": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _documents(modes: dict[str, ByMode], times: StepTimes | None) -> dict[str, Any]:
    return {mode: by_mode.document(times) for mode, by_mode in modes.items()}


_ABOUT = {"method", "prompt_lookup_min", "prompt_lookup_max", "suffix_decoding_max_tree_depth"}


def table(report: dict[str, Any]) -> str:
    """For people."""
    lines = [
        f"{report['answers']} answers, {report['tokens']} tokens; acceptance_rate {report['acceptance_rate']:.3f} "
        f"({report['mode']}, K = {report['k']})"
    ]
    if (cut := report["draft_vocabulary"]) is not None:
        lines.append(
            f"output head cut to {cut['size']} tokens, as when served; {cut['missed']} of {cut['tokens']} tokens of "
            "the answers were not in it"
        )
    for mode, found in report["modes"].items():
        positions = "  ".join("  -  " if share is None else f"{share:.3f}" for share in found["by_position"])
        lines.append(f"{mode}: by position {positions}")
        for row in found["by_k"]:
            tokens, rate = row["tokens_per_round"], row["acceptance_rate"]
            line = f"  K = {row['k']}: {tokens:.2f} tokens a round, {rate:.3f} accepted"
            if "speedup_in_turn" in row:
                line += f"; x{row['speedup_in_turn']:.2f} drafted in turn, x{row['speedup_hidden']:.2f} hidden"
            lines.append(line)
    if report["together"]:
        lines += ["", _beside_table(report)]
    return "\n".join(lines)


def _beside_table(report: dict[str, Any]) -> str:
    """Each drafter alone, and all with a judge. Accepted drafts a round can be compared; of those proposed they cannot,
    for a look-up proposes where it finds something alone."""
    alone = {"draft_model": report["modes"], **report["look_ups"], "together": report["together"]}
    ks = [row["k"] for row in next(iter(report["together"].values()))["by_k"]]
    lines = [f"accepted drafts a round, and of those proposed, K = {', '.join(map(str, ks))}"]
    for name, modes in alone.items():
        for mode, found in modes.items():
            rows = found["by_k"]
            rounds = ", ".join(f"{row['accepted_per_round']:.2f}" for row in rows)
            shares = ", ".join(f"{row['acceptance_rate']:.3f}" for row in rows)
            sent = found.get("chosen", {})
            of = f"  (rounds of {', '.join(f'{who} {count}' for who, count in sent.items())})" if sent else ""
            lines.append(f"  {name:<12} {mode:<10} {rounds}   {shares}{of}")
    return "\n".join(lines)


def _answers(
    target: PreTrainedModel, prompts: Sequence[list[int]], settings: Settings, temperature: float
) -> Iterator[tuple[list[int], list[int]]]:
    """(prompt, answer), greedy or drawn by coupled noise: rounds of every mode may be walked along these."""
    import torch

    from outrider.actors.verification.coupled import coupled_choice

    for at in range(0, len(prompts), TOGETHER):
        batch = prompts[at : at + TOGETHER]
        seeds = torch.tensor([_seed(settings, at + row) for row in range(len(batch))])

        def choose(logits: torch.Tensor, places: torch.Tensor, seeds: torch.Tensor = seeds) -> torch.Tensor:
            heat = torch.full((len(logits),), temperature)
            return coupled_choice(logits, heat, None, logits.amax(-1), seeds, places)

        chosen = _generate(target, batch, settings.max_tokens, choose if temperature else None)
        yield from zip(batch, chosen, strict=True)


def _generate(
    target: PreTrainedModel,
    prompts: Sequence[list[int]],
    num_tokens: int,
    choose: ChooseNext | None,
) -> list[list[int]]:
    """The answers' token ids, with the end token where they end, at least one token each. choose: chooses every token;
    None: greedy."""
    import torch
    from transformers import GenerationConfig

    device, pad = target.device, target.generation_config.pad_token_id
    longest = max(map(len, prompts))
    ids = torch.full((len(prompts), longest), pad)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    settings = GenerationConfig(max_new_tokens=num_tokens, do_sample=False)
    with torch.inference_mode():
        out = target.generate(
            ids.to(device),
            attention_mask=mask.to(device),
            generation_config=settings,
            logits_processor=_chooser(choose, longest - mask.sum(1)) if choose is not None else None,
        )
    ends = end_tokens(target)
    answers = []
    for row in out[:, longest:].tolist():
        stop = next((at + 1 for at, token in enumerate(row) if token in ends), len(row))
        answers.append(row[:stop])
    return answers


def _chooser(choose: ChooseNext, padding: torch.Tensor) -> Any:
    """What makes transformers' greedy search take the chosen tokens. padding: [B], tokens before each prompt."""
    from transformers import LogitsProcessor, LogitsProcessorList

    class Chosen(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            chosen = choose(scores.float().cpu(), input_ids.shape[1] - padding.cpu()).to(scores.device)
            return scores.new_full(scores.shape, float("-inf")).scatter(1, chosen[:, None], 0.0)

    return LogitsProcessorList([Chosen()])


def _seed(settings: Settings, index: int) -> int:
    return settings.seed + 1 + index


def _walked(
    target: PreTrainedModel,
    drafter: PreTrainedModel,
    head: CutHead | None,
    texts: Sequence[tuple[list[int], list[int]]],
    settings: Settings,
    temperature: float,
) -> dict[str, ByMode]:
    """A draft model's rounds. q of rejection is the drafter's TOP_N likeliest tokens, of those that its head is cut to,
    as it is when served."""
    import torch

    from outrider.actors.verification.coupled import coupled_choice

    names = ("rejection", "coupled") if temperature else ("greedy",)
    found = {name: ByMode.up_to(settings.k) for name in names}
    for index, (prompt, answer) in enumerate(texts):
        if len(answer) < 2:
            continue
        ids = torch.tensor([prompt + answer], device=settings.device)
        # The first token comes with the prompt's own step.
        rows = slice(len(prompt), ids.shape[1] - 1)
        tokens = torch.tensor(answer[1:])
        with torch.inference_mode():
            theirs = drafter(ids).logits[0, rows].float().cpu()
            if head is not None:
                head.cut(theirs, index, prompt, answer)
            if not temperature:
                same = (theirs.argmax(-1) == tokens).float().tolist()
                found["greedy"].walk(same, same)
                continue
            ours = target(ids).logits[0, rows].float().cpu()
        p, q = (ours / temperature).softmax(-1), (theirs / temperature).softmax(-1)
        overlap, moves_on = rejection(p, q, tokens)
        found["rejection"].walk(overlap.tolist(), moves_on.tolist())
        heat, seeds = torch.full((len(tokens),), temperature), torch.full((len(tokens),), _seed(settings, index))
        places = torch.arange(len(prompt) + 1, ids.shape[1])
        drafted = coupled_choice(theirs, heat, None, theirs.amax(-1), seeds, places)
        same = (drafted == tokens).float().tolist()
        found["coupled"].walk(same, same)
    return found


class CutHead:
    """A draft model's output head along answers, as it is cut when served: the vocabulary follows the text, and the
    answers come one after the other."""

    def __init__(self, vocabulary: DraftVocabulary) -> None:
        self._vocabulary = vocabulary

    def cut(self, logits: torch.Tensor, key: int, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """In place: minus infinity for what is not in it. logits: float32 [N, V], for the answer's tokens but the
        first. A draft is drawn before the tokens of its own round are known, but those before it are accepted drafts
        there, so they are in it anyway."""
        import torch

        vocabulary = self._vocabulary
        vocabulary.pin(key, prompt)
        outside: torch.Tensor | None = None
        for row, token in zip(logits, answer[:-1], strict=True):
            vocabulary.observe([token])
            if vocabulary.take_changes() or outside is None:
                outside = torch.ones(len(row), dtype=torch.bool)
                outside[vocabulary.token_ids] = False
            row.masked_fill_(outside, float("-inf"))
        vocabulary.observe(answer[-1:])
        vocabulary.unpin(key)

    def document(self) -> dict[str, Any]:
        """missed: tokens of the answers that were not in it when they came."""
        vocabulary = self._vocabulary
        return {"size": len(vocabulary), "tokens": vocabulary.num_observed, "missed": vocabulary.num_missed}


def _cut_head(target: PreTrainedModel, drafter: PreTrainedModel, settings: Settings) -> CutHead | None:
    """As a deployment that has just started has it; None: it is whole. Raises ConfigError."""
    from outrider.actors.drafter.load import vocabulary_to_cut_to

    sizes = [model.get_output_embeddings().weight.shape[0] for model in (drafter, target)]
    ends = sorted(end_tokens(drafter))
    vocabulary = vocabulary_to_cut_to(settings.draft_vocab_size, str(settings.drafter), sizes[0], ends, min(sizes))
    if vocabulary is None:
        return None
    vocabulary.limit(min(sizes))
    return CutHead(vocabulary)


def rejection(p: torch.Tensor, q: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each token: sum min(p, q), and min(1, q / p) at the token. p: [N, V]; q: [N, W], where W may be another
    padding of the vocabulary; tokens: int64 [N]. q is cut to its TOP_N likeliest."""
    import torch

    size = min(p.shape[1], q.shape[1])
    kept, ids = q[:, :size].topk(min(TOP_N, size), dim=-1)
    kept = kept / kept.sum(-1, keepdim=True)
    overlap = torch.minimum(p.gather(1, ids), kept).sum(-1)
    at_token = torch.where(ids == tokens[:, None], kept, 0.0).sum(-1)
    return overlap, (at_token / p.gather(1, tokens[:, None])[:, 0].clamp(min=1e-30)).clamp(max=1.0)


def _looked_up(texts: Sequence[tuple[list[int], list[int]]], config: LookUp, k: int) -> ByMode:
    """q of a look-up is one-hot, so a draft is accepted where the text has it, whatever the temperature. Every K is a
    deployment of its own, which reads the answers one after the other."""
    found = ByMode.up_to(k)
    for tally in found.tallies:
        propose_for = _strategy(config, tally.k)
        for handle, (prompt, answer) in enumerate(texts):
            with_end = propose_for(handle, prompt)
            tally.add(look_up(answer, with_end, tally.k))
            with_end([])
    return found


def _together(texts: Sequence[tuple[list[int], list[int]]], model: ByMode, mode: str, settings: Settings) -> ByMode:
    """Rounds of a draft model with look-ups beside it. model: alone, in that mode. Under rejection whether a token was
    the model's draft is drawn from the seed with the probability that it was."""
    import random

    longer = [(prompt, answer) for prompt, answer in texts if len(answer) > 1]
    found = ByMode.up_to(settings.k)
    for tally in found.tallies:
        chance = random.Random(f"{settings.seed}:{tally.k}")
        judge = Judge([MODEL, *settings.beside])
        openers = {name: _strategy(BESIDE[name], tally.k) for name in settings.beside}
        for handle, ((prompt, answer), moves_on) in enumerate(zip(longer, model.moves, strict=True)):
            agrees = [chance.random() < moved for moved in moves_on]
            look_ups = {name: opened(handle, prompt) for name, opened in openers.items()}
            tally.add(look_up(answer, Judged(judge, answer, agrees, look_ups, tally.k, mode != "rejection"), tally.k))
            for with_end in look_ups.values():
                with_end([])
        found.chosen = dict(judge.chosen)
    return found


class Judged:
    """Proposes along one answer as `several.SeveralStrategy` does where all of the model's drafts are at hand: none is
    waited for."""

    def __init__(
        self,
        judge: Judge,
        answer: Sequence[int],
        agrees: Sequence[bool],
        look_ups: dict[str, Callable[[Sequence[int]], list[int]]],
        k: int,
        free_of_rounds: bool,
    ) -> None:
        """agrees: whether the model's draft in the place of each token but the first is that token. look_ups: told what
        was committed, each gives what it would send. free_of_rounds: what the model would have drafted is known where
        it was not sent."""
        self._judge, self._answer, self._agrees, self._look_ups = judge, answer, agrees, look_ups
        self._k, self._free_of_rounds = k, free_of_rounds
        self._record = judge.record()
        self._offered: dict[str, list[int]] = {}
        self._at = 0

    def __call__(self, committed: Sequence[int]) -> list[int]:
        """committed: what was committed last. Returns the drafts of who is chosen."""
        self._at += len(committed)
        for name, drafts in self._offered.items():
            self._judge.verdict(self._record, name, *verified(drafts, committed))
        offered = {name: propose(committed) for name, propose in self._look_ups.items()}
        self._offered = {name: drafts for name, drafts in offered.items() if drafts}
        ahead = range(self._at, self._at + self._k)
        known = len(self._answer)
        model = [self._answer[at] if at < known and self._agrees[at - 1] else _ANOTHER for at in ahead]
        offers = [Offer(MODEL, self._k), *(Offer(name, len(drafts)) for name, drafts in self._offered.items())]
        chosen = self._judge.choose(self._record, offers).drafter
        sent = model if chosen == MODEL else self._offered[chosen]
        if chosen == MODEL or self._free_of_rounds:
            self._offered[MODEL] = model
        return sent


_ANOTHER = -1
"""In place of a draft that is not the text's token, whatever it would have been."""


def _strategy(config: LookUp, k: int) -> Callable[[int, list[int]], Callable[[Sequence[int]], list[int]]]:
    """What opens a sequence with its prompt. That gives what proposes; told no tokens, it closes the sequence."""
    from outrider.actors.drafter.load import load_strategy
    from outrider.cluster.link.messages import Commit, DraftSampling, Open

    strategy = load_strategy(config, SpeculationConfig(num_speculative_tokens=k), None, None)

    def work_off() -> None:
        while (work := strategy.plan()[0]) is not None:
            work.execute()
            strategy.complete(work)

    def open_sequence(handle: int, prompt: list[int]) -> Callable[[Sequence[int]], list[int]]:
        sequence = strategy.new_sequence((0, handle))
        sequence.add_prompt(Open(handle, len(prompt), 0, prompt, k, DraftSampling()))
        strategy.open(sequence)
        work_off()

        def propose(committed: Sequence[int]) -> list[int]:
            if not committed:
                strategy.close(sequence)
                work_off()
                return []
            answers = strategy.commit(sequence, Commit(handle, sequence.committed_len, list(committed), k, k))
            work_off()
            return list(answers[-1].proposals.token_ids)[:k]

        return propose

    return open_sequence


def look_up_of(drafter: Any) -> LookUp:
    """Raises ConfigError for a drafter that is no look-up."""
    if not isinstance(drafter, LookUp):
        method = getattr(drafter, "method", "none")
        raise ConfigError(
            f"--preset: its drafter is of method {method}, which drafts from inside the target; only draft_model, "
            "ngram and suffix can be measured without a server; use outrider bench"
        )
    return drafter
