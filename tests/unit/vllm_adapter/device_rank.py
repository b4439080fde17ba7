"""A rank of the target without its model: vLLM's runner with our round in front, on the device that counts.

`DeviceRank` keeps requests, applies grammar masks and books tokens as vLLM's first runner does, by its own methods;
logits are a function of all tokens before them, so that a wrong position, row or draft anywhere changes the answer.
Kernels that need a GPU stand for themselves: each is one launch of what the CPU has in its place.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import xgrammar
from torch import Tensor
from vllm import _custom_ops
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.pool.late_interaction_runner import LateInteractionRunner
from vllm.v1.sample import sampler as sampler_module
from vllm.v1.sample.logits_processor import builtin
from vllm.v1.sample.ops import penalties
from vllm.v1.sample.sampler import Sampler
from vllm.v1.structured_output import utils as masks
from vllm.v1.worker import gpu_input_batch, gpu_model_runner
from vllm.v1.worker.gpu_model_runner import ExecuteModelState, GPUModelRunner

from outrider.actors.drafter.draw import draw
from outrider.actors.drafter.engine import Draw, Drawn
from outrider.actors.round.length import FixedLengths
from outrider.actors.round.request import Deployment
from outrider.actors.round.round import Round
from outrider.actors.verification import torch_kernel
from outrider.actors.verification.transfer import to_device
from outrider.actors.vllm_adapter import target_runner, target_sampler
from outrider.actors.vllm_adapter.target_runner import RoundRunner
from outrider.actors.vllm_adapter.target_sampler import TargetSampler
from outrider.cluster.config import LinkConfig
from outrider.cluster.link.messages import (
    Commit,
    DraftPath,
    DraftSampling,
    Message,
    Open,
    Proposals,
    ProposalStatus,
    SparseQ,
)
from tests.support.devices.counting_device import DEVICE, CountingDevice
from tests.unit.round.scripted_link import FakeLink
from tests.unit.vllm_adapter.book import MAX_MODEL_LEN, K

V = 100
"""Ids of the model's."""

CPU = torch.device("cpu")
_CONTEXTS = 997


def async_tensor_h2d(data: Any, device: Any = None, dtype: torch.dtype | None = None, out: Any = None) -> Tensor:
    """vLLM's of a GPU: its CPU worker puts another in its place."""
    pinned = torch.as_tensor(data, dtype=dtype).pin_memory()
    return pinned.to(device, non_blocking=True) if out is None else out.copy_(pinned, non_blocking=True)


@contextlib.contextmanager
def counting() -> Iterator[CountingDevice]:
    """Provides the device that counts, with the CPU's functions in place of GPU kernels."""
    device = CountingDevice()
    verify, penalise = torch_kernel.verify, _custom_ops.apply_repetition_penalties_torch
    mask = xgrammar.apply_token_bitmask_inplace

    def apply_mask(logits: Tensor, bitmask: Tensor, *, indices: Tensor | None = None) -> None:
        device.kernel(
            lambda logits, bitmask, rows: mask(logits, bitmask, indices=None if rows is None else rows.tolist()),
            logits, bitmask, indices,
        )  # fmt: skip

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target_sampler, "kernel_for", lambda there: lambda batch: device.kernel(verify, batch))
        patch.setattr(_custom_ops, "apply_repetition_penalties_cuda", lambda *args: device.kernel(penalise, *args))
        patch.setattr(xgrammar, "apply_token_bitmask_inplace", apply_mask)
        # vLLM's is compiled, which the device that counts is not for.
        patch.setattr(sampler_module, "batched_count_greater_than", lambda x, values: (x >= values).sum(-1))
        for module in (builtin, masks):
            patch.setattr(module, "async_tensor_h2d", async_tensor_h2d)
        for module in (penalties, masks, gpu_input_batch):
            patch.setattr(module, "PIN_MEMORY", True)
        with device:
            yield device


