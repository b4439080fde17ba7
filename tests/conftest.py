"""What every test gets: no call to a model hub, no usage report, Outrider's home in a directory of its own, and, for
those that ask by name, a deployment that is shared with every other test that asks for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.threads import one_thread  # noqa: F401

if TYPE_CHECKING:
    from tests.serving import Deployment, Deployments, Models

# Set before anything imports Ray, vLLM or the hub's client, which read them once.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OTEL_TRACES_SAMPLER_ARG", "0")  # nothing is traced but what a caller asks for
os.environ.setdefault("OUTRIDER_GATEWAY_TOKEN", "the-secret-of-the-tests-gateway")
# Ray's workers give way to everything else: servers would wait for the other half of the tests, and for its browser.
os.environ.setdefault("RAY_worker_niceness", "0")
if "PYTEST_XDIST_WORKER" in os.environ:
    # As many workers as cores: threads of torch's own would only be in each other's way.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def outrider_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty OUTRIDER_HOME: no model is fetched."""
    home = tmp_path / "home"
    monkeypatch.setenv("OUTRIDER_HOME", str(home))
    return home


DEPLOYMENTS = {
    "pair": "Target and draft model, one rank each.",
    "ngram_pair": "Target and ngram drafter, with deadlines short enough to see pass.",
    "small_kv": "The pair with so little KV cache that a few long requests fill it, on either side.",
    "co_located": "A target whose own engine drafts, by vLLM's draft_model.",
    "two_replicas": "Two replicas with suffix drafters and room for few requests.",
    "both_tp2": "A target of two ranks, a drafter of two.",
    "no_drafter": "The target alone, with little KV cache: no drafter is configured.",
    "wide_target": "A target whose vocabulary is padded further than its drafter's.",
    "wide_drafter": "A drafter whose vocabulary is padded further than its target's.",
    "target_tp2": "A target of two ranks, a drafter of one.",
    "drafter_tp2": "A target of one rank, a drafter of two.",
    "pool": "Two targets that share two draft models.",
    "lookup_pool": "A target and a pool of two look-up drafters, which load within a second.",
    "adapters": "A target with three adapters, and room for one more, and a draft model with one of these.",
    "adapters_tp2": "A target of two ranks with three adapters, whose steps follow each other, and a suffix drafter.",
    "stages": "A target of two pipeline stages with two ranks each and little KV cache, a drafter of one rank.",
    "several": "A draft model with both look-ups beside it.",
    "pictures": "A target that sees pictures, and a text draft model, which lacks the tokens that stand for them.",
    "pictures_mrope": "A target of two ranks that sees pictures, with positions in three dimensions, a suffix drafter.",
}
"""Fixtures that need the shared cluster, in the order in which their tests run. Each takes a minute to start."""

FOLDERS = ("ingress", "page")
"""Of tests that run together, like those of a file."""

FIRST_HALF = {
    "pair", "small_kv", "co_located", "no_drafter", "wide_target", "wide_drafter", "test_drain", "test_draft_engine",
    "pool", "adapters", "adapters_tp2", "test_rolling_deploy", "test_nodes", "test_full_disk",
    "test_wire", "test_wire_to_target", "test_distill",
}  # fmt: skip
"""What `--half 1` runs of tests with an engine or a cluster: deployments, files, folders. The rest takes as long, in
either command."""

IN_FULL_RUNS_ONLY = {
    "small_kv", "co_located", "no_drafter", "two_replicas", "both_tp2", "wide_target", "pool", "lookup_pool",
    "adapters", "adapters_tp2", "stages", "several", "pictures", "pictures_mrope", "test_bench_load",
    "test_block_copies", "test_chaos", "test_co_located", "test_connection_limits", "test_device_faults",
    "test_device_steps",
    "test_distill", "test_draft_engine", "test_draft_graphs", "test_draft_models", "test_drain", "test_gpu_folder",
    "test_hanging_drafter", "test_model_drafter", "test_openai_responses", "test_own_gpus", "test_pictures",
    "test_served_distribution", "test_target_sampler", "test_tenants", "test_tls", "test_vllm_bench",
}  # fmt: skip
"""Deployments and files that take half a minute or more for few tests, whose gist other tests have: all of them are
marked exhaustive."""

MOST_TIES = 8
"""Differences from the references that may be put down to rounding, over a whole session."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--half", type=int, choices=(1, 2), help="only this half; tests of one deployment stay together")


@pytest.hookimpl(tryfirst=True)  # before -m chooses by the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of one deployment run together, after those with no part in the cluster: some of these start one of their
    own, which one process could not beside the other."""

    def fixtures(item: pytest.Item) -> tuple[str, ...]:
        return getattr(item, "fixturenames", ())

    def room(item: pytest.Item) -> str:
        """A deployment, a folder or a file."""
        folder = item.path.parent.name
        of_none = folder if folder in FOLDERS else item.path.stem
        return next((name for name in DEPLOYMENTS if name in fixtures(item)), of_none)

    def turn(item: pytest.Item) -> int:
        if (name := room(item)) in DEPLOYMENTS:
            return 2 + list(DEPLOYMENTS).index(name)
        return int("deployments" in fixtures(item))

    for item in items:
        if not IN_FULL_RUNS_ONLY.isdisjoint((room(item), item.path.stem)):
            item.add_marker("exhaustive")
    if (half := config.getoption("half")) is not None:
        chosen = [item for item in items if (room(item) in FIRST_HALF) == (half == 1)]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen
    items.sort(key=turn)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Checkpoints of a tiny target and drafter."""
    from tests.serving import build_models

    return build_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def deployments(models: Models, request: pytest.FixtureRequest) -> Iterator[Deployments]:
    from tests.serving import Deployments

    deployments = Deployments(models, request.config.getoption("half") or 1)
    yield deployments
    deployments.shutdown()
    ties = deployments.ties()
    assert len(ties) <= MOST_TIES, f"too many near-ties to be chance: {ties}"


def _of(name: str, what: str) -> Any:
    def use(deployments: Deployments) -> Deployment:
        return deployments.use(name)

    use.__doc__ = what
    return pytest.fixture(use)


globals().update({name: _of(name, what) for name, what in DEPLOYMENTS.items()})


@pytest.fixture(scope="session")
def plain_vllm(models: Models) -> Callable[..., list[list[int]]]:
    """Greedy tokens of one plain vLLM engine of the target, as `plain_engine.greedy_tokens`."""
    from tests.plain_engine import greedy_tokens

    return partial(greedy_tokens, models.target)
