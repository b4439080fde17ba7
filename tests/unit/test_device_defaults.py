"""Defaults that depend on the device: chosen where nothing is written, and nowhere else."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from outrider.cluster.config import OutriderConfig, parse_config
from outrider.cluster.device_defaults import choices, with_device_defaults
from outrider.cluster.placement import placement_of
from outrider.deploy.app import ReplicaPlan, build_app

DRAFT_MODEL = {"method": "draft_model", "model": "d"}
WRITTEN = {
    "target.max_num_seqs": 16,
    "serving.max_ongoing_requests": 64,
    "drafter.max_num_seqs": 3,
    "drafter.prefill_chunk_tokens": 128,
    "drafter.draft_vocab_size": None,
    "link.round_deadline_steps": None,
}
"""Most of it what the CPU's default is: who writes it means it."""


def config(*, drafter: dict[str, Any] | None = None, **sections: Any) -> OutriderConfig:
    target = {"model": "t", **sections.pop("target", {})}
    return parse_config({"target": target, "drafter": drafter, **sections})


def values(config: OutriderConfig, fields: Any = WRITTEN) -> dict[str, Any]:
    found = {}
    for field in fields:
        section, _, key = field.partition(".")
        found[field] = getattr(getattr(config, section), key)
    return found


def written() -> OutriderConfig:
    tree: dict[str, Any] = {"target": {"model": "t"}, "drafter": dict(DRAFT_MODEL)}
    for field, value in WRITTEN.items():
        section, _, key = field.partition(".")
        tree.setdefault(section, {})[key] = value
    return parse_config(tree)


def test_a_cpu_keeps_what_it_had():
    for served in (config(drafter=DRAFT_MODEL), config(drafter={"method": "ngram"}), config()):
        assert with_device_defaults(served, gpu=False) is served


def test_what_is_written_is_never_overridden():
    for gpu in (True, False):
        assert values(with_device_defaults(written(), gpu)) == WRITTEN
    assert list(choices(written())) == []


def test_a_step_has_a_token_for_every_request():
    """vLLM refuses fewer."""
    served = with_device_defaults(config(target={"max_num_batched_tokens": 64}), gpu=True)
    assert served.target.max_num_seqs == 64


def test_a_deadline_in_milliseconds_stays_the_only_one():
    link = with_device_defaults(config(drafter=DRAFT_MODEL, link={"round_deadline_ms": 3000}), gpu=True).link
    assert (link.round_deadline_ms, link.round_deadline_steps) == (3000, None)


def test_what_is_chosen_is_valid_and_stays_chosen():
    for sections in ({}, {"link": {"round_deadline_ms": 3000}}):
        chosen = with_device_defaults(config(drafter=DRAFT_MODEL, **sections), gpu=True)
        again = parse_config(chosen.model_dump(mode="json"))
        assert again == chosen
        assert with_device_defaults(again, gpu=True) is again
        assert with_device_defaults(pickle.loads(pickle.dumps(chosen)), gpu=True) == chosen


@pytest.mark.parametrize("gpu", [True, False])
def test_what_is_deployed_has_the_device_s(gpu):
    served = config(drafter={"method": "ngram"})
    from outrider.cluster.placement import plan_cores

    cores = None if gpu else plan_cores(served, range(4))
    ingress = build_app(served, ReplicaPlan(placement_of(served, cores), cores))._bound_deployment
    (target,) = (arg._bound_deployment for arg in ingress.init_args if hasattr(arg, "_bound_deployment"))
    deployed = target.init_args[0]
    assert deployed.target.max_num_seqs == (128 if gpu else 16)
    assert deployed.link.round_deadline_steps == (2.0 if gpu else None)
    assert target._deployment_config.max_ongoing_requests > deployed.serving.max_ongoing_requests