def context(tokens: Sequence[int]) -> int:
    """Return what the model makes of a text."""
    mixed = 0
    for token in tokens:
        mixed = (mixed * 31 + token * 17 + 5) % 1_000_003
    return mixed % _CONTEXTS


def model(seed: int, spread: float = 3.0, likes: Tensor | None = None, noise: float = 1.0) -> Tensor:
    """Logits float32 [contexts, V]. likes: another model, from which this one differs by noise."""
    table = torch.randn(_CONTEXTS, V, generator=torch.Generator().manual_seed(seed)) * spread
    return table if likes is None else likes + noise * table


class Group:
    """Tensor-parallel ranks of one process, which run one after the other: what rank 0 sends is copied to the others'
    tensors. world_size: how many there are."""

    def __init__(self, world_size: int) -> None:
        self.world_size, self.rank = world_size, 0
        self.sent: list[Tensor] = []
        self._object: Any = None

    def broadcast(self, tensor: Tensor, src: int) -> Tensor:
        assert src == 0
        if self.rank == 0:
            self.sent.append(tensor.clone())
            return tensor
        assert (tensor.shape, tensor.dtype) == (self.sent[-1].shape, self.sent[-1].dtype)
        return tensor.copy_(self.sent[-1])

    def broadcast_object(self, sent: Any) -> Any:
        if self.rank == 0:
            self._object = copy.deepcopy(sent)
        return copy.deepcopy(self._object)


@contextlib.contextmanager
def grouped(group: Group) -> Iterator[Group]:
    """Makes the runners ranks of a group."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target_runner, "get_tp_group", lambda: group)
        for module in (target_runner, gpu_model_runner):
            patch.setattr(module, "get_pp_group", lambda: SimpleNamespace(is_last_rank=True, world_size=1))
        yield group


class Forward(GPUModelRunner):
    """Runs vLLM's runner with a table in place of the forward pass."""

    def __init__(self, table: Tensor, device: torch.device, max_num_reqs: int, max_model_len: int, k: int) -> None:
        """table: logits [contexts, V], of `model`. k: most drafts of a request."""
        self.device, self.max_model_len, self.num_spec_tokens = device, max_model_len, k
        self.table = table.to(device)
        self.requests, self.num_prompt_logprobs, self.encoder_cache = {}, {}, {}
        self.late_interaction_runner = LateInteractionRunner()
        self.is_pooling_model = self.uses_mrope = self.supports_mm_inputs = False
        self.use_async_scheduling = self.use_async_spec_decode = False
        names = ("use_ngram_gpu", "use_eagle", "uses_draft_model", "uses_extract_hidden_states")
        self.speculative_config = SimpleNamespace(**dict.fromkeys(names, lambda: False))  # method custom_class
        self.model_config = SimpleNamespace(is_hybrid=False)
        self.parallel_config = SimpleNamespace(enable_eplb=False, data_parallel_size=1)
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=())
        self.lora_config = self.kv_connector_output = self.execute_model_state = None
        self.discard_request_mask = SimpleNamespace(np=np.zeros(max_num_reqs, bool))
        self.input_batch = gpu_input_batch.InputBatch(
            max_num_reqs=max_num_reqs,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_reqs * max_model_len,
            device=device,
            vocab_size=V,
            block_sizes=[4],
            max_num_blocks_per_req=[max_model_len],
            num_spec_tokens=k,
        )

    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any) -> Any:
        device, self.device = self.device, CPU  # of seeded requests' generators, which there is no GPU for
        self._update_states(scheduler_output)
        self.device = device
        if not scheduler_output.total_num_scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        logits = self._logits(scheduler_output)
        drafts = scheduler_output.scheduled_spec_decode_tokens or None
        self.execute_model_state = ExecuteModelState(
            scheduler_output, logits, drafts, None, logits, logits, None, None, None, None
        )
        return None

    def _logits(self, scheduled: SchedulerOutput) -> Tensor:
        contexts = np.array([each for rows in self._rows(scheduled) for each in rows])
        (rows,) = to_device([contexts], self.device)
        return self.table[rows]

    def _rows(self, scheduled: SchedulerOutput) -> Iterator[list[int]]:
        """Yields the contexts of each request's rows of logits."""
        batch, drafts = self.input_batch, scheduled.scheduled_spec_decode_tokens
        assert set(batch.req_ids) == set(scheduled.num_scheduled_tokens)
        for index, request_id in enumerate(batch.req_ids):
            computed = int(batch.num_computed_tokens_cpu[index])
            end, k = computed + scheduled.num_scheduled_tokens[request_id], len(drafts.get(request_id, ()))
            known = self.requests[request_id].num_tokens
            self.discard_request_mask.np[index] = end - k < known
            assert end - k <= known, "a step ends with the last token that is known, and drafts"
            assert end - k == known or not k
            tokens = batch.token_ids_cpu[index, :end].tolist()
            yield [context(tokens[:length]) for length in range(end - k, end + 1)]


