"""Runs whole steps of the target's engine on the virtual GPU: `python -m tests.cuda_build.target_steps MODEL`.

vLLM's engine core schedules, vLLM's model runner computes with our round built in, and a drafter answers over a link
made of lists. Every answer is greedy and compared with Transformers' model on the CPU. Prints a line of JSON for each
variant.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM

REFERENCE = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)  # on PyTorch as it is

from tests.cuda_build import h100  # noqa: F401 - before vLLM, which is then imported on the virtual GPU
from tests.cuda_build.virtual_gpu import GPU, no_engine_left

from vllm import SamplingParams
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.request import Request

from outrider.actors.vllm_adapter.engine_args import target_vllm_config
from outrider.actors.vllm_adapter.target_runner import RoundRunner
from outrider.cluster.config import parse_config
from outrider.cluster.link.messages import Commit, Message, Open, Proposals, ProposalStatus
from outrider.cluster.placement import RankPlacement
from tests.cuda_build.draft_steps import TOLERANCE
from tests.unit.round.scripted_link import FakeLink

K = 3
VARIANTS: dict[str, dict[str, Any]] = {
    "FlashAttention 3, bf16, a step ahead, graphs": {
        "dtype": "bfloat16", "attention_backend": "FLASH_ATTN", "graphs": True,
    },
    "FlashAttention 3, fp8 KV, one step at a time": {
        "dtype": "bfloat16", "attention_backend": "FLASH_ATTN", "kv_cache_dtype": "fp8", "async_scheduling": False,
    },
    "FlashAttention 3, bf16, no drafter, overlapping steps, graphs": {
        "dtype": "bfloat16", "attention_backend": "FLASH_ATTN", "drafter": None, "graphs": True,
    },
    "Triton attention, float32, a step ahead": {"dtype": "float32", "attention_backend": "TRITON_ATTN"},
}  # fmt: skip


class OneRank(UniProcExecutor):
    """The worker in this process. A step's tokens come with the call that starts it, as from RayRanksExecutor."""

    _chosen: Any = None

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        output = super().execute_model(scheduler_output, non_block=non_block)
        self._chosen = output if scheduler_output.total_num_scheduled_tokens else None
        return output

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        chosen, self._chosen = self._chosen, None
        return chosen


class Drafter:
    """Drafts the next tokens of the reference, one in four of them wrong, and now and then fewer than K."""

    def __init__(self) -> None:
        self._texts: dict[int, list[int]] = {}
        self._rng = random.Random(3)

    def __call__(self, message: Message) -> list[Proposals]:
        if isinstance(message, Open):
            text = self._texts[message.request] = list(message.token_ids)
            return [Proposals(message.request, len(text), [], ProposalStatus.READY)]
        if not isinstance(message, Commit) or not message.num_wanted:
            return []
        text = self._texts[message.request]
        text += message.token_ids
        line = list(text)
        for _ in range(self._rng.choice((0, 1, message.num_wanted, message.num_wanted))):
            token = int(reference_logits(line).argmax())
            line.append(token if self._rng.random() < 0.75 else 33 + self._rng.randrange(80))
        return [Proposals(message.request, len(text), line[len(text) :])]


def reference_logits(tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = REFERENCE(torch.tensor([tokens])).logits[0, -1]
    return logits


def engine_of(
    model: str, dtype: str, drafter: Any = "ngram", graphs: bool = False, async_scheduling: bool = True,
    **engine_args: Any,
) -> EngineCore:  # fmt: skip
    if graphs:
        engine_args["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    config = parse_config({
        "target": {
            "model": model, "dtype": dtype, "max_model_len": 128, "max_num_seqs": 6, "max_num_batched_tokens": 48,
            "async_scheduling": async_scheduling,
            "engine_args": {
                "enable_prefix_caching": False, "enforce_eager": not graphs, "num_gpu_blocks_override": 64,
                **engine_args,
            },
        },
        "drafter": None if drafter is None else {"method": drafter},
        "speculation": {"num_speculative_tokens": K, "adaptive": False},
        "serving": {"structured_output": "off"},
    })  # fmt: skip
    ranks = RankPlacement("local", ["Verifier:0"], [0], None, {})
    vllm_config = target_vllm_config(config, ranks, None)
    vllm_config.parallel_config.distributed_executor_backend = OneRank
    vllm_config.additional_config["outrider_replica"] = {"replica": "0", "registry": "registry"}
    return EngineCore(vllm_config, OneRank, log_stats=False)


def answers(core: EngineCore, prompts: list[list[int]], max_tokens: int) -> dict[str, list[int]]:
    texts: dict[str, list[int]] = {f"r{number}": [] for number in range(len(prompts))}
    step = core.step_with_batch_queue if core.batch_queue is not None else core.step
    waiting = [
        Request(f"r{number}", prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True), None)
        for number, prompt in enumerate(prompts)
    ]
    for count in range(400):
        if waiting and count % 2 == 0:  # one joins every other step, so that prompts run beside rounds
            core.add_request(waiting.pop(0))
        outputs, ran = step()
        core.post_step(model_executed=ran)
        for output in (outputs or {}).values():
            for each in output.outputs:
                texts[each.request_id] += each.new_token_ids
        if not waiting and not core.scheduler.has_requests() and not core.batch_queue:
            return texts
    raise AssertionError("the requests do not end")


def main(model: str) -> int:
    """Returns an exit status."""
    wrong = 0
    rng = random.Random(7)
    prompts = [[rng.randrange(32, 127) for _ in range(count)] for count in (3, 60, 17)]
    for name, options in VARIANTS.items():
        if len(sys.argv) > 2 and sys.argv[2] not in name:
            continue
        GPU.launches.clear()
        core = engine_of(model, **options)
        worker = core.model_executor.driver_worker.worker
        if options.get("drafter", "ngram") is not None:
            worker._round.offer_link(FakeLink(Drafter(), lambda seconds: None))
        texts = answers(core, prompts, max_tokens=8)
        tolerance, problems = TOLERANCE[options.get("kv_cache_dtype", options["dtype"])], []
        for prompt, tokens in zip(prompts, texts.values(), strict=True):
            for place, token in enumerate(tokens):
                logits = reference_logits([*prompt, *tokens[:place]])
                if (gap := float(logits.max() - logits[token])) > tolerance:
                    problems.append(f"a prompt of {len(prompt)}, token {place}: {token}, {gap:.3f} below the best")
        rounds = worker._round.status()
        counts = {f"{each} tokens": rounds[each] for each in ("drafted", "accepted")}
        report = {"variant": name, "tokens": sum(map(len, texts.values())), "problems": problems}
        print(json.dumps({**report, "launches": {**GPU.launches, **counts}}), flush=True)
        wrong += len(problems)
        core.shutdown()
        no_engine_left()
        RoundRunner.warm_up_sampler = lambda runner: None  # type: ignore[method-assign]  # the first engine has compiled
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
