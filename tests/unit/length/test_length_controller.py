"""The whole controller on simulated rounds: it finds the best lengths, stops, starts again, and forgets."""

from itertools import pairwise

import pytest

from actors.length.length_controller import LengthController
from actors.length.limits import LengthLimits, Lengths
from actors.length.origin import Origin
from tests.unit.length.simulated_rounds import Deployment, Simulation, compute_bound, cpu, gpu, same

LIMITS = LengthLimits(max_tokens=8, max_requests=64)


def settled(deployment, rounds=160, limits=LIMITS, seed=1):
    simulation = Simulation(deployment, limits, seed)
    simulation.run(rounds)
    return simulation


@pytest.mark.parametrize("acceptance", [(0.9,), (0.8, 0.75, 0.7), (0.5,)], ids=["code", "chat", "poor"])
@pytest.mark.parametrize("requests", [1, 8, 32])
@pytest.mark.parametrize(("step_s", "draft_step_s"), [(cpu, 0.041), (gpu, 0.006), (compute_bound, 0.006)])
def test_within_two_per_cent_of_the_best_fixed_length(step_s, draft_step_s, requests, acceptance):
    deployment = Deployment(step_s, draft_step_s, same(requests, *acceptance))
    rate = settled(deployment).run(48)
    assert rate > 0.98 * deployment.best_fixed(8)[0]


@pytest.mark.parametrize("step_s", [cpu, gpu, compute_bound])
@pytest.mark.parametrize("requests", [1, 8])
def test_a_hopeless_drafter_costs_less_than_three_per_cent(step_s, requests):
    deployment = Deployment(step_s, 0.02, same(requests, 0.0))
    simulation = settled(deployment)
    assert simulation.run(320) > 0.97 * deployment.plain_rate()
    assert not simulation.controller.snapshot()["speculating"]


def test_too_slow_a_drafter_is_not_asked():
    deployment = Deployment(gpu, 0.2, same(4, 0.9))
    simulation = settled(deployment)
    assert simulation.run(320) > 0.97 * deployment.plain_rate()


def test_a_drafter_that_is_slower_than_it_says_is_found_out():
    deployment = Deployment(gpu, 0.006, same(4, 0.9), late_s=0.2)
    simulation = settled(deployment)
    assert simulation.run(320) > 0.97 * deployment.plain_rate()


def test_a_drafter_that_never_answers_is_found_out():
    controller = LengthController(LIMITS)
    controller.track("a", 8)
    waited_s = plain_s = 0.0
    for step in range(1200):
        lengths = controller.choose(["a"])["a"]
        wait_s = 1.0 if lengths.k else 0.0
        controller.observe_answer("a", Origin.NONE, 0, 0.0, wait_s)
        controller.observe_round("a", 0, 0)
        controller.observe_step(1, 1, 0.025)
        if step >= 200:
            waited_s += wait_s
            plain_s += 0.025
    assert controller.choose(["a"])["a"] == Lengths(0, 0)
    assert waited_s < 0.2 * plain_s, "a round on probe costs forty plain ones here, and there are few"


def test_drafting_starts_again_when_the_drafter_improves():
    deployment = Deployment(gpu, 0.006, same(2, 0.0))
    simulation = settled(deployment, 400)
    assert not simulation.controller.snapshot()["speculating"]
    deployment.acceptance = same(2, 0.9)
    simulation.run(800)
    assert simulation.run(100) > 0.95 * deployment.best_fixed(8)[0]


def test_a_falling_load_switches_speculation_on_at_once():
    def heavy(tokens):
        return 0.025 + 0.002 * max(0.0, tokens - 8)

    deployment = Deployment(heavy, 0.004, same(4, 0.6))
    simulation = settled(deployment, 100)
    assert simulation.controller.snapshot()["speculating"]
    deployment.plain = tuple(f"other{i}" for i in range(40))
    simulation.run(300)
    assert not simulation.controller.snapshot()["speculating"]
    probes = simulation.controller.snapshot()["probes"]
    deployment.plain = ()
    chosen = simulation.round()
    assert all(lengths.k > 0 for lengths in chosen.values())
    assert simulation.controller.snapshot()["probes"] == probes, "the model said so, no probe"


def test_nothing_oscillates():
    for acceptance in (0.9, 0.5, 0.0):
        simulation = settled(Deployment(gpu, 0.006, same(8, acceptance)))
        switches = simulation.controller.snapshot()["switches"]
        simulation.run(200)
        assert simulation.controller.snapshot()["switches"] == switches


def test_a_code_request_gets_longer_drafts_than_a_chat_request():
    deployment = Deployment(cpu, 0.02, {"code": [0.95] * 8, "chat": [0.5] * 8})
    simulation = settled(deployment, 300)
    chosen = simulation.history[-100:]
    code, chat = (sum(lengths[i].k for lengths in chosen) / len(chosen) for i in ("code", "chat"))
    assert code > chat + 1
    assert simulation.run(100) > deployment.best_fixed(8)[0], "better than any one length for both"


