"""A replica's metrics: everything reported is exported, scrapes share one question, silence is told."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from outrider.actors.drafter.vocabulary import DraftVocabulary
from outrider.actors.observability.catalog import DRAFTER, LENGTHS, LINK, ROUNDS
from outrider.actors.observability.histogram import Histogram
from outrider.actors.observability.metrics import ReplicaMetrics
from outrider.actors.round.length import LengthController
from outrider.cluster.link.messages import DraftOrigin
from tests.unit.observability.test_exposition import parse, samples
from tests.unit.round.scripted_link import Engine

DRAFTER_STATUS = {
    "num_sequences": 3,
    "num_prefilling": 1,
    "num_side_branches": 2,
    "branch_blocks": 4,
    "kv_cache_usage": 0.25,
    "links": 1,
    "steps": 9,
    "rounds": 8,
    "drafted": 20,
    "vocabulary_observed": 100,
    "vocabulary_missed": 7,
    "step_seconds": Histogram().snapshot(),
    "link_steps": {"a": 5.5, "b": 3.5},
    "chosen": {"draft_model": 6, "ngram": 2},
    "judged": {"draft_model": 20, "ngram": 30},
    "right": {"draft_model": 10, "ngram": 3},
    "learning": {
        "version": 3,
        "changes": 4,
        "refused": 1,
        "failures": 2,
        "dropped_texts": 5,
        "trainer": {
            "tokens": 1000,
            "steps": 200,
            "loss": 1.5,
            "adopted": 3,
            "withdrawn": 1,
            "reverted": 2,
            "store_failures": 0,
            "refused": {"no_gain": 2},
            "last_verdict": {"reason": "gain", "recent": {"mean": 0.05}, "past": {"mean": -0.01}, "general": None},
            "versions": [
                {"number": 0, "state": "replaced", "verdict": None, "since": None},
                {
                    "number": 3,
                    "state": "withdrawn",
                    "verdict": {
                        "reason": "gain",
                        "recent": {"mean": 0.05, "margin": 0.02, "texts": 40},
                        "past": {"mean": -0.01, "margin": None, "texts": 1},
                        "general": None,
                    },
                    "since": {"mean": -0.25, "margin": 0.125, "texts": 20},
                },
            ],
        },
    },
    "pid": 1,
}
LINK_STATUS = {
    "state": "up", "epoch": 2, "drafter": "Drafter:a", "reconnects": 1, "rtt_us": 150.0, "last_error": "",
    "backend": "local", "bytes_sent": 10, "bytes_received": 20, "frames_sent": 1, "frames_received": 2,
}  # fmt: skip


def rank_0():
    """Rounds with a bit of everything, as rank 0 reports them."""
    engine = Engine(lengths=LengthController(4))
    engine.begin("a", "b")
    engine.round.reset_statistics()
    for _ in range(2):
        engine.step({"a": [5], "b": [6]}, {"a": [1, 2]})
    engine.round.statistics.count_answer(DraftOrigin.MAIN_LINE, 900)
    engine.round.proposal_was_bad("a")
    return {"rounds": engine.round.metrics(), "link": LINK_STATUS}


def make(ask_rank_0=None, ask_drafter=None, clock=lambda: 0.0, **options):
    async def drafter():
        return DRAFTER_STATUS

    async def verifier():
        return rank_0()

    return ReplicaMetrics(
        "m", ask_rank_0 or verifier, ask_drafter or drafter, registry=CollectorRegistry(), clock=clock, **options
    )


async def test_all_that_is_reported_is_exported():
    text = await make().text()
    values = samples(text)
    m = ("model_name", "m")
    assert values["outrider:rounds_total", m] == 4
    assert values["outrider:drafted_rounds_total", m] == 2
    assert values["outrider:proposal_origins_total", m, ("origin", "main_line")] == 1
    assert values["outrider:proposal_origins_total", m, ("origin", "miss")] == 0
    assert values["outrider:dropped_proposals_total", m, ("reason", "unusable")] == 1
    assert values["outrider:degraded_requests_total", m, ("reason", "no_link")] == 2
    assert values["outrider:step_seconds_count", m] == 1
    assert sum(value for key, value in values.items() if key[0] == "outrider:chosen_lengths_total") == 4
    assert values["outrider:link_state", m, ("state", "up")] == 1
    assert values["outrider:link_state", m, ("state", "down")] == 0
    assert values["outrider:link_backend", ("backend", "local"), m] == 1
    assert values["outrider:link_rtt_seconds", m] == pytest.approx(150e-6)
    assert values["outrider:link_bytes_total", ("direction", "received"), m] == 20
    assert values["outrider:drafter_kv_cache_usage_ratio", m] == 0.25
    assert values["outrider:draft_vocabulary_misses_total", m] == 7
    assert values["outrider:drafter_link_steps_total", m, ("target", "b")] == 3.5
    assert values["outrider:drafter_chosen_total", ("method", "ngram"), m] == 2
    assert values["outrider:drafter_right_drafts_total", ("method", "draft_model"), m] == 10
    assert values["outrider:drafter_judged_drafts_total", ("method", "ngram"), m] == 30
    assert values["outrider:length_controller_failures_total", m] == 0
    assert values["outrider:learning_reverted_total", m] == 2
    assert values["outrider:learning_version_state", m, ("state", "withdrawn"), ("version", "3")] == 1
    assert values["outrider:learning_version_state", m, ("state", "replaced"), ("version", "0")] == 1
    gains = {key[2][1]: value for key, value in values.items() if key[0] == "outrider:learning_version_gain"}
    assert gains == {"recent": 0.05, "past": -0.01, "since": -0.25}
    margins = {key[2][1]: value for key, value in values.items() if key[0] == "outrider:learning_version_margin"}
    assert margins == {"recent": 0.02, "since": 0.125}
    # Every metric of these groups, but for the reasons that have not come up.
    exported = {name.removesuffix("_total") for name in parse(text)}
    missing = {spec.name.removesuffix("_total") for spec in (*ROUNDS, *LENGTHS, *LINK, *DRAFTER)} - exported
    assert missing == {"outrider:refused_proposals"}


async def test_the_failing_controller_is_counted():
    class Broken:
        def __getattr__(self, name):
            return lambda *args: None

        def choose(self, estimates):
            raise RuntimeError("broken on purpose")

        def snapshot(self):
            return {}

    engine = Engine(lengths=Broken())
    engine.begin("a")
    engine.commit({"a": [1]})

    async def ask():
        return {"rounds": engine.round.metrics(), "link": LINK_STATUS}

    assert samples(await make(ask).text())["outrider:length_controller_failures_total", ("model_name", "m")] == 1


def test_the_drafter_s_names_are_those_that_are_exported():
    from outrider.actors.drafter.draft_model import DraftModelStrategy
    from outrider.actors.drafter.loop import DraftLoop
    from outrider.actors.observability import metrics as families
    from tests.unit.drafting_engine import MemoryEngine

    vocabulary = DraftVocabulary(16, 8)
    loop = DraftLoop(DraftModelStrategy(MemoryEngine(), 8, vocabulary=vocabulary))
    vocabulary.observe([1, 15])
    reported = loop.metrics()
    assert reported["vocabulary_missed"] == 1
    assert {*families._DRAFTER_GAUGES, *families._DRAFTER_COUNTERS} <= set(reported)


async def test_scrapes_of_one_moment_ask_once_and_later_ones_again():
    asked, now = [], 0.0

    async def ask():
        asked.append(now)
        await asyncio.sleep(0)
        return rank_0()

    metrics = make(ask, clock=lambda: now)
    await asyncio.gather(metrics.text(), metrics.text(), metrics.text())
    await metrics.text()
    assert len(asked) == 1
    now = 1.5
    text = await metrics.text()
    assert len(asked) == 2
    assert samples(text)["outrider:snapshot_age_seconds", ("model_name", "m")] == 0


async def test_a_scrape_does_not_wait_for_a_busy_engine_and_tells_the_age_of_its_numbers():
    now, free = 0.0, asyncio.Event()
    free.set()

    async def ask():
        await free.wait()
        return rank_0()

    metrics = make(ask, clock=lambda: now, answer_within_s=0.01)
    await metrics.text()
    free.clear()
    now = 7.0
    values = samples(await metrics.text())
    assert values["outrider:snapshot_age_seconds", ("model_name", "m")] == 7
    assert values["outrider:rounds_total", ("model_name", "m")] == 4
    free.set()
    await asyncio.sleep(0.01)
    assert samples(await metrics.text())["outrider:snapshot_age_seconds", ("model_name", "m")] == 0


async def test_a_drafter_that_is_gone_is_down_and_has_no_load():
    async def gone():
        raise ConnectionError("gone")

    values = samples(await make(ask_drafter=gone).text())
    assert values["outrider:drafter_up", ("model_name", "m")] == 0
    assert not any(key[0] == "outrider:drafter_sequences" for key in values)


async def test_without_a_drafter_there_is_nothing_of_verifier_or_drafter():
    text = await ReplicaMetrics("m", None, None, registry=CollectorRegistry()).text()
    assert set(parse(text)) == {"outrider:build_info"}
