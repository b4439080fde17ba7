"""Drafts of our draft engine in one pass, and what transformers gives: `python one_pass_texts.py MODEL`.

Prints one JSON object. Each proposal, of a hit or a miss, is compared with one forward pass of another implementation
over the whole text and masks behind it, so KV of a mask or of a rejected draft that was kept would show. A process of
its own, because an engine stays in the process that started it.
"""

import itertools
import json
import os
import random
import sys

WANTED, ROUNDS = 4, 16
TIE = 1e-3


def main(model):
    import torch
    from transformers import AutoModelForCausalLM

    from outrider.actors.drafter.draft_model import DraftModelProposer
    from outrider.actors.drafter.planner import LookaheadLimits
    from outrider.actors.vllm_adapter.draft_engine import DraftEngine
    from outrider.actors.vllm_adapter.engine_args import drafter_vllm_config
    from outrider.cluster.config import DraftModelConfig
    from outrider.cluster.link.messages import Commit, DraftSampling, Open, Proposals
    from outrider.cluster.modes import Mode
    from tests.support.models.reference import GREEDY, Coupled
    from tests.support.models.tiny_models import MASK

    config = DraftModelConfig(
        method="draft_model", model=model, dtype="float32", max_model_len=512, kv_cache_memory_bytes=64 << 20
    )
    vllm_config = drafter_vllm_config(config, None, None)
    engine = DraftEngine(vllm_config, in_process=True, parallel_drafting=config.parallel_drafting)
    clock = itertools.count().__next__  # or what rows cost here would decide which side branches there are
    proposer = DraftModelProposer(engine, 64, LookaheadLimits(True, 12, 128), clock=clock, one_pass=engine.one_pass)
    plain = AutoModelForCausalLM.from_pretrained(model).float()
    report = {"one_pass": engine.one_pass}

    def answers():
        said = [message for _, message in proposer.outbox.drain()]
        return [message for message in said if isinstance(message, Proposals) and message.status.name == "OK"]

    def work_off():
        while (work := proposer.plan()) is not None:
            work.execute()
            proposer.complete(work)

    def opened(handle, text, sampling):
        sequence = proposer.new_sequence((1, handle))
        sequence.take_prompt(Open(handle, text, WANTED, sampling))
        proposer.open(sequence)
        return sequence

    def reference(text, count):
        with torch.inference_mode():
            logits = plain(torch.tensor([[*text, *[MASK] * (count - 1)]])).logits[0, len(text) - 1 :].clone()
            report["mask_is_likeliest"] = report.get("mask_is_likeliest", 0) + int((logits.argmax(-1) == MASK).sum())
            logits[:, MASK] = -torch.inf
        return logits

    def differences(text, answer, sampling):
        """The positions at which a draft, or q, is another than of the reference."""
        logits, found = reference(text, len(answer.token_ids)), []
        for index, draft in enumerate(answer.token_ids):
            row = logits[index]
            if sampling.mode is Mode.REJECTION:
                q = torch.zeros(len(row)).scatter_(
                    0, torch.from_numpy(answer.q.ids[index]).long(), torch.from_numpy(answer.q.probs[index])
                )
                top = row.topk(64)
                wanted = torch.zeros(len(row)).scatter_(0, top.indices, top.values.softmax(-1))
                if not torch.allclose(q, wanted, atol=1e-4):
                    found.append(index)
                continue
            choice = GREEDY if sampling.mode is Mode.GREEDY else Coupled(sampling.seed, sampling.temperature)
            scores = choice.scores(row, len(text) + index)
            if scores[int(draft)] < scores.max() - TIE:
                found.append(index)
        return found

    samplings = {
        "greedy": DraftSampling(),
        "coupled": DraftSampling(Mode.COUPLED, temperature=0.8, seed=11),
        "rejection": DraftSampling(Mode.REJECTION, temperature=1.0, seed=12, top_n=64),
    }
    for number, (name, sampling) in enumerate(samplings.items()):
        rng = random.Random(number)
        origins, differ, compared, cached = {}, [], 0, 0
        for request in range(3):
            text = [rng.randrange(33, 127) for _ in range((5, 31, 70)[request])]
            sequence, drafts = opened(10 * number + request, list(text), sampling), []
            work_off()
            for _ in range(ROUNDS):
                kind, accepted, token = rng.randrange(3), rng.randint(0, len(drafts)), rng.randrange(33, 127)
                if kind == 0 and sequence.num_drafted > len(drafts):
                    accepted = len(drafts)
                    (token,) = sequence.main.ids(len(text) + accepted, len(text) + accepted + 1)
                elif kind == 1 and sequence.sides:
                    position, token = rng.choice(sorted(sequence.sides))
                    accepted = position - len(text)
                tokens = [*drafts[:accepted], token]
                answers()
                proposer.commit(sequence, Commit(sequence.key[1], len(text), tokens, WANTED, WANTED))
                text += tokens
                while not (said := answers()):
                    work = proposer.plan()
                    work.execute()
                    proposer.complete(work)
                drafts = [int(draft) for draft in said[0].token_ids]
                origins[said[0].origin.name] = origins.get(said[0].origin.name, 0) + 1
                compared += len(drafts)
                differ += [[len(text), index] for index in differences(text, said[0], sampling)]
                if rng.random() < 0.8:
                    work_off()
            proposer.close(sequence)
            # Opened again: full blocks are found in the prefix cache, and hold nothing of a mask.
            again = opened(10 * number + request + 5, text[:-1], sampling)
            cached += again.main.num_computed
            work_off()
            answers()
            proposer.commit(again, Commit(again.key[1], len(text) - 1, text[-1:], WANTED, WANTED))
            work_off()
            differ += [["again", index] for index in differences(text, answers()[0], sampling)]
            proposer.close(again)
            work_off()
        report[name] = {"compared": compared, "differ": differ, "origins": origins, "cached": cached}
        report[name]["blocks"] = proposer.usage()["branch_blocks"]
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    main(sys.argv[1])
