"""The controller in virtual time: it finds good lengths, stops, and starts again."""

import dataclasses

import pytest

from outrider.actors.round.length import Estimate, FixedLengths, LengthController, Lengths
from outrider.cluster.link.messages import DraftOrigin
from tests.unit.length.virtual_time import PAIRS, TEXTS, Text, VirtualRounds

CPU, GPU, SMALL = PAIRS["qwen-cpu"], PAIRS["70b-8b"], PAIRS["32b-0.6b"]
GOOD = Text((0.9,), 0.9)


def rounds_of(pair, text, batch, controller=None, seed=1, **options):
    return VirtualRounds(pair, text, batch, controller or LengthController(8), seed, **options)


def hopeless_for_good(pair=GPU, batch=2):
    simulation = rounds_of(pair, TEXTS["hopeless"], batch, lifetime=100_000)
    simulation.run(400)
    return simulation


@pytest.mark.parametrize("text", ["code", "chat", "poor"])
@pytest.mark.parametrize("batch", [1, 8, 32])
@pytest.mark.parametrize("pair", ["70b-8b", "32b-0.6b", "qwen-cpu"])
def test_close_to_the_better_of_two_fixed_lengths_and_of_none(pair, batch, text):
    pair, text, steps = PAIRS[pair], TEXTS[text], 300 if batch < 32 else 120
    fixed = max(rounds_of(pair, text, batch, FixedLengths(k)).run(steps) for k in (2, 4))
    ours = rounds_of(pair, text, batch).run(steps)
    assert ours > 0.97 * max(fixed, pair.plain_rate(batch))


@pytest.mark.parametrize("pair", ["70b-8b", "32b-0.6b", "qwen-cpu"])
@pytest.mark.parametrize("batch", [1, 8])
def test_a_hopeless_drafter_costs_less_than_three_per_cent_and_is_not_asked(pair, batch):
    simulation = rounds_of(PAIRS[pair], TEXTS["hopeless"], batch)
    assert simulation.run(800) > 0.97 * PAIRS[pair].plain_rate(batch)
    assert not simulation.controller.snapshot()["speculating"]


@pytest.mark.parametrize("pair", [GPU, CPU])
def test_a_slow_drafter_costs_less_than_three_per_cent(pair):
    simulation = rounds_of(pair.slower_drafter(40.0), GOOD, 4)
    simulation.run(50)
    assert simulation.run(600) > 0.97 * pair.plain_rate(4)


def test_a_drafter_that_never_answers_is_found_out():
    controller = LengthController(8)
    request = controller.track(8)
    waited_s = plain_s = 0.0
    for step in range(1200):
        wait_s = 1.0 if controller.choose([request])[0].k else 0.0
        controller.observe_answer(request, DraftOrigin.NONE, 0, 0.0, wait_s)
        controller.observe_step(1, 0.025)
        if step >= 200:
            waited_s += wait_s
            plain_s += 0.025
    assert controller.choose([request]) == [Lengths(0, 0)]
    assert waited_s < 0.2 * plain_s, "a round on probe costs forty plain ones here, and there are few"


@pytest.mark.parametrize(("batch", "share"), [(1, 0.5), (2, 0.25), (9, 1.0)])
def test_drafting_after_the_outcome_prolongs_no_round_that_waits_for_a_miss(batch, share):
    """With half of the outcomes missed. Above 8 requests no round of chains waits."""
    controller = LengthController(8)
    requests = [controller.track(8) for _ in range(batch)]
    for turn in range(400):
        controller.choose(requests)
        for request in requests:
            controller.observe_answer(request, (DraftOrigin.MAIN_LINE, DraftOrigin.MISS)[turn % 2], 8, 0.002, 0.0)
            controller.observe_round(request, 8, 6)
        controller.observe_step(9 * batch, 0.025)
    drafted_s = max(request.chosen.k for request in requests) * 0.002
    assert controller.round_price() == pytest.approx(share * controller.rates()[0] / batch * drafted_s, rel=0.1)


def test_drafting_starts_again_when_the_drafter_improves():
    simulation = hopeless_for_good()
    assert not simulation.controller.snapshot()["speculating"]
    simulation.text = GOOD
    simulation.run(1200)
    assert simulation.run(200) > 2.0 * GPU.plain_rate(2)


@pytest.mark.parametrize(("pair", "target", "drafter"), [(GPU, 3.0, 20.0), (GPU, 1.0, 60.0), (SMALL, 1.0, 60.0)])
def test_a_stall_of_the_whole_machine_is_forgotten_soon_after_it(pair, target, drafter):
    pair = dataclasses.replace(pair, deadline_s=0.3)
    simulation = rounds_of(pair, TEXTS["stated"], 8, LengthController(4), max_tokens=4)
    usual = simulation.run(1500)
    stalled = pair.slower_drafter(drafter)
    simulation.pair = dataclasses.replace(stalled, target_s=tuple(seconds * target for seconds in pair.target_s))
    simulation.run(400)
    assert not simulation.controller.snapshot()["speculating"]
    simulation.pair = pair
    simulation.run(400)
    assert simulation.run(200) > 0.93 * usual


