"""A drafter is trained on the device, in the data type that it is trained in there."""

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from transformers import LlamaConfig, LlamaForCausalLM

from outrider.actors.learning.texts import TOP, Text
from outrider.actors.learning.train import Trainer
from outrider.deploy.distill.models import draft_vocabulary, from_layers
from outrider.deploy.distill.rounds import measured

STEPS = 60


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("draft_vocab_size", [None, 48], ids=["whole", "cut"])
def test_training_brings_a_drafter_nearer_to_its_target(device, dtype, draft_vocab_size):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        eos_token_id=95,
        pad_token_id=95,
    )
    target = LlamaForCausalLM(config).eval().requires_grad_(False)
    target.lm_head.weight.data *= 20  # no near-ties
    target = target.to(device, dtype)
    texts = [answered(target, number) for number in range(6)]
    drafter = from_layers(target, [0, 3]).to(device)
    ids = draft_vocabulary(texts, draft_vocab_size, 96, {95}) if draft_vocab_size else None
    trainer = Trainer(drafter, 3e-3, dtype, ids)
    before = measured(trainer, texts, 3).overlap
    for step in range(STEPS):
        trainer.step(step, 1.0, texts)
    after = measured(trainer, texts, 3).overlap
    assert trainer.skipped == 0
    assert after > before + 0.1


def answered(target, number):
    """Return a greedy answer of 24 tokens."""
    ids, top_ids, top_log_p = torch.tensor([number, 2 * number + 1, 7]), [], []
    for _ in range(24):
        logits = target(ids[None].to(target.device), use_cache=False).logits[0, -1].float().cpu()
        log_p = logits.log_softmax(-1)
        likely = log_p.topk(TOP)
        top_ids.append(likely.indices.int().numpy())
        top_log_p.append(likely.values.half().numpy())
        ids = torch.cat([ids, log_p.argmax()[None]])
    return Text(number, 0, ids.int().numpy(), 3, np.stack(top_ids), np.stack(top_log_p))
