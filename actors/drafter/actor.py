"""Runs the drafter actor: one process that drafts for every target linked to it.

The model's work happens on one loop thread (``actors/drafter/loop.py``). Ray calls are control only and run in a
concurrency group of their own, so they are answered while the loop computes.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import secrets
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from outrider.actors.drafter.hang_watch import end_when_hung
from outrider.actors.drafter.load import load_proposer, warm_up
from outrider.actors.drafter.loop import DraftLoop, LinkSink
from outrider.actors.learning.training_samples import SampleCollector
from outrider.actors.observability.logs import configure as configure_logging
from outrider.cluster.config import DraftModelConfig, RemoteConfig, SpeculationConfig
from outrider.cluster.installed import import_early
from outrider.cluster.link import Link, LinkInvitation, join_link
from outrider.cluster.link.messages import Message, unpack
from outrider.cluster.placement import (
    NAMESPACE,
    OWN_GPUS,
    V1_RUNNER,
    RankPlacement,
    ReplicaPlacement,
    bind_to,
    float32_environment,
    rank_environment,
)
from outrider.cluster.vocabulary import Marks, check_marks, marks_of

if TYPE_CHECKING:
    from outrider.actors.drafter.learning import LearningMember

logger = logging.getLogger(__name__)

_RESTART_PAUSE_S = 5.0

ASK_AGAIN_S = 10.0
"""Time between two questions whether a drafter has loaded."""

ENGINE_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core runs in the drafter's own process
    **V1_RUNNER,  # steps are hand-built for it; with Triton vLLM would take V2
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # its profiling run would compile it with nvcc, and nothing else here uses it
}


class Drafter:
    """Loads its proposer at construction. Ray restarts it when it dies; verifiers then link anew."""

    def __init__(
        self,
        config: RemoteConfig,
        speculation: SpeculationConfig,
        cores: list[int] | None,
        ranks: RankPlacement | None,
        placement_group: Any,
        app_name: str = "outrider",
        num_common_tokens: int | None = None,
    ) -> None:
        if cores is not None:
            bind_to(cores)
        configure_logging()
        # A link needs it, and its import takes seconds in which everybody would wait for the drafter; now nobody does.
        import_early("torch.distributed")
        try:
            self._proposer = load_proposer(config, speculation, ranks, placement_group, num_common_tokens)
            self._loop = DraftLoop(self._proposer, training_samples=_sample_collector(config))
            # No link is accepted, and nobody watches for hangs, before this returns: what is compiled may take minutes.
            # A loop that fails later ends the process: links break at once, targets decode plainly, and Ray starts a
            # fresh drafter.
            self._loop.start(lambda: warm_up(self._proposer, speculation.draft_top_n), lambda: os._exit(1))
        except Exception:
            if not ray.get_runtime_context().was_current_actor_reconstructed:
                raise  # the replica reports it as the start-up error it is
            # Ray gives an actor up whose constructor raises, but starts one again that crashes. Whatever kept this
            # one from loading (memory of its former life, most often) may be gone the next time.
            logger.exception("this drafter could not be restarted; trying again in %g s", _RESTART_PAUSE_S)
            time.sleep(_RESTART_PAUSE_S)
            os._exit(1)
        self._app_name = app_name
        self._vocabulary: Marks = ()
        """Digests of the tokenizer's blocks; () where its ids have been compared with the target's already."""

        if isinstance(config, DraftModelConfig) and num_common_tokens is None:
            self._vocabulary = marks_of(config.model)
        self._learning = self._start_learning(config)
        self._link_ids = itertools.count(1)  # epochs are the verifiers' matter: two of them may have the same one
        threading.Thread(target=end_when_hung, args=(self._loop.at_work,), name="draft-watch", daemon=True).start()

    @ray.method(concurrency_group="control")
    def ready(self) -> str:
        """Returns this node's id, once the model is loaded."""
        node: str = ray.get_runtime_context().get_node_id()
        return node

    @ray.method(concurrency_group="control")
    def accept_link(self, invitation: LinkInvitation, timeout_s: float) -> None:
        """Joins a verifier's link.

        Vocabularies of one tokenizer may be padded to different sizes: no more is drawn than both have.

        Raises:
            LinkError: the verifier is gone.
            ValueError: the target has another tokenizer, or fewer tokens than the output head is cut to.
        """
        check_marks(invitation.vocabulary, self._vocabulary)
        try:
            self._loop.limit_vocabulary(invitation.vocab_size)
        except ValueError as error:
            raise ValueError(
                f"drafter.draft_vocab_size: the target has {invitation.vocab_size} tokens: {error}; set fewer, or 0"
            ) from None
        wire = join_link(invitation.address, timeout_s)
        link_id = next(self._link_ids)
        link = Link(
            wire,
            epoch=invitation.epoch,
            link_deadline_s=invitation.link_deadline_ms / 1e3,
            decode=lambda payload: unpack(payload, invitation.vocab_size, invitation.num_speculative_tokens),
            name=f"{invitation.verifier_id}#{invitation.epoch}",
            on_broken=lambda reason: self._drop(link_id, reason),
            on_receive=lambda received: self._deliver(link_id, received.messages),
        )
        self._loop.attach(link_id, LinkSink(link))
        link.start()
        logger.info("linked to %s, epoch %d", invitation.verifier_id, invitation.epoch)

    @ray.method(concurrency_group="control")
    def status(self) -> dict[str, Any]:
        metrics = self._loop.metrics()
        if self._learning is not None:
            metrics["learning"] = self._learning.status()
        return {**metrics, "pid": os.getpid()}

    @ray.method(concurrency_group="control")
    def go_back(self, version: int) -> tuple[int | None, str]:
        """Calls DrafterTrainer.go_back. Raises RayError and GetTimeoutError where the trainer does not answer."""
        return (None, "this drafter does not learn") if self._learning is None else self._learning.go_back(version)

    def _start_learning(self, config: RemoteConfig) -> LearningMember | None:
        if not isinstance(config, DraftModelConfig) or config.learn is None:
            return None
        from outrider.actors.drafter.draft_model import DraftModelProposer
        from outrider.actors.drafter.learning import LearningMember, RayTrainerClient
        from outrider.actors.drafter.lookup_drafters import LookupDrafters

        model = self._proposer.model if isinstance(self._proposer, LookupDrafters) else self._proposer
        assert isinstance(model, DraftModelProposer)
        name = ray.get_runtime_context().get_actor_name() or secrets.token_hex(8)
        learning = LearningMember(RayTrainerClient(self._app_name, config), self._loop, model, name)
        learning.start()
        return learning

    def _drop(self, link_id: int, reason: str) -> None:
        logger.warning("link %d is gone: %s", link_id, reason)
        self._loop.detach(link_id)

    def _deliver(self, link_id: int, messages: Sequence[Message]) -> None:
        try:
            self._loop.deliver(link_id, messages)
        except BaseException:
            logger.exception("the draft loop failed; this drafter ends and will be restarted")
            os._exit(1)


