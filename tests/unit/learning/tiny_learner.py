"""A learner of a tiny model, and texts that the next token follows in by a rule."""

import dataclasses
import random

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.actors.learning import learner as learner_module
from outrider.actors.learning.learner import Learner
from outrider.actors.learning.texts import Text
from outrider.cluster.config import LearningConfig

VOCAB, END = 64, 63
TRAINED = 2**63 - 1
"""A prompt that no share holds out."""


def drafter(seed=0, layers=1):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        eos_token_id=END,
        pad_token_id=END,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config)
    model.lm_head.weight.data *= 20  # it stays as it is, and must be able to say something for certain: no near-ties
    return model


def learner(general=(), model=None, **changes):
    settings = LearningConfig(**{"learning_rate": 3e-3, **changes})
    return Learner(model or drafter(), settings, general=general, dtype=torch.float32, kept_dtype=torch.float32)


def follows(token, rule):
    """Return what the target says after a token: another rule is another domain."""
    return (rule * token + 1) % (VOCAB - 1)


def taught(number, rule=5, greedy=True, length=24):
    """Return a text by a rule, with the target's likeliest tokens at each place."""
    chance = random.Random(number)
    ids = [chance.randrange(VOCAB - 1)]
    while len(ids) < length:
        ids.append(follows(ids[-1], rule))
    start = 4
    likely = np.array(ids[start:], np.int32)
    top = np.stack([likely, (likely + 1) % VOCAB], 1).astype(np.int32)
    log_p = np.log(np.tile([0.95, 0.02], (len(likely), 1))).astype(np.float16)
    return Text(chance.getrandbits(63), int(not greedy), np.array(ids, np.int32), start, top, log_p)


def half(one, lowest):
    """Return the same text in the lower or higher half of the vocabulary, by a rule of its own."""
    ids = [lowest + int(one.ids[0]) % 31]
    while len(ids) < len(one.ids):
        ids.append(lowest + (5 * (ids[-1] - lowest) + 1 + lowest) % 31)
    likely = np.array(ids[one.start :], np.int32)
    top = np.stack([likely, lowest + (likely + 1 - lowest) % 31], 1).astype(np.int32)
    return dataclasses.replace(one, ids=np.array(ids, np.int32), top_ids=top)


def many(count=400, first=0, **changes):
    return [taught(first + number, **changes) for number in range(count)]


def acceptance(made, tensors, texts):
    with made.holding(tensors) as trainer:
        values = trainer.acceptance(texts)
    return sum(values) / len(values)


def work(made, steps):
    """Train for so many steps, however often the texts have been trained on."""
    for _ in range(steps):
        made._to_train_on = learner_module.PASSES
        assert made.work()


def experienced(texts=None, **changes):
    """Return one that has learned something, which serves."""
    made = learner(**changes)
    made.add(texts or many())
    work(made, 100)
    assert made.serving.number >= 1
    return made


def plus(tensors, by=1.0):
    return {name: tensor + by for name, tensor in tensors.items()}


def noise(tensors):
    return {name: torch.randn_like(tensor) for name, tensor in tensors.items()}


def alike(tensors, others):
    return all(torch.equal(tensors[name], other) for name, other in others.items())


def serve(made, tensors=None):
    """Let a version in, as if by the gate: what serves, a little changed, where nothing else is given."""
    with made._lock:
        version = made._next(plus(made._serving.tensors) if tensors is None else tensors)
        made._publish(version, "replaced", previous=made._serving)
    made._follow()
