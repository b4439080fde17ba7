"""Extends vLLM's worker for the target's ranks: its model runner runs the round of ``target_runner.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.distributed.parallel_state import get_tp_group

from outrider.actors.drafter.hidden_state_drafter import HiddenStateDrafter
from outrider.actors.drafter.mlp_speculator import MLPSpeculator
from outrider.actors.learning.draft_models import local_copy
from outrider.actors.observability.tracing import RoundTracer, process_tracer
from outrider.actors.round.learning_recorder import LearningRecorder
from outrider.actors.round.length import FixedLengths, LengthController
from outrider.actors.round.request import Deployment
from outrider.actors.round.round import Round
from outrider.actors.verification.search import target_top_k
from outrider.actors.vllm_adapter import checkpoint_transfer, pipeline_stages
from outrider.actors.vllm_adapter.engine_args import worker_class
from outrider.actors.vllm_adapter.executor import sleep_early
from outrider.actors.vllm_adapter.target_runner import RoundRunner
from outrider.actors.vllm_adapter.target_sampler import TargetSampler
from outrider.cluster.config import DraftModelConfig, MLPSpeculatorConfig, OutriderConfig
from outrider.cluster.link.keeper import LinkKeeper, ReplicaIdentity
from outrider.cluster.link.messages import Message, unpack


class RemoteProposer:
    """Fills the place of vLLM's ``custom_class`` proposer on every rank. Drafts come through the Round."""

    def __init__(self, vllm_config: Any) -> None: ...

    def load_model(self, model: Any) -> None: ...

    def propose(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        raise RuntimeError("drafts come from a drafter actor; the in-process proposer must not be asked")


class TargetWorker(worker_class()):  # type: ignore[misc]
    """Runs one rank of the target.

    The Verifier, the first rank of the last pipeline stage, also holds the Round and its link.
    """

    def init_device(self) -> None:
        super().init_device()
        group = get_tp_group()
        if group.world_size > 1:
            # The group's communicator is made with the first broadcast: before memory is profiled, not in the first
            # step. vLLM's own collectives have another.
            group.broadcast(torch.zeros(1, device=self.device))
            sleep_early(group.mq_broadcaster)
        settings = self.vllm_config.additional_config
        config = OutriderConfig.model_validate(settings["outrider"])
        runner = self.model_runner
        runner.__class__ = type("RoundModelRunner", (RoundRunner, type(runner)), {})
        sampler: TargetSampler | None = None
        self._round: Round | None = None
        self._keeper: LinkKeeper | HiddenStateDrafter | None = None
        speculator: HiddenStateDrafter | None = None
        if self.rank == config.target.verifier_rank:
            sampler = TargetSampler(self.vllm_config, runner.sampler, self.device)
            self._round = self._make_round(config, sampler)
            if isinstance(config.drafter, MLPSpeculatorConfig):
                speculator = self._keeper = self._make_speculator(config, config.drafter, self._round)
        overlaps = self.scheduler_config.async_scheduling
        runner.install(self._round, config.target.schedules_ahead and not overlaps, overlaps, sampler, speculator)
        if self.vllm_config.speculative_config is not None and not hasattr(runner, "drafter"):
            runner.drafter = RemoteProposer(self.vllm_config)  # vLLM makes it on the last stage, and looks on every one
        if self._round is not None and config.remote_drafter is not None:
            self._keeper = LinkKeeper(
                config,
                ReplicaIdentity(**settings["outrider_replica"]),
                vocab_size=self.model_config.get_vocab_size(),
                decode=self._decoder(config),
                on_link=self._round.offer_link,
                device=None if self.device.type == "cpu" else str(self.device),
                work=self._round.work,
            )

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        checkpoint_transfer.register()
        super().load_model(*args, **kwargs)
        if isinstance(self._keeper, HiddenStateDrafter):
            num_bytes = self._keeper.load()
            if self.device.type != "cpu":
                # vLLM plans the KV cache around the weights that its runner has counted.
                self.model_runner.model_memory_usage += num_bytes
        if self.vllm_config.lora_config is not None and self.device.type == "cpu":
            spare_batches(self.model_runner.lora_manager)

    def _make_round(self, config: OutriderConfig, sampler: TargetSampler) -> Round:
        k = config.num_speculative_tokens if config.drafts_in_rounds else 0
        tracer = process_tracer("verifier") if config.drafts_in_rounds else None
        learn = config.drafter.learn if isinstance(config.drafter, DraftModelConfig) else None
        deployment = Deployment(
            verification=config.speculation.default_verification,
            num_paths=config.speculation.num_paths,
            num_speculative_tokens=k,
            draft_top_n=config.speculation.draft_top_n,
            vocab_size=self.model_config.get_vocab_size(),
            max_model_len=self.model_config.max_model_len,
            remembers_answers=config.remote_drafter is not None and config.remote_drafter.remembers_answers,
            draft_adapters=_draft_adapters(config),
        )
        return Round(
            sampler,
            deployment,
            config.link,
            LengthController(k) if k and config.speculation.adaptive else FixedLengths(k),
            names_requests=config.serving.log_format == "json",
            tracer=None if tracer is None else RoundTracer(tracer),
            recorder=None if learn is None else LearningRecorder(target_top_k),
        )

    def _decoder(self, config: OutriderConfig) -> Callable[[bytes], list[Message]]:
        """Returns what turns a payload into messages that fit the target."""
        vocab_size, k = self.model_config.get_vocab_size(), config.num_speculative_tokens
        return lambda payload: unpack(payload, vocab_size, k)

    def _make_speculator(
        self, config: OutriderConfig, drafter: MLPSpeculatorConfig, round_: Round
    ) -> HiddenStateDrafter:
        """Returns the drafter beside the verifier. Its checkpoint is read when the target's has been."""

        def load() -> MLPSpeculator:
            directory = local_copy(drafter.model, drafter.revision)
            speculator = MLPSpeculator.load(directory, self.model_config.dtype, self.device)
            sizes = self.model_config.get_vocab_size(), self.model_config.get_hidden_size()
            speculator.shape.check(*sizes, config.num_speculative_tokens)
            return speculator

        return HiddenStateDrafter(load, self._decoder(config), round_.offer_link)

    def execute_model(self, scheduler_output: Any) -> Any:
        """Samples in the same call unless a grammar's masks are to come: vLLM then spares a message each way."""
        output = super().execute_model(scheduler_output)
        if output is None and not scheduler_output.has_structured_output_requests:
            output = self.sample_tokens(None)
        return output

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        super().initialize_from_config(kv_cache_config)
        speculation = OutriderConfig.model_validate(self.vllm_config.additional_config["outrider"]).speculation
        if speculation.num_paths > 1:
            self.model_runner.enable_path_rows(speculation)

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()
        pipeline_stages.make_room_between(self.model_runner)
        if isinstance(self._keeper, HiddenStateDrafter) and self._round is not None:
            deployment = self._round.deployment
            self._keeper.warm_up(deployment.num_speculative_tokens, deployment.draft_top_n)
        return times

    def open_link(self) -> bool:
        """Starts keeping the link. The target replica calls this once, when the engine is ready to serve."""
        if self._keeper is None or self._round is None:
            return False
        self._round.reset_statistics()
        self._keeper.start()
        return True

    def round_status(self) -> dict[str, Any] | None:
        """Returns the status of rounds and link in plain values; None without a drafter and on other ranks."""
        if self._keeper is None or self._round is None:
            return None
        return {"rounds": self._round.status(), "link": self._keeper.status()}

    def round_metrics(self) -> dict[str, Any] | None:
        """Returns the metrics of rounds and link in plain values; None without a drafter and on other ranks."""
        if self._keeper is None or self._round is None:
            return None
        return {"rounds": self._round.metrics(), "link": self._keeper.status()}

    def shutdown(self) -> None:
        if self._keeper is not None:
            self._keeper.stop()
        super().shutdown()


def _draft_adapters(config: OutriderConfig) -> dict[str, int]:
    """Returns the drafter's own adapters and their numbers, see DraftWorker.load_adapters."""
    own = config.drafter.lora_modules if isinstance(config.drafter, DraftModelConfig) else ()
    return {module.name: number for number, module in enumerate(own, start=1)}


def spare_batches(lora_manager: Any) -> None:
    """Skips the adapters' kernels for batches without an adapter, on CPU.

    vLLM's CPU wrapper would allocate for every layer and multiply the output head's rows by an empty slot's zeros: a
    fifth of a small model's step. Its GPU kernels return at once. lora_manager: of vLLM's model runner, its model
    loaded.
    """
    for wrapper in lora_manager._adapter_manager.punica_wrapper_mapping.values():
        for name in ("add_lora_linear", "add_lora_logits"):  # what they change, they change in place
            setattr(wrapper, name, _spared(wrapper, getattr(wrapper, name)))


def _spared(wrapper: Any, kernel: Callable[..., None]) -> Callable[..., None]:
    def run(*args: Any, **kwargs: Any) -> None:
        if not wrapper.no_lora:  # no token of the batch has an adapter
            kernel(*args, **kwargs)

    return run