def test_one_miss_does_not_stall_a_batch():
    alone = settled(Deployment(gpu, 0.006, same(1, 0.9))).history[-50:]
    assert all(lengths.k_miss > 0 for chosen in alone for lengths in chosen.values())
    batch = settled(Deployment(gpu, 0.006, same(8, 0.9))).history[-50:]
    assert all(lengths.k_miss == 0 and lengths.k >= 3 for chosen in batch for lengths in chosen.values())


def test_without_drafting_ahead_every_answer_is_waited_for_or_not_asked():
    limits = LengthLimits(max_tokens=8, max_requests=64, draft_ahead=False)
    cheap = Deployment(gpu, 0.002, same(2, 0.9), main=0.0, side=0.0)
    simulation = settled(cheap, limits=limits)
    assert simulation.run(100) > 0.98 * cheap.best_fixed(8)[0]
    dear = Deployment(gpu, 0.05, same(2, 0.9), main=0.0, side=0.0)
    assert settled(dear, limits=limits).run(400) > 0.97 * dear.plain_rate()


def test_requests_without_a_drafter_get_nothing_and_count_for_the_load():
    deployment = Deployment(gpu, 0.006, same(1, 0.9), plain=("plain",))
    simulation = settled(deployment)
    assert simulation.history[-1]["plain"] == Lengths(0, 0)
    assert simulation.history[-1]["r0"].k_miss == 0, "alone it would wait on a miss"


def test_a_request_never_gets_more_than_it_may_have():
    controller = LengthController(LIMITS)
    controller.track("short", 1)
    controller.track("none", 0)
    controller.track("long", 99)
    for _ in range(100):
        chosen = controller.choose(["short", "none", "long"])
        assert (chosen["short"].k, chosen["none"].k) == (1, 0)
        assert chosen["long"].k <= 8
        for request_id, lengths in chosen.items():
            assert lengths.k_miss <= lengths.k
            controller.observe_answer(request_id, Origin.MAIN_LINE, lengths.k, 0.0001, 0.0)
            controller.observe_round(request_id, lengths.k, lengths.k)
        controller.observe_step(3, 3 + sum(lengths.k for lengths in chosen.values()), 0.025)
    assert chosen["long"].k == 8


def test_untracking_leaves_nothing_behind():
    simulation = settled(Deployment(gpu, 0.006, same(4, 0.9)), 50)
    controller = simulation.controller
    for request_id in same(4, 0.9):
        controller.observe_answer(request_id, Origin.MAIN_LINE, 4, 0.006, 0.0)
        controller.untrack(request_id)
        controller.untrack(request_id)
    state = {name: repr(value) for name, value in vars(controller).items()}
    assert not [name for name, value in state.items() if "'r0'" in value]
    for part in ("_acceptance", "_outcomes", "_probing"):
        assert len(getattr(controller, part)) == 0
    assert controller.choose(["r0"]) == {"r0": Lengths(0, 0)}


def test_a_new_request_starts_with_what_others_have_taught():
    deployment = Deployment(gpu, 0.006, same(4, 0.9))
    simulation = settled(deployment)
    controller = simulation.controller
    controller.track("new", 8)
    chosen = controller.choose([*deployment.members, "new"])
    assert abs(chosen["new"].k - chosen["r0"].k) <= 1
    assert chosen["new"].k >= 3


def test_snapshot_after_rounds_that_are_known():
    deployment = Deployment(cpu, 0.041, same(8, 0.8), noise=0.0)
    snapshot = settled(deployment, 300).controller.snapshot()
    assert snapshot["step_fixed_ms"] == pytest.approx(104, rel=0.05)
    assert snapshot["step_per_token_ms"] == pytest.approx(5, rel=0.2)
    assert snapshot["step_uneven_ms"] == 0.0
    assert snapshot["draft_step_ms"] == pytest.approx(41, rel=0.02)
    assert snapshot["origins"] == {
        "main_line": pytest.approx(0.64, abs=0.08),
        "side_branch": pytest.approx(0.27, abs=0.08),
        "miss": pytest.approx(0.09, abs=0.05),
    }
    assert snapshot["acceptance_by_position"][0] == pytest.approx(0.8, abs=0.06)
    assert sum(snapshot["chosen_lengths"].values()) == 8 * 300
    assert snapshot["speculating"]
    assert snapshot["probes"] == 0
    assert snapshot["expected_rate"] > 1.2 * snapshot["expected_plain_rate"] > 0


def test_snapshot_before_anything_happened():
    snapshot = LengthController(LIMITS).snapshot()
    assert snapshot["step_fixed_ms"] == snapshot["draft_step_ms"] == snapshot["expected_rate"] == 0.0
    assert snapshot["chosen_lengths"] == {}


def test_plans_hold_for_their_rounds_unless_the_requests_change():
    simulation = settled(Deployment(gpu, 0.006, same(3, 0.85)), 100)
    changes = sum(before != after for before, after in pairwise(simulation.history[-41:]))
    assert changes <= 5