class DeviceRank(RoundRunner, Forward):
    pass


def next_context(last: Any, position: Any) -> Any:
    """Returns the context of the model for overlapping steps: a text's last token and its position."""
    return (last * 31 + position * 17 + 5) % _CONTEXTS


class OverlappingRank(DeviceRank):
    """Runs overlapping steps. As vLLM's runner it takes unread tokens from the step before, on the device."""

    def __init__(self, *of_forward: Any) -> None:
        super().__init__(*of_forward)
        self.use_async_scheduling, self.async_output_copy_stream, self.speculative_config = True, None, None
        self.broadcast_pp_output = self.check_ep_fault = False

    def _logits(self, scheduled: SchedulerOutput) -> Tensor:
        batch = self.input_batch
        assert set(batch.req_ids) == set(scheduled.num_scheduled_tokens)
        counts = np.array([scheduled.num_scheduled_tokens[request_id] for request_id in batch.req_ids])
        ends = batch.num_computed_tokens_cpu[: len(counts)] + counts
        self.discard_request_mask.np[: len(counts)] = ends < [self.requests[each].num_tokens for each in batch.req_ids]
        before = batch.prev_req_id_to_index or {}
        tokens = batch.token_ids_cpu[np.arange(len(counts)), ends - 1].astype(np.int64)
        unread = np.flatnonzero(tokens < 0)
        places = np.array([before[batch.req_ids[row]] for row in unread], np.int64)
        last, positions, rows, places_there = to_device([tokens, ends.astype(np.int64), unread, places], self.device)
        if len(unread):
            last[rows] = batch.prev_sampled_token_ids[places_there, 0].to(torch.int64)
        return self.table[next_context(last, positions)]


