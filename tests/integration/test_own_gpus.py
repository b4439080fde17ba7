"""Actors that take the GPUs that Ray gives them for all there are see no others. Ray only counts GPUs: none is here."""

import os

import pytest
import ray
from ray.util.placement_group import placement_group

from outrider.actors.drafter.actor import launch_drafter
from outrider.actors.drafter.learning import trainer_options
from outrider.cluster.config import LearningConfig, NgramConfig, SpeculationConfig
from outrider.cluster.placement import NAMESPACE, ReplicaPlacement

pytestmark = pytest.mark.exhaustive


class Other: ...


@pytest.fixture(scope="module")
def cluster():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1")
        ray.init(
            address="local", namespace=NAMESPACE, num_cpus=4, num_gpus=3, include_dashboard=False, log_to_driver=False
        )
        yield
        ray.shutdown()


def gpus_of(actor):
    """Return what CUDA would show the actor, and what Ray has given it."""
    return ray.get(
        actor.__ray_call__.remote(
            lambda _: (os.environ.get("CUDA_VISIBLE_DEVICES"), ",".join(map(str, ray.get_gpu_ids())))
        ),
        timeout=120,
    )


def test_a_drafter_and_a_trainer_see_their_own_gpu_where_the_cluster_shows_all(cluster):
    other = ray.remote(num_gpus=1)(Other).remote()
    assert gpus_of(other) == (None, "0"), "the cluster's environment says that all are shown"
    bundles = {"CPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}
    group = placement_group(list(bundles))
    ray.get(group.ready(), timeout=60)
    drafter = launch_drafter(
        NgramConfig(method="ngram"),
        SpeculationConfig(),
        replica="r",
        app_name="own-gpus",
        ray_address=ray.get_runtime_context().gcs_address,
        group=group,
        placement=ReplicaPlacement(bundles, (0,), (1,), ({}, {}), "PACK"),
        cores=None,
    )
    trainer = ray.remote(Other).options(**trainer_options(LearningConfig(num_gpus=1))).remote()
    seen = [gpus_of(drafter), gpus_of(trainer)]
    assert all(shown == given for shown, given in seen), seen
    assert {shown for shown, _ in seen} == {"1", "2"}
