"""Acceptance without a server: the target answers prompts, and a drafter's rounds are walked along its answers.

A draft model's forward pass over an answer gives what it would have drafted at every token of it (`rounds.walk`).
Look-ups, and look-ups beside it: `look_ups.py`.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.actors.learning import draft_models
from outrider.actors.learning.draft_models import end_tokens
from outrider.actors.learning.rounds import ByMode, StepTimes
from outrider.deploy.bench.machine import machine, versions
from outrider.deploy.distill import models
from outrider.deploy.distill.look_ups import BESIDE, LookUp, looked_up, together_with
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
            modes = {"greedy" if temperature == 0 else "sampled": looked_up(texts, settings.drafter, settings.k)}
        else:
            head = _cut_head(target, drafter, settings)
            modes = _walked(target, drafter, head, texts, settings, temperature)
            for name in settings.beside:
                look_ups[name]["sampled" if temperature else "greedy"] = looked_up(texts, BESIDE[name], settings.k)
            if settings.beside:
                together |= {
                    mode: together_with(texts, modes[mode], mode, settings.beside, settings.seed) for mode in modes
                }
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