class Ranks:
    """Runs a step on tensor-parallel ranks, one after the other, as an engine's core does on all of them."""

    def __init__(self, group: Group, ranks: Sequence[DeviceRank], device: CountingDevice | None = None) -> None:
        """device: None: the host."""
        self.group, self.ranks, self._device = group, ranks, device
        self.steps = 0

    def run(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """A step without masks."""
        return self.execute(scheduled) or self.sample(None)

    def execute(self, scheduled: SchedulerOutput) -> ModelRunnerOutput | None:
        given = [scheduled, *(copy.deepcopy(scheduled) for _ in self.ranks[1:])]
        outputs = []
        for number, rank in enumerate(self.ranks):
            self.group.rank = number
            # vLLM sends the mask of allowed tokens from ordinary memory where a batch has changed.
            with self._synchronises(0, f"rank {number} launches", uploads=1):
                outputs.append(rank.execute_model(given[number]))
        assert len({output is None for output in outputs}) == 1
        return outputs[0]

    def sample(self, grammar_output: Any) -> ModelRunnerOutput:
        """Checks that each rank reads its device once in a step and waits for nothing else."""
        outputs = []
        for number, rank in enumerate(self.ranks):
            self.group.rank = number
            with self._synchronises(1, f"rank {number} samples"):
                outputs.append(rank.sample_tokens(copy.deepcopy(grammar_output)))
        assert all(output.sampled_token_ids == outputs[0].sampled_token_ids for output in outputs)
        self.steps += 1
        return outputs[0]

    def _synchronises(self, times: int, what: str, uploads: int = 0) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._device is None else self._device.synchronises(times, what, uploads)


def make_ranks(
    count: int,
    table: Tensor,
    device: CountingDevice | None,
    link: Any = None,
    max_num_reqs: int = 8,
    overlaps: bool = False,
    num_paths: int = 1,
    rank: type[DeviceRank] | None = None,
) -> Ranks:
    """Makes the ranks of the group that is `grouped`.

    device: None is the host. link: rank 0's link to a drafter; None: there is no drafter. overlaps: whether steps
    overlap; otherwise each is scheduled one step ahead.
    """
    where = CPU if device is None else DEVICE
    kind, k = (OverlappingRank, 0) if overlaps else (rank or DeviceRank, K)
    ranks = [kind(table, where, max_num_reqs, MAX_MODEL_LEN, k) for _ in range(count)]
    sampler = TargetSampler(VllmConfig(), Sampler(), where)
    clock = (lambda: 0.0) if link is None else link.clock
    deployment = Deployment("rejection", k, 8, V, MAX_MODEL_LEN, num_paths)
    round_ = Round(sampler, deployment, LinkConfig(), FixedLengths(k), clock=clock)
    if link is not None:
        link.join(round_)
    for number, each in enumerate(ranks):
        each.install(None if number else round_, runs_ahead=not overlaps, overlaps=overlaps)
    return Ranks(target_runner.get_tp_group(), ranks, device)


class Drafter:
    """Answers a verifier by a model of its own, with tokens drawn as every drafter draws them."""

    def __init__(self, table: Tensor) -> None:
        """table: logits [contexts, V], of `model`."""
        self._table = table
        self._texts: dict[int, list[int]] = {}
        self._samplings: dict[int, DraftSampling] = {}

    def __call__(self, message: Message) -> list[Proposals]:
        if isinstance(message, Open):
            text = self._texts[message.request] = list(message.token_ids)
            self._samplings[message.request] = message.sampling
            return [Proposals(message.request, len(text), [], ProposalStatus.READY)]
        if not isinstance(message, Commit):
            self._texts.pop(message.request, None)
            return []
        text = self._texts[message.request]
        assert message.base_committed_len == len(text)
        text += message.token_ids
        return [self._draft(message.request, text, message.num_wanted, message.num_paths)] if message.num_wanted else []

    def _draft(self, request: int, text: list[int], count: int, num_paths: int) -> Proposals:
        drawn: list[Drawn] = []
        line = list(text)
        for _ in range(count):
            logits = self._table[context(line)].unsqueeze(0)
            drawn += draw(logits, [Draw(self._samplings[request], len(line), len(text))])
            line.append(drawn[-1].token)
        q = None
        if drawn[0].q_ids is not None:
            q = SparseQ(np.stack([each.q_ids for each in drawn]), np.stack([each.q_probs for each in drawn]))
        ids = [each.token for each in drawn]
        return Proposals(request, len(text), ids, q=q, paths=self._paths(request, text, ids)[: num_paths - 1])

    def _paths(self, request: int, text: list[int], ids: list[int]) -> list[DraftPath]:
        """Return paths that leave the main line at each position for the second choice there, and go on from it."""
        paths = []
        for first in range(len(ids)):
            path = ids[:first]
            while len(path) < len(ids):
                logits = self._table[context([*text, *path])].clone().unsqueeze(0)
                if len(path) == first:
                    logits[0, ids[first]] = -torch.inf
                path.append(draw(logits, [Draw(self._samplings[request], len(text) + len(path), len(text))])[0].token)
            paths.append(DraftPath(path, 0.5))
        return paths


class Linked:
    """Links a round to a drafter without faults."""

    def __init__(self, table: Tensor) -> None:
        self.now, self.table = 0.0, table

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def join(self, round_: Round) -> None:
        round_.offer_link(FakeLink(Drafter(self.table), self.sleep))
