"""``/metrics`` of a served pair: complete, well formed, moved by traffic, and in agreement with the status."""

import os
import signal
import time
import urllib.request

import pytest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.parser import text_string_to_metric_families

from tests.support.cluster.scrape import parse
from tests.support.cluster.serving import HANG_GUARD_S, K, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

PROMPT = list(b"Hello world, this is")
NUM_TOKENS = 64
FRESH_S = 1.1
"""A scrape within a second of another gets its numbers."""


def get(deployment):
    with urllib.request.urlopen(f"{deployment.http_url}/metrics", timeout=HANG_GUARD_S) as response:
        return response.headers["content-type"], response.read().decode()


def scrape(deployment):
    """Once every process is in it with new numbers: what does not answer in time is left out, or old."""

    def whole():
        time.sleep(FRESH_S)
        now = parse(get(deployment)[1], time.monotonic())
        ages, drafters = (
            [value for _, value in now.of(name)] for name in ("outrider:snapshot_age_seconds", "outrider:drafter_up")
        )
        fresh = len(ages) == len(drafters) == deployment.config.serving.num_replicas and max(ages) < FRESH_S
        return now if fresh and all(drafters) and now.sum("outrider:replicas_silent") == 0 else None

    return wait_until(whole, HANG_GUARD_S, "the numbers of every process")


@pytest.fixture
def before(pair):
    return scrape(pair), pair.status().rounds


@pytest.fixture
def moved(pair, before):
    """Looks before and after one answer, and the answer."""
    answer = pair.client.generate(PROMPT, temperature=0.0, max_tokens=NUM_TOKENS)
    return before[0], scrape(pair), answer


def test_every_family_has_one_help_and_one_type(pair):
    content_type, text = get(pair)
    assert content_type == CONTENT_TYPE_PLAIN_0_0_4
    lines = text.splitlines()
    helps = [line.split(" ", 3)[2] for line in lines if line.startswith("# HELP")]
    types = [line.split(" ", 3)[2] for line in lines if line.startswith("# TYPE")]
    assert helps == types
    assert len(types) == len(set(types))
    families = list(text_string_to_metric_families(text))
    assert all(family.type != "unknown" for family in families)
    names = {family.name for family in families}
    assert {"vllm:time_to_first_token_seconds", "vllm:kv_cache_usage_perc", "vllm:spec_decode_num_drafts"} <= names
    assert {"outrider:rounds", "outrider:proposal_wait_seconds", "outrider:link_state", "outrider:drafter_up"} <= names
    replicas = {sample.labels.get("replica") for f in families if f.name.startswith("vllm:") for sample in f.samples}
    assert len(replicas) == 1
    assert None not in replicas


def test_counters_move_with_an_answer_and_agree_with_its_own(moved):
    before, after, answer = moved
    speculative = answer.metrics.speculative_decoding

    def change(name, **labels):
        return after.sum(name, **labels) - before.sum(name, **labels)

    assert change("vllm:spec_decode_num_drafts_total") == speculative.num_spec_steps > 0
    assert change("vllm:spec_decode_num_draft_tokens_total") == speculative.num_draft_tokens
    assert change("vllm:spec_decode_num_accepted_tokens_total") == speculative.num_accepted_draft_tokens
    by_position = [change("vllm:spec_decode_num_accepted_tokens_per_pos_total", position=str(p)) for p in range(K)]
    assert sum(by_position) == speculative.num_accepted_draft_tokens
    assert by_position == sorted(by_position, reverse=True)
    assert change("vllm:generation_tokens_total") == NUM_TOKENS
    assert change("outrider:drafted_rounds_total") == speculative.num_spec_steps
    assert change("outrider:requests_total", api="grpc", method="Generate", code="OK") == 1
    assert change("outrider:proposal_origins_total") > 0
    assert change("outrider:proposal_bytes_total") > 0
    assert change("outrider:chosen_lengths_total", k=str(K)) > 0
    assert change("outrider:step_seconds_count") > 0
    assert change("outrider:proposal_wait_seconds_count") == change("outrider:step_seconds_count")
    assert change("outrider:drafter_draft_tokens_total") >= speculative.num_draft_tokens
    assert change("outrider:drafter_step_seconds_count") > 0
    assert change("outrider:link_bytes_total", direction="received") > 0


def test_they_agree_with_the_status(pair, before, moved):
    rounds_before = before[1]
    first, after, _ = moved
    status = pair.status()
    rounds = status.rounds
    for name, expected in {
        "outrider:rounds_total": rounds.rounds,
        "outrider:drafted_rounds_total": rounds.drafted_rounds,
        "outrider:late_rounds_total": rounds.late_rounds,
        "outrider:proposals_total": rounds.proposals,
        "outrider:refused_proposals_total": rounds.refused_proposals,
        "outrider:dropped_proposals_total": rounds.dropped_proposals,
        "outrider:link_epoch": status.link.epoch,
        "outrider:link_reconnects_total": status.link.reconnects,
    }.items():
        assert after.sum(name) == expected, name
    # vLLM leaves out the last round of a request that was cancelled in it, so its totals since the start may be lower.
    for name, moved_by in {
        "vllm:spec_decode_num_draft_tokens_total": rounds.drafted - rounds_before.drafted,
        "vllm:spec_decode_num_accepted_tokens_total": rounds.accepted - rounds_before.accepted,
    }.items():
        assert after.sum(name) - first.sum(name) == moved_by > 0, name
    assert after.sum("outrider:link_state", state="up") == 1
    assert after.sum("outrider:drafter_up") == 1
    assert after.sum("outrider:replica_up") == 1


def test_a_lost_drafter_is_told_and_its_link_made_anew_is_counted(ngram_pair):
    """Scrapes go on all the while."""
    before = scrape(ngram_pair)

    def scraped():
        ngram_pair.client.generate(PROMPT, temperature=0.0, max_tokens=8)
        return parse(get(ngram_pair)[1], time.monotonic())

    def is_down():
        return any(labels["state"] == "down" for labels, value in scraped().of("outrider:link_state") if value == 1)

    def link_is_new():
        now = scraped()
        return now.sum("outrider:link_reconnects_total") > before.sum("outrider:link_reconnects_total") and now

    # Stopped before it dies: a drafter that is back within a second is never seen down, for as long are scrapes kept.
    lost = ngram_pair.signal_drafter(signal.SIGSTOP)
    try:
        wait_until(is_down, HANG_GUARD_S, "the link down", every_s=0.5)
    finally:
        os.kill(lost, signal.SIGKILL)
    now = wait_until(link_is_new, HANG_GUARD_S, "a new link", every_s=0.5)
    assert now.sum("outrider:link_epoch") > before.sum("outrider:link_epoch")
    assert now.sum("outrider:degraded_requests_total") > before.sum("outrider:degraded_requests_total")
