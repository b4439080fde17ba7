"""What a rank before the last stage knows: vLLM's runner and batch with ours in front, fed by vLLM's scheduler with
ours in front. Each step has to give the first stage the token ids that it embeds, wherever its positions are."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import RequestStatus
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu_input_batch import InputBatch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from outrider.actors.vllm_adapter import pipeline_stages, target_runner
from outrider.actors.vllm_adapter.engine_args import target_vllm_config
from outrider.actors.vllm_adapter.target_runner import RoundRunner
from outrider.cluster.config import parse_config
from outrider.cluster.placement import RankPlacement
from tests.support.models.tiny_models import VOCAB_SIZE, build_tiny_llama
from tests.unit.vllm_adapter.book import BLOCK_SIZE, MAX_MODEL_LEN, K, ask, make_scheduler, next_token

STEP_TOKENS = 48
MAX_REQUESTS = 6


class FirstStage(RoundRunner, GPUModelRunner):
    """A runner with vLLM's own bookkeeping, and neither model nor device."""

    def __init__(self) -> None:
        self.requests = {}
        self.num_prompt_logprobs = {}
        self.device = torch.device("cpu")
        self.speculative_config = None
        self.use_async_scheduling = self.use_async_spec_decode = self.is_pooling_model = self.uses_mrope = False
        self.num_spec_tokens = K
        self.late_interaction_runner = SimpleNamespace(
            on_requests_finished=lambda ids: None, register_request=lambda *each: None
        )
        self.input_batch = InputBatch(
            MAX_REQUESTS,
            MAX_MODEL_LEN,
            STEP_TOKENS,
            self.device,
            VOCAB_SIZE,
            [BLOCK_SIZE],
            [MAX_MODEL_LEN // BLOCK_SIZE],
            num_spec_tokens=K,
        )
        self.install(None)

    def _process_encoder_cache_scheduler_output(self, scheduled: Any) -> None: ...

    def _on_request_state_removed(self, *each: Any) -> None: ...

    def _may_reorder_batch(self, scheduled: Any) -> None: ...

    def embedded(self, scheduled: SchedulerOutput) -> dict[str, list[int]]:
        """The ids that a step's forward pass reads, by request."""
        batch = self.input_batch
        found = {}
        for request_id, count in scheduled.num_scheduled_tokens.items():
            row = batch.req_id_to_index[request_id]
            first = int(batch.num_computed_tokens_cpu[row])
            found[request_id] = batch.token_ids_cpu[row, first : first + count].tolist()
        return found


@pytest.fixture
def stage(monkeypatch):
    first = SimpleNamespace(is_last_rank=False)
    monkeypatch.setattr(target_runner, "get_pp_group", lambda: first)
    monkeypatch.setattr(gpu_model_runner, "get_pp_group", lambda: first)
    monkeypatch.setattr(GPUModelRunner, "execute_model", lambda self, scheduled, *rest: self._update_states(scheduled))
    return FirstStage()


@pytest.fixture(scope="module")
def vllm_config(tmp_path_factory):
    config = parse_config(
        {
            "target": {
                "model": str(build_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")),
                "dtype": "float32",
                "max_model_len": MAX_MODEL_LEN,
                "max_num_seqs": MAX_REQUESTS,
                "max_num_batched_tokens": STEP_TOKENS,
                "engine_args": {"enable_prefix_caching": False},
                "pipeline_parallel_size": 2,
            },
            "drafter": {"method": "ngram"},
            "speculation": {"num_speculative_tokens": K},
            "serving": {"structured_output": "off"},
        }
    )
    made = target_vllm_config(config, RankPlacement("local", ["TargetRank-0", "Verifier"], [0, 0], None, {}), None)
    assert made.max_concurrent_batches == 1
    return made


class Verifier:
    """The last stage, whose text is the right one."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self.texts: dict[str, list[int]] = {}
        self.accepted = 0

    def run(self, scheduled: SchedulerOutput, computed: dict[str, int]) -> tuple[ModelRunnerOutput, DraftTokenIds]:
        chosen, drafts = [], []
        for request_id, count in scheduled.num_scheduled_tokens.items():
            text, proposed = self.texts[request_id], scheduled.scheduled_spec_decode_tokens.get(request_id, [])
            ids: list[int] = []
            if computed[request_id] + count - len(proposed) == len(text):
                for draft in [*proposed, None]:
                    ids.append(next_token([*text, *ids]))
                    if ids[-1] != draft:
                        break
            self.accepted += max(0, len(ids) - 1)
            text += ids
            chosen.append(ids)
            drafts.append(self._drafts(text) if ids else [])
        ids_of = list(scheduled.num_scheduled_tokens)
        output = ModelRunnerOutput(ids_of, {request_id: i for i, request_id in enumerate(ids_of)}, chosen)
        return output, DraftTokenIds(ids_of, drafts)

    def _drafts(self, text: list[int]) -> list[int]:
        drafts: list[int] = []
        for _ in range(self._chance.choice([0, 1, K, K])):
            drafts.append(next_token([*text, *drafts]) if self._chance.random() < 0.9 else 3)
        return drafts


@pytest.mark.parametrize("blocks", [200, 24], ids=["room for all", "preemptions"])
def test_the_first_stage_embeds_what_the_last_one_chose(vllm_config, stage, blocks):
    chance = random.Random(blocks)
    scheduler, verifier = make_scheduler(vllm_config, blocks), Verifier(chance)
    waiting = [
        ask(number, [chance.randrange(10, 90) for _ in range(chance.randint(1, 30))], chance.choice([5, 20, 60]))
        for number in range(60)
    ]
    steps = resumed = 0
    while waiting or scheduler.has_requests():
        while waiting and (len(scheduler.requests) < 3 or chance.random() < 0.3):
            request = waiting.pop()
            verifier.texts[request.request_id] = list(request.prompt_token_ids)
            scheduler.add_request(request)
        scheduled = scheduler.schedule()
        cached = scheduled.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed |= {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        resumed += len(cached.resumed_req_ids)
        stage.execute_model(scheduled)
        for request_id, ids in stage.embedded(scheduled).items():
            drafts = scheduled.scheduled_spec_decode_tokens.get(request_id, [])
            first, text = computed[request_id], verifier.texts[request_id]
            assert ids == [*text, *drafts][first : first + len(ids)], f"{request_id} at step {steps}"
            # Whatever it is rebuilt from when it has been left out of a step.
            state = stage.requests[request_id]
            known = [*state.prompt_token_ids, *state.output_token_ids]
            assert known == text[: len(known)], f"{request_id} at step {steps}"
        output, drafts = verifier.run(scheduled, computed)
        scheduler.update_from_output(scheduled, output)
        scheduler.update_draft_token_ids(drafts)
        if chance.random() < 0.02 and scheduler.requests:
            scheduler.finish_requests(chance.choice(list(scheduler.requests)), RequestStatus.FINISHED_ABORTED)
        steps += 1
        assert steps < 5000
    assert verifier.accepted > 100
    assert (resumed > 5) == (blocks == 24)


def test_tokens_that_were_never_sent_are_no_silent_gap():
    cached = CachedRequestData.make_empty()
    cached.req_ids, cached.num_computed_tokens, cached.new_token_ids = ["a"], [30], [[1, 2, 3]]
    state = SimpleNamespace(num_tokens=20, output_token_ids=[])
    batch = SimpleNamespace(req_id_to_index={}, token_ids_cpu=np.zeros((1, 40)))
    with pytest.raises(AssertionError, match="a: 10 tokens were never sent"):
        pipeline_stages.apply_committed_tokens(cached, {"a": state}, batch, num_spec_tokens=2)
