"""vLLM's output processor, which also logs the rounds of watched requests."""

from __future__ import annotations

from typing import Any

from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

from actors.round_origins import RoundLog, SpeculationTotals


class RoundOutputProcessor(OutputProcessor):
    """Made of an OutputProcessor by log_rounds."""

    round_log: RoundLog

    def process_outputs(self, engine_core_outputs: list[EngineCoreOutput], *args: Any, **kwargs: Any) -> Any:
        watched = [(output, *key) for output in engine_core_outputs if (key := self._watched(output)) is not None]
        result = super().process_outputs(engine_core_outputs, *args, **kwargs)
        # Only now: what follows a stop string has been cut off. The requests' consumers have not run yet.
        for output, request_id, index in watched:
            totals = _totals(output.spec_decode_metrics)
            self.round_log.note(request_id, index, len(output.new_token_ids), totals)
        return result

    def _watched(self, output: EngineCoreOutput) -> tuple[str, int] | None:
        """The caller's id of the request, and which of its answers the output is for."""
        state = self.request_states.get(output.request_id)
        if state is None:
            return None
        owner = state.parent_req if state.parent_req is not None else state
        return (owner.external_req_id, state.request_index) if self.round_log.watches(owner.external_req_id) else None


def log_rounds(processor: OutputProcessor, log: RoundLog) -> None:
    """From now on processor notes in log what its watched requests get."""
    processor.__class__ = RoundOutputProcessor
    processor.round_log = log


def _totals(metrics: RequestSpecDecodeMetrics | None) -> SpeculationTotals | None:
    if metrics is None:
        return None
    accepted = sum(accepted * rounds for accepted, rounds in enumerate(metrics.histogram))
    return SpeculationTotals(sum(metrics.histogram), metrics.num_draft_tokens, accepted)
