"""Further paths of a draft tree on rank 0: which are verified, and what is counted."""

import pytest

from outrider.actors.round.length import FixedLengths
from outrider.actors.round.paths import PathBudget
from outrider.cluster.link.messages import Commit, DraftPath, MessageError, Proposals
from tests.unit.round.scripted_link import PROMPT, Engine, arrival, drafting, opened, params

PATHS = (DraftPath((1, 5, 3), 0.6), DraftPath((6, 2, 3), 0.3), DraftPath((1, 2, 7), 0.1))


class Priced(FixedLengths):
    def __init__(self, price):
        super().__init__(4)
        self._price = price

    def token_price(self):
        return self._price


def settled(engine, slots=4):
    """The first step with drafts of request a."""
    opened(engine)
    engine.step({"a": [8]})
    step = engine.begin(drafts={"a": [-1] * 4})
    engine.round.insert_drafts(step, ["a"], [slots])
    return step


@pytest.mark.parametrize(("price", "kept"), [(0.0, 3), (0.05, 2), (0.1, 1), (0.2, 0)])
def test_paths_that_bring_more_than_their_rows_cost_are_verified_the_best_first(price, kept):
    step = settled(Engine(drafting([1, 2, 3], paths=PATHS), num_paths=4, lengths=Priced(price)))
    assert list(step.paths) == [("a", path) for path in PATHS[:kept]]
    assert step.drafts["a"].ids == [1, 2, 3]


def test_rows_go_to_the_requests_for_which_they_bring_most():
    budget = PathBudget()
    few, many = [DraftPath([1], 0.1)], [DraftPath([2], 0.4), DraftPath([3], 0.05)]
    chosen = budget.choose({"few": few, "many": many}, 0.04)
    assert chosen == [("many", many[0]), ("few", few[0])]


def steps_with_paths(budget, path, steps, gained, token_price=0.02, round_price=0.1):
    """How many of so many steps ask for paths, of which each brings so many tokens."""
    count = 0
    for _ in range(steps):
        if budget.wants_paths(token_price, round_price):
            count += 1
            for _, chosen in budget.choose({"a": [path]}, token_price):
                budget.observe(chosen.gain, gained)
    return count


def test_paths_are_asked_for_while_they_bring_more_than_rows_and_drafting_ahead():
    path = DraftPath([1, 2], 0.5)
    assert steps_with_paths(PathBudget(), path, 100, gained=0.5) == 100
    assert steps_with_paths(PathBudget(), path, 100, gained=0.5, token_price=0.12) == 100, "0.14 more than three rows"
    assert steps_with_paths(PathBudget(), path, 100, gained=0.5, round_price=0.6) < 5, "drafting ahead brings more"
    assert steps_with_paths(PathBudget(), path, 100, gained=0.5, token_price=0.2) < 5, "their rows bring more elsewhere"


def test_paths_that_bring_nothing_are_given_up_and_tried_again_when_they_do():
    budget, path = PathBudget(), DraftPath([1, 2], 2.0)
    assert steps_with_paths(budget, path, 500, gained=0, round_price=0.5) < 250
    assert steps_with_paths(budget, path, 4000, gained=0, round_price=0.5) < 400
    assert steps_with_paths(budget, path, 5000, gained=2, round_price=0.5) > 1000


def test_another_load_brings_them_back():
    budget, path = PathBudget(), DraftPath([1, 2], 0.5)
    steps_with_paths(budget, path, 200, gained=0.5, token_price=0.2)
    assert steps_with_paths(budget, path, 1000, gained=0.5) > 500


def test_who_may_have_paths_waits_for_them_and_a_batch_of_chains_knows_nothing_of_trees():
    asked = []

    class Asked(FixedLengths):
        def choose(self, estimates, trees=False):
            asked.append(trees)
            return super().choose(estimates)

    for num_paths, of in ((1, params(temperature=0.0)), (4, params()), (4, params(temperature=0.0))):
        engine = Engine(drafting([1, 2, 3]), num_paths=num_paths, lengths=Asked(4))
        engine.begin(arrival(of=of))
        engine.step({"a": [8]})
    assert asked == [False, False, True]


def test_a_path_has_no_more_drafts_than_the_request_has_slots():
    step = settled(Engine(drafting([1, 2, 3], paths=PATHS), num_paths=4), slots=2)
    found = [(list(path.token_ids), round(path.gain, 6)) for _, path in step.paths]
    assert found == [([1, 5], 0.4), ([6, 2], 0.2)], "the third would be the main line once more"
    assert not settled(Engine(drafting([1, 2, 3], paths=PATHS), num_paths=4), slots=0).paths


def test_a_drafter_that_sends_more_paths_than_asked_for_is_cut_short():
    step = settled(Engine(drafting([1, 2, 3], paths=PATHS), num_paths=3))
    assert len(step.paths) == 2


def test_rows_of_paths_are_verified_for_their_request_and_counted_with_it():
    accepted = []

    class Observed(FixedLengths):
        def observe_round(self, estimate, *counts):
            accepted.append(counts)

    engine = Engine(drafting([1, 2, 3], paths=PATHS), num_paths=4, lengths=Observed(4))
    step = settled(engine)
    step.add_path("a/0", "a", step.paths[0][1])
    step.count({"a": 4, "a/0": 4})
    seen = []
    engine.round._choose = lambda logits, requests, drafts, width, metadata: seen.extend(
        (request.request_id, draft.ids) for request, draft in zip(requests, drafts, strict=True)
    )
    engine.round.choose(step, ["a", "a/0"], None, None)
    assert seen == [("a", [1, 2, 3]), ("a", [1, 5, 3])]
    step.gained = {"a": 2}
    engine.round.commit(step, {"a": [1, 5, 3, 9]})
    assert engine["a"].token_ids == [*PROMPT, 8, 1, 5, 3, 9]
    counts = engine.round.status()
    assert (counts["path_rounds"], counts["path_rows"], counts["path_tokens"]) == (1, 1, 2)
    assert (counts["drafted"], counts["accepted"]) == (3, 3)
    assert accepted == [(3, 1)], "of the main line, for chains to come"


@pytest.mark.parametrize(
    ("of", "why"),
    [
        (params(temperature=0.0), None),
        (params(seed=3), None),
        (params(), "verification"),
        (params(temperature=0.0, structured_outputs=object()), "structured_output"),
    ],
    ids=["greedy", "seeded", "rejection", "structured"],
)
def test_who_cannot_verify_several_paths_has_a_chain_and_is_counted(of, why):
    engine = Engine(drafting([1, 2, 3]), num_paths=4)
    engine.begin(arrival(of=of))
    engine.step({"a": [8]})
    (message,) = engine.said(Commit)
    assert message.num_paths == (1 if why else 4)
    assert engine.round.metrics()["chain"] == ({why: 1} if why else {})


@pytest.mark.parametrize(
    "build",
    [
        lambda: DraftPath([1], float("nan")),
        lambda: DraftPath([1], 1.5),
        lambda: Proposals(1, 4, [], paths=PATHS),
    ],
    ids=["no number", "more than its tokens", "no main line"],
)
def test_a_path_that_no_tree_has_is_refused(build):
    with pytest.raises(MessageError, match=r"Proposals\.paths"):
        build()
