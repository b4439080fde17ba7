"""Keeps every test from calling a model hub and from usage reports, and shares deployments between tests.

A test asks for a deployment by the fixture of its name, or by indirect parametrization of ``deployment``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.threads import one_thread  # noqa: F401

if TYPE_CHECKING:
    from tests.support.cluster.serving import Deployment, Deployments, Models

# Set before anything imports Ray, vLLM or the hub's client, which read them once.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# oneDNN keeps the code of the last 1,024 shapes of a batch, 300 MiB and more, which would look like a leak.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
os.environ.setdefault("OTEL_TRACES_SAMPLER_ARG", "0")  # nothing is traced but what a caller asks for
os.environ.setdefault("OUTRIDER_GATEWAY_TOKEN", "the-secret-of-the-tests-gateway")
# Ray's workers give way to everything else: servers would wait for the other half of the tests, and for its browser.
os.environ.setdefault("RAY_worker_niceness", "0")
if "PYTEST_XDIST_WORKER" in os.environ:
    # As many workers as cores: threads of torch's own would only be in each other's way.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def outrider_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set OUTRIDER_HOME to an empty directory: no model is fetched."""
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
    "one_pass": "A target of one rank, a drafter of two that drafts in one pass.",
    "paths": "A target with little KV cache, and a drafter that drafts several paths in one pass.",
    "pool": "Two targets that share two draft models.",
    "adapters": "A target with three adapters, and room for one more, and a draft model with one of these.",
    "adapters_tp2": "A target of two ranks with three adapters, whose steps follow each other, and a suffix drafter.",
    "stages": "A target of two pipeline stages with two ranks each and little KV cache, a drafter of one rank.",
    "several": "A draft model with both look-ups beside it.",
    "pictures": "A target that sees pictures, and a text draft model, which lacks the tokens that stand for them.",
    "pictures_mrope": "A target of two ranks that sees pictures, with positions in three dimensions, a suffix drafter.",
}
"""Fixtures that need the shared cluster, in the order in which their tests run. Each takes a minute to start."""

FOLDERS = ("ingress", "page")
"""Folders whose tests run together, like those of a file."""

FIRST_HALF = {
    "pair", "small_kv", "co_located", "no_drafter", "wide_target", "wide_drafter", "test_drain", "test_draft_engine",
    "pool", "adapters", "adapters_tp2", "test_rolling_deploy", "test_nodes", "test_full_disk",
    "test_wire", "test_distill", "test_paths",
}  # fmt: skip
"""Deployments, files and folders that `--half 1` runs. The others take as long, in `make test` and `make test-all`."""

IN_EVERY_RUN = {"pair", "ngram_pair"}
"""Deployments whose tests are not all exhaustive: each of the others takes a minute to start."""

IN_FULL_RUNS_ONLY = {
    "test_bench_load", "test_draft_models",
}  # fmt: skip
"""Files of unit tests that take half a minute or more, whose gist other tests have: they are marked exhaustive."""

MOST_TIES = 8
"""Differences from the references that may be put down to rounding, over a whole session."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--half", type=int, choices=(1, 2), help="only this half; tests of one deployment stay together")


@pytest.hookimpl(tryfirst=True)  # before -m chooses by the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run tests of one deployment together, after those that do not use the shared cluster.

    Some of the latter start a cluster of their own, which one process cannot do beside another.
    """

    def fixtures(item: pytest.Item) -> tuple[str, ...]:
        return getattr(item, "fixturenames", ())

    def group(item: pytest.Item) -> str:
        """Return the deployment, the folder or the file whose tests run together."""
        folder = item.path.parent.name
        of_none = folder if folder in FOLDERS else item.path.stem
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if (named := params.get("deployment")) in DEPLOYMENTS:
            return str(named)
        return next((name for name in DEPLOYMENTS if name in fixtures(item)), of_none)

    def order(item: pytest.Item) -> int:
        if (name := group(item)) in DEPLOYMENTS:
            return 2 + list(DEPLOYMENTS).index(name)
        return int("deployments" in fixtures(item))

    for item in items:
        if item.path.stem in IN_FULL_RUNS_ONLY or group(item) in DEPLOYMENTS.keys() - IN_EVERY_RUN:
            item.add_marker("exhaustive")
    if (half := config.getoption("half")) is not None:
        chosen = [item for item in items if (group(item) in FIRST_HALF) == (half == 1)]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen
    items.sort(key=order)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Build checkpoints of a tiny target and drafter."""
    from tests.support.cluster.serving import build_models

    return build_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def deployments(models: Models, request: pytest.FixtureRequest) -> Iterator[Deployments]:
    from tests.support.cluster.serving import Deployments

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


@pytest.fixture
def deployment(deployments: Deployments, request: pytest.FixtureRequest) -> Deployment:
    """Starts the deployment of DEPLOYMENTS that the test is parametrized with, by indirect parametrization."""
    return deployments.use(request.param)


@pytest.fixture(scope="session")
def plain_vllm(models: Models) -> Callable[..., list[list[int]]]:
    """Compute greedy tokens of one plain vLLM engine of the target, as `plain_engine.greedy_tokens`."""
    from tests.support.models.plain_engine import greedy_tokens

    return partial(greedy_tokens, models.target)
