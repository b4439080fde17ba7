"""Runs the further paths of a draft tree as rows of their own in a step of the target.

A path row is a request of vLLM's runner that lives for one step. Its tokens are the last committed one and the path's
drafts; it has the request's sampling parameters and adapter. It shares the request's full KV blocks. The block that
the last committed token goes into is copied, unless it is empty, and the ones after it are new, all from a reserve that
the scheduler does not know. When a path has the most accepted drafts, its tokens become the request's, and its blocks
are copied back. So neither the attention kernels nor the engine core know of trees.

Every rank does the same in the same order, by the paths and the choices that the Verifier broadcasts.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.utils import copy_kv_cache_blocks_inplace

from outrider.actors.round.round import Step
from outrider.cluster.config import OutriderConfig, SpeculationConfig

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler as _Scheduler
else:
    _Scheduler = object

MAX_PATH_ROWS = 32
"""Most rows that the runner's buffers have for paths alone. A step also uses those that no request needs."""


def num_path_rows(config: OutriderConfig) -> int:
    """Returns the rows that the runner's buffers have beside ``max_num_seqs``."""
    return min(MAX_PATH_ROWS, (config.speculation.num_paths - 1) * config.target.max_num_seqs)


def reserve_blocks(kv_cache: KVCacheConfig, speculation: SpeculationConfig) -> int:
    """Returns how many of the KV cache's last blocks are path rows': 1% of them, or the blocks of two paths.

    Raises:
        ValueError: the model's KV cache has no blocks that a path row could share.
    """
    if speculation.num_paths == 1:
        return 0
    groups = kv_cache.kv_cache_groups
    if len(groups) != 1 or not isinstance(groups[0].kv_cache_spec, FullAttentionSpec):
        kinds = sorted({type(group.kv_cache_spec).__name__ for group in groups})
        raise ValueError(
            f"speculation.num_paths: needs a KV cache of full attention alone, the target's has {', '.join(kinds)}; "
            "leave it out"
        )
    of_path = _blocks_of_path(groups[0].kv_cache_spec.block_size, speculation.num_speculative_tokens)
    return max(kv_cache.num_blocks // 100, 2 * of_path)


def _blocks_of_path(block_size: int, num_drafts: int) -> int:
    return 1 + -(-num_drafts // block_size)


class PathReserve(_Scheduler):
    """Leaves the last KV blocks to path rows, and refuses where a longest request no longer fits. A mixin of a vLLM
    Scheduler."""

    def __init__(self, *args: Any, vllm_config: Any, kv_cache_config: KVCacheConfig, **kwargs: Any) -> None:
        config = OutriderConfig.model_validate(vllm_config.additional_config["outrider"])
        if reserve := reserve_blocks(kv_cache_config, config.speculation):
            kv_cache_config = replace(kv_cache_config, num_blocks=kv_cache_config.num_blocks - reserve)
            block_size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
            longest = vllm_config.model_config.max_model_len
            if (kv_cache_config.num_blocks - 1) * block_size < longest:  # block 0 is no request's
                raise ValueError(
                    f"speculation.num_paths: beside {reserve} KV blocks for path rows a request of max_model_len "
                    f"{longest} does not fit; lower target.max_model_len, or leave num_paths out"
                )
        super().__init__(*args, vllm_config=vllm_config, kv_cache_config=kv_cache_config, **kwargs)


@dataclass(slots=True)
class _Row:
    """Describes a path row. first: index of its first private block in the request's block table."""

    request_id: str
    first: int
    private: list[int]


class PathRows:
    """Adds path rows to a step of the runner, and takes the best one's tokens and KV over."""

    def __init__(self, runner: Any, speculation: SpeculationConfig) -> None:
        """runner: vLLM's V1 model runner, with its KV cache."""
        kv_cache = runner.kv_cache_config
        reserve = reserve_blocks(kv_cache, speculation)
        self._runner = runner
        self._block_size: int = kv_cache.kv_cache_groups[0].kv_cache_spec.block_size
        self._reserve = list(range(kv_cache.num_blocks - reserve, kv_cache.num_blocks))
        self._rows: dict[str, _Row] = {}
        """The step's, by the id that the runner knows them by."""

        self._params: dict[str, Any] = {}
        """Sampling parameters of the requests that have had path rows."""

    def remove(self, scheduled: Any) -> None:
        """Ends the path rows of the step before."""
        for request_id in scheduled.finished_req_ids:
            self._params.pop(request_id, None)
        if self._rows:
            scheduled.finished_req_ids = {*scheduled.finished_req_ids, *self._rows}
            self._rows = {}

    def add(self, scheduled: Any, step: Step) -> None:
        """Adds path rows to a step that has been reconciled, in the order of its paths, as far as there is room."""
        runner, batch = self._runner, self._runner.input_batch
        free, copies = iter(self._reserve), []
        num_free = len(self._reserve)
        num_rows = len(scheduled.num_scheduled_tokens)
        for number, (request_id, path) in enumerate(step.paths):
            index = batch.req_id_to_index.get(request_id)
            if index is None:  # it was not in the step before
                continue
            state, ids = runner.requests[request_id], list(path.token_ids)
            length = state.num_tokens
            first, last = (length - 1) // self._block_size, (length - 1 + len(ids)) // self._block_size
            total = scheduled.total_num_scheduled_tokens + 1 + len(ids)
            if num_free <= last - first or num_rows == runner.max_num_reqs or total > runner.max_num_tokens:
                continue
            num_free, num_rows = num_free - (1 + last - first), num_rows + 1
            private = [next(free) for _ in range(first, last + 1)]
            own = state.block_ids[0]
            if (length - 1) % self._block_size:
                copies.append((own[first], private[0]))
            row_id = f"{request_id}/path-{number}"
            self._rows[row_id] = _Row(request_id, first, private)
            step.add_path(row_id, request_id, path)
            # An array is copied at once, a list number by number. Some models' M-RoPE positions need a list.
            text = batch.token_ids_cpu[index, :length]
            scheduled.scheduled_new_reqs.append(
                NewRequestData(
                    req_id=row_id,
                    prompt_token_ids=text.tolist() if state.mm_features else text.copy(),
                    mm_features=state.mm_features,  # M-RoPE positions follow from them; none is encoded again
                    sampling_params=self._params_of(request_id, state),
                    pooling_params=None,
                    block_ids=([*own[:first], *private],),
                    num_computed_tokens=length - 1,
                    lora_request=state.lora_request,
                )
            )
            scheduled.num_scheduled_tokens[row_id] = 1 + len(ids)
            scheduled.scheduled_spec_decode_tokens[row_id] = ids
            scheduled.total_num_scheduled_tokens = total
        self._copy(copies)

    def _params_of(self, request_id: str, state: Any) -> Any:
        """Returns the request's sampling parameters, without the logprobs that vLLM would keep for a row."""
        params = self._params.get(request_id)
        if params is None:
            params = self._params[request_id] = copy.copy(state.sampling_params)
            params.logprobs = params.prompt_logprobs = None
        return params

    def take_best(self, step: Step, row_ids: Sequence[str], chosen: Tensor, logprobs: LogprobsTensors | None) -> None:
        """Gives each request the tokens of its best row, in place, and its KV. Path rows end without tokens.

        Args:
            row_ids: in their order.
            chosen: int32 [rows, W] on the host, the chosen tokens padded with -1.
            logprobs: those of the same tokens, [rows * W, n], on the host.
        """
        if not self._rows:
            return
        index = {row_id: row for row, row_id in enumerate(row_ids)}
        counts, width = (chosen >= 0).sum(dim=1).tolist(), chosen.shape[1]
        best: dict[str, str] = {}
        for row_id, row in self._rows.items():
            leader = best.get(row.request_id, row.request_id)
            best[row.request_id] = row_id if counts[index[row_id]] > counts[index[leader]] else leader
        gained: dict[str, int] = {}
        best_rows: dict[str, str] = {}
        copies: list[tuple[int, int]] = []
        for request_id, row_id in best.items():
            main, winner = index[request_id], index[row_id]
            if main == winner or not counts[main]:  # without a token of its own, its logits are bad
                continue
            gained[request_id], best_rows[request_id] = counts[winner] - counts[main], row_id
            chosen[main] = chosen[winner]
            if logprobs is not None:
                for part in logprobs[:3]:
                    part[main * width : (main + 1) * width] = part[winner * width : (winner + 1) * width]
            state, row = self._runner.requests[request_id], self._rows[row_id]
            last = (state.num_tokens - 1 + counts[winner] - 1) // self._block_size
            own = state.block_ids[0][row.first : last + 1]
            copies += zip(row.private, own, strict=False)
        for row_id in self._rows:
            chosen[index[row_id]] = -1
        self._copy(copies)
        step.gained, step.best_rows = gained, best_rows

    def _copy(self, copies: Sequence[tuple[int, int]]) -> None:
        if copies:
            copy_kv_cache_blocks_inplace(self._runner.kv_caches, self._runner.kv_cache_config.num_blocks, copies)
