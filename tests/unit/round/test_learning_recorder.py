"""What the target thought is told after its tokens, of who may be learned from, and of nobody else."""

import dataclasses

import numpy as np
import pytest
import torch

from outrider.actors.round.learning_recorder import LearningRecorder
from outrider.actors.verification.search import LEAST_LOG_P, target_top_k
from outrider.cluster.link.messages import TAUGHT_TOP, Commit, DraftPath, TrainingSample
from tests.unit.round.scripted_link import PROMPT, Engine, arrival, asked, drafting, opened, params

CHANGED = {
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.1,
    "min_tokens": 3,
    "logit_bias": {5: 1.0},
    "bad_words_token_ids": [[5]],
    "allowed_token_ids": [5, 6],
    "structured_outputs": object(),
}


class Rows:
    """Logits that are the numbers of their rows, and what was asked of them."""

    def __init__(self):
        self.asked = []

    def __call__(self, logits, rows):
        self.asked.append((logits, list(rows)))
        ids = np.array([[100 * logits + row, 1] for row in rows], np.int32)
        return ids, np.full(ids.shape, -1.0, np.float16)


def teaching_engine(answer=None):
    rows = Rows()
    return Engine(answer or drafting([1, 2, 3]), recorder=LearningRecorder(rows)), rows


def step(engine, logits, committed, drafts=None):
    begun = engine.begin(drafts=drafts, num_requests=len(committed))
    engine.round.choose(begun, list(committed), logits, None)
    engine.round.commit(begun, committed)
    return engine.round.take_drafts(begun, list(committed))


def test_each_committed_token_is_told_with_its_own_row_after_its_commit():
    engine, _ = teaching_engine()
    opened(engine, "a")
    opened(engine, "b")
    step(engine, 1, {"a": [8], "b": [9]})
    step(engine, 2, {"a": [1, 2, 9], "b": [5]}, drafts={"a": [1, 2, 3], "b": [1, 2]})
    lessons = engine.said(TrainingSample)
    a, b = engine["a"].handle, engine["b"].handle
    found = [(lesson.request, lesson.position, lesson.ids[:, 0].tolist()) for lesson in lessons]
    start = len(PROMPT)
    assert found == [
        (a, start, [100]),
        (b, start, [101]),
        (a, start + 1, [200, 201, 202]),  # of four rows, the last was for nothing
        (b, start + 1, [204]),
    ]
    told = set()
    for said in engine.link.sent:
        if isinstance(said, Commit):
            told.add((said.request, said.base_committed_len))
        elif isinstance(said, TrainingSample):
            assert (said.request, said.position) in told


def test_tokens_of_a_further_path_are_told_with_the_rows_of_that_path():
    engine, _ = teaching_engine()
    opened(engine, "a")
    opened(engine, "b")
    begun = engine.begin(drafts={"a": [1, 2, 3], "b": [1, 2]}, num_requests=2)
    begun.add_path("a/0", "a", DraftPath((1, 5), 0.5))
    engine.round.choose(begun, ["a", "a/0", "b"], 1, None)
    begun.best_rows = {"a": "a/0"}
    engine.round.commit(begun, {"a": [1, 5, 9], "b": [4]})
    engine.round.take_drafts(begun, ["a", "b"])
    found = [lesson.ids[:, 0].tolist() for lesson in engine.said(TrainingSample)]
    assert found == [[104, 105, 106], [107]]


NOT_LEARNED_FROM = {
    **{name: arrival("a", of=params(temperature=0.0, **{name: value})) for name, value in CHANGED.items()},
    "a tenant": arrival("a", of=params(temperature=0.0, extra_args=asked(tenant=7))),
    "no drafts": arrival("a", of=params(temperature=0.0, extra_args=asked(num_speculative_tokens=0))),
    "an adapter": dataclasses.replace(arrival("a"), adapter="poet"),
    "pictures": dataclasses.replace(arrival("a"), num_pictures=1),
}


@pytest.mark.parametrize("case", NOT_LEARNED_FROM)
def test_no_samples_are_taken_of_requests_that_others_may_not_learn_from(case):
    engine, rows = teaching_engine()
    engine.begin(NOT_LEARNED_FROM[case], arrival("b"), num_requests=2)
    step(engine, 1, {"a": [8], "b": [8]})
    assert [lesson.request for lesson in engine.said(TrainingSample)] == [engine["b"].handle]
    assert rows.asked == [(1, [1])]


def test_who_is_gone_is_not_told_of_and_its_logits_are_not_kept():
    engine, rows = teaching_engine()
    opened(engine, "a")
    begun = engine.begin(num_requests=1)
    engine.round.choose(begun, ["a"], 1, None)
    engine.round.commit(begun, {"a": [8]})
    engine.tell(finished=["a"])
    engine.round.take_drafts(begun, [])
    assert engine.said(TrainingSample) == []
    assert rows.asked == []


def test_lessons_that_fail_end_and_nothing_else_does(caplog):
    def fails(logits, rows):
        raise RuntimeError("out of memory")

    engine = Engine(drafting([1, 2, 3]), recorder=LearningRecorder(fails))
    opened(engine, "a")
    for number in range(3):
        assert step(engine, number, {"a": [8]}) == [[1, 2, 3]]
    assert caplog.text.count("training samples failed") == 1
    assert engine.said(TrainingSample) == []


def test_the_likeliest_tokens_are_those_of_a_softmax():
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(0)) * 3
    ids, log_p = target_top_k(logits, [4, 1])
    assert (ids.dtype, log_p.dtype, ids.shape) == (np.int32, np.float16, (2, TAUGHT_TOP))
    expected = logits[[4, 1]].log_softmax(-1).topk(TAUGHT_TOP)
    assert ids.tolist() == expected.indices.tolist()
    np.testing.assert_allclose(log_p, expected.values, rtol=2e-3)
    TrainingSample(1, 5, ids, log_p)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_no_distribution_is_told_as_none(value):
    logits = torch.full((1, 40), value)
    ids, log_p = target_top_k(logits.bfloat16(), [0])
    assert (log_p == LEAST_LOG_P).all()
    TrainingSample(1, 5, ids, log_p)