def test_the_longer_nothing_comes_of_it_the_rarer_the_probes():
    simulation = hopeless_for_good()
    early = simulation.controller.snapshot()["probes"]
    simulation.run(400)
    middle = simulation.controller.snapshot()["probes"]
    simulation.run(400)
    assert simulation.controller.snapshot()["probes"] - middle <= middle - early <= early


def test_a_code_request_gets_longer_drafts_than_a_chat_request_beside_it():
    text = Text((0.95, 0.3), 0.8)
    simulation = rounds_of(SMALL, text, 8, lifetime=100_000)
    simulation.run(200)
    lengths = sorted(lengths.k for lengths in simulation.chosen)
    assert max(lengths[:4]) < min(lengths[4:])


def test_one_miss_does_not_stall_a_batch_but_one_request_waits_for_a_cheap_token():
    alone = rounds_of(SMALL, TEXTS["stated"], 1)
    alone.run(200)
    assert all(lengths.k_miss > 0 for lengths in alone.chosen)
    batch = rounds_of(SMALL, TEXTS["stated"], 32)
    batch.run(100)
    assert all(lengths.k_miss == 0 < lengths.k for lengths in batch.chosen)


def test_two_drafts_are_asked_for_until_a_step_and_an_answer_have_been_measured():
    controller = LengthController(8)
    request = controller.track(8)
    assert controller.choose([request]) == [Lengths(2, 0)]
    controller.observe_step(3, 0.025)
    assert controller.choose([request]) == [Lengths(2, 0)]


def test_a_request_never_gets_more_than_it_may_have():
    controller = LengthController(8)
    requests = [*(controller.track(most) for most in (1, 0, -3, 99)), Estimate()]
    for _ in range(100):
        chosen = controller.choose(requests)
        short, none, negative, long, unknown = chosen
        assert (none.k, negative.k, unknown.k) == (0, 0, 0)
        assert short.k <= 1
        assert long.k <= 8
        for request, lengths in zip(requests, chosen, strict=True):
            assert lengths.k_miss <= lengths.k
            controller.observe_answer(request, DraftOrigin.MAIN_LINE, lengths.k, 0.0001, 0.0)
            controller.observe_round(request, lengths.k, lengths.k)
        controller.observe_step(5 + sum(lengths.k for lengths in chosen), 0.025)
    assert (short.k, long.k) == (1, 8)


def test_a_request_that_sat_a_round_out_was_not_drafted_ahead_for():
    """Its next answer is no hit and no miss: nobody had a reason to draft while it stood aside."""
    controller = LengthController(8)
    request, other = controller.track(8), controller.track(8)

    def miss_share_after(*rounds):
        before = controller.snapshot()["origins"]["miss"]
        for members in rounds:
            controller.choose(members)
        controller.observe_answer(request, DraftOrigin.MISS, 0, 0.001, 0.0)
        return controller.snapshot()["origins"]["miss"] - before

    assert miss_share_after([request, other]) == 0, "its first round"
    assert miss_share_after([request, other]) > 0
    assert miss_share_after([other], [request, other]) == 0
    assert miss_share_after([other]) == 0, "an answer after it left"


@pytest.mark.parametrize("step_s", [0.0, -1.0])
def test_a_step_without_duration_is_ignored(step_s):
    controller = LengthController(4)
    controller.observe_step(1, step_s)
    assert controller.snapshot()["step_fixed_ms"] == 0


def test_snapshot_after_rounds_that_are_known():
    pair = dataclasses.replace(CPU, noise=0.0)
    simulation = rounds_of(pair, TEXTS["stated"], 8)
    simulation.run(300)
    snapshot = simulation.controller.snapshot()
    assert snapshot["step_fixed_ms"] == pytest.approx(320, rel=0.05)
    assert snapshot["step_per_token_ms"] == pytest.approx(5, rel=0.1)
    assert snapshot["draft_step_ms"] == pytest.approx(simulation.draft_step_s * 1e3, rel=0.02)
    assert sum(snapshot["origins"].values()) == pytest.approx(1.0)
    assert snapshot["acceptance_by_position"][0] == pytest.approx(0.8, abs=0.05)
    assert snapshot["speculating"]
    assert snapshot["probes"] == 0
    assert snapshot["expected_rate"] > 1.1 * snapshot["expected_plain_rate"] > 0


def test_what_an_adapter_accepts_says_nothing_of_another_s():
    """New requests begin with what was learnt of their own adapter's, and draft as much as that is worth."""
    rounds = {"near": 8, "far": 0}
    controller = LengthController(8)
    for _ in range(200):
        requests = [controller.track(8, adapter) for adapter in rounds]
        for request, accepted in zip(requests, rounds.values(), strict=True):
            controller.observe_round(request, 8, accepted)
    new = [controller.track(8, adapter) for adapter in ("near", "far", "")]
    near, far, none = controller._survival(new)
    assert near[0] > 0.95
    assert far[0] < 0.05
    assert none[0] == pytest.approx(0.7), "nothing is known of it"
    overall = controller.snapshot()["acceptance_by_position"]
    assert far[0] < overall[0] < near[0], "what is told of the deployment is of all"
