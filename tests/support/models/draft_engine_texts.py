"""Greedy drafts of our draft engine, and what transformers gives: `python draft_engine_texts.py MODEL TARGET`.

Prints one JSON object. Prompts go through the target's tokenizer; wanted is the model's likeliest token, again and
again. A process of its own, because an engine stays in the process that started it.
"""

import json
import os
import sys

WANTED = 4
PROMPTS = ("red and cat", "black and a rather longer prompt, to fill more than one block of the cache", "pink and emu")


def main(model, target):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from outrider.actors.drafter.draft_model import DraftModelProposer
    from outrider.actors.drafter.planner import LookaheadLimits
    from outrider.actors.vllm_adapter.draft_engine import DraftEngine
    from outrider.actors.vllm_adapter.engine_args import drafter_vllm_config
    from outrider.cluster.config import DraftModelConfig
    from outrider.cluster.link.messages import Commit, DraftSampling, Open

    config = DraftModelConfig(
        method="draft_model", model=model, dtype="float32", max_model_len=512, kv_cache_memory_bytes=64 << 20
    )
    engine = DraftEngine(drafter_vllm_config(config, None, None), in_process=True)
    proposer = DraftModelProposer(engine, 64, LookaheadLimits(False, 12, 128))
    tokenizer, plain = AutoTokenizer.from_pretrained(target), AutoModelForCausalLM.from_pretrained(model).float()
    drafts, wanted = [], []
    for handle, prompt in enumerate(PROMPTS):
        ids = tokenizer(prompt)["input_ids"]
        sequence = proposer.new_sequence((1, handle))
        sequence.take_prompt(Open(handle, ids[:-1], WANTED, DraftSampling()))
        proposer.open(sequence)
        proposer.commit(sequence, Commit(handle, len(ids) - 1, ids[-1:], WANTED, WANTED))
        while (work := proposer.plan()) is not None:
            work.execute()
            proposer.complete(work)
        drafts.append([int(token) for token in proposer.outbox.drain()[-1].message.token_ids])
        text = torch.tensor([ids])
        for _ in range(WANTED):
            with torch.inference_mode():
                text = torch.cat([text, plain(text).logits[:, -1].argmax(-1, keepdim=True)], 1)
        wanted.append(text[0, len(ids) :].tolist())
    print(json.dumps({"drafts": drafts, "wanted": wanted}), flush=True)


if __name__ == "__main__":
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    main(*sys.argv[1:])