def _sample_collector(config: RemoteConfig) -> SampleCollector | None:
    learn = config.learn if isinstance(config, DraftModelConfig) else None
    return None if learn is None else SampleCollector()


async def find_actor(name: str) -> Any:
    """Returns an actor's handle, in a thread since that asks Ray's GCS. Raises ValueError when there is none."""
    return await asyncio.to_thread(ray.get_actor, name, namespace=NAMESPACE)


async def has_loaded(drafter: Any) -> None:
    """Returns when the drafter has loaded. Raises RayError where it does not load.

    Ray restarts a drafter whose process dies meanwhile, for want of memory, say, without end, and the calls before wait
    as long. Only a new call fails, so it asks again.
    """
    answer = asyncio.ensure_future(drafter.ready.remote())
    while not (await asyncio.wait({answer}, timeout=ASK_AGAIN_S))[0]:
        drafter.ready.remote()
    try:
        await answer
    except ray.exceptions.ActorUnavailableError:
        raise ray.exceptions.RayError("the drafter's process died while it loaded") from None


async def drafter_status(name: str, within_s: float) -> dict[str, Any]:
    """Returns Drafter.status. Raises TimeoutError and RayError; ValueError when there is no actor of that name."""
    drafter = await find_actor(name)
    status: dict[str, Any] = await asyncio.wait_for(asyncio.wrap_future(drafter.status.remote().future()), within_s)
    return status


def drafter_name(replica: str) -> str:
    """Returns the name of the drafter actor that a replica owns."""
    return f"Drafter:{replica}"


def launch_drafter(
    config: RemoteConfig,
    speculation: SpeculationConfig,
    *,
    num_common_tokens: int | None = None,
    replica: str,
    app_name: str,
    ray_address: str,
    group: Any,
    placement: ReplicaPlacement,
    cores: list[list[int]] | None,
    environment: dict[str, str] | None = None,
) -> Any:
    """Starts a replica's drafter actor on its bundles and returns the handle at once, while the model loads.

    Args:
        num_common_tokens: only ids below it are drafted.
        cores: one set a rank; CPU only.
        environment: more variables of the actor, see observability.environment.
    """
    indices = placement.drafter_bundle_indices
    dtypes = [config.dtype] if isinstance(config, DraftModelConfig) else []
    env_vars = {
        **rank_environment(cores),
        **float32_environment(*dtypes),
        **ENGINE_ENVIRONMENT,
        **(environment or {}),
    }
    ranks = None
    if config.tensor_parallel_size > 1:
        names = [f"DrafterRank-{rank}:{replica}" for rank in range(config.tensor_parallel_size)]
        ranks = RankPlacement(ray_address, names, list(indices), cores, env_vars)
    bundle = placement.bundles[indices[0]]
    return (
        ray.remote(concurrency_groups={"control": 16})(Drafter)
        .options(
            name=drafter_name(replica),
            namespace=NAMESPACE,
            # With ranks of its own the drafter only coordinates them, and they need the bundles' resources.
            num_cpus=0 if ranks else bundle["CPU"],
            num_gpus=0 if ranks else bundle.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, indices[0]),
            max_restarts=-1,
            # Ranks see all GPUs of their node, as vLLM has it, and choose theirs by themselves.
            runtime_env={"env_vars": env_vars if ranks else {**env_vars, **OWN_GPUS}},
        )
        .remote(
            config,
            speculation,
            None if cores is None or ranks else cores[0],
            ranks,
            group,
            app_name,
            num_common_tokens,
        )
    )
