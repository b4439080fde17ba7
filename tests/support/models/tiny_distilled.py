"""A stored drafter for a tiny target, by `outrider distill` as it is, but for the engine that generates text: what the
target says is asked of transformers, which takes a moment where starting vLLM takes half a minute."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import torch

from outrider.actors.learning.draft_models import load
from outrider.actors.learning.texts import TOP
from outrider.actors.vllm_adapter.offline_answers import TOGETHER, Answer
from outrider.deploy.distill.models import load_tokenizer
from outrider.deploy.distill.prompts import read_prompts, tokens_of
from outrider.deploy.distill.run import Settings, distill
from outrider.deploy.distill.texts import TextStore, held_out, plan, texts_of
from outrider.deploy.progress import Progress

COLOURS = "red green blue black white grey pink gold"
ANIMALS = "cat dog cow hen fox owl bee ant elk emu"
ANSWER_TOKENS = 40


def build_distilled(out: Path, target: Path) -> tuple[Path, Path]:
    """Train a drafter of the target's first layer for a few seconds; of targets see tiny_models.build_learnable.

    Returns the assembled checkpoint, and the prompts.
    """
    data = out.with_suffix(".jsonl")
    data.write_text(
        "".join(
            json.dumps({"prompt": f"{a} and {b}"}) + "\n"
            for a, b in itertools.product(COLOURS.split(), ANIMALS.split())
        )
    )
    settings = Settings(
        target=str(target), data=(data,), out=out, layers=1, start=None, steps=50, seq_len=64,
        answer_tokens=ANSWER_TOKENS, samples=1, chat=False, draft_vocab_size=None, learning_rate=5e-3, batch_size=16,
        seed=0, device="cpu", dtype="float32", bits=16,
    )  # fmt: skip
    prompts = read_prompts(data).prompts
    room = settings.seq_len - ANSWER_TOKENS
    tokens = tokens_of(list(prompts), load_tokenizer(target), room, False, "the test's prompts")
    store, model = TextStore(out / "texts"), load(target, torch.float32, "cpu")
    kept_out = held_out([prompt.digest for prompt in prompts])
    for job in plan(len(tokens), kept_out, settings.samples, TOGETHER, settings.seed):
        asked = [tokens[index] for index in job.prompts]
        store.save(job, texts_of(job, asked, [_greedy(model, prompt) for prompt in asked]))
    return distill(settings, Progress()), data


@torch.inference_mode()
def _greedy(model: torch.nn.Module, prompt: list[int]) -> Answer:
    ids = torch.tensor([prompt])
    whole = model.generate(ids, do_sample=False, max_new_tokens=ANSWER_TOKENS, attention_mask=torch.ones_like(ids))
    log_p = model(whole).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    top = log_p.topk(TOP, dim=-1)
    return Answer(whole[0, len(prompt) :].tolist(), top.indices.int().numpy(), top.values.half().numpy())
