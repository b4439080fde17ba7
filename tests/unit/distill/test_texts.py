"""Checks what is generated in which order, and that texts and other files are on disk whole or not at all."""

import numpy as np
import pytest

from outrider.actors.learning.texts import Text
from outrider.cluster.whole_files import whole_directory
from outrider.deploy.distill.texts import Job, TextStore, held_out, plan


def test_held_out_prompts_depend_on_their_content_alone():
    digests = [f"prompt {index}" for index in range(100)]
    chosen = held_out(digests)
    assert len(chosen) == 5
    assert {digests[index] for index in chosen} == {digests[::-1][index] for index in held_out(digests[::-1])}
    # A prompt that occurs twice is on one side.
    twice = held_out(digests * 2)
    assert {index % 100 for index in twice} == chosen
    assert len(twice) == 10


def test_the_plan_begins_with_what_is_held_out_and_repeats_by_seed():
    jobs = plan(10, {2, 5}, samples=2, batch_size=3, seed=1)
    assert jobs == plan(10, {2, 5}, samples=2, batch_size=3, seed=1)
    assert jobs != plan(10, {2, 5}, samples=2, batch_size=3, seed=2)
    assert [job.number for job in jobs] == list(range(7))
    assert set(jobs[0].prompts) == {2, 5}
    assert [job.held_out for job in jobs] == [True] + [False] * 6
    for sample in (0, 1):
        others = [prompt for job in jobs[1:] if job.sample == sample for prompt in job.prompts]
        assert sorted(others) == [0, 1, 3, 4, 6, 7, 8, 9]


def text(prompt, length, start, sample=0):
    answers = length - start
    return Text(
        prompt,
        sample,
        np.arange(length, dtype=np.int32) + prompt,
        start,
        np.arange(answers * 2, dtype=np.int32).reshape(answers, 2),
        np.full((answers, 2), -0.5, np.float16),
    )


@pytest.mark.parametrize("held_out", [True, False])
def test_texts_come_back_from_disk_and_a_half_written_batch_does_not_count(tmp_path, held_out):
    store, job = TextStore(tmp_path / "texts"), Job(3, 1, (7, 4), held_out)
    (tmp_path / "texts" / "batch-000003.safetensors.unfinished").write_bytes(b"half")
    assert not store.has(job)
    texts = [text(7, 6, 4, 1), text(4, 5, 1, 1)]
    store.save(job, texts)
    assert store.has(job)
    for before, after in zip(texts, store.load(job), strict=True):
        assert (after.prompt, after.sample, after.start) == (before.prompt, 1, before.start)
        assert after.held_out is held_out
        for name in ("ids", "top_ids", "top_log_p"):
            np.testing.assert_array_equal(getattr(after, name), getattr(before, name))


def fill_half(file):
    file.write_text("half")
    file.with_name("never written").read_text()


def test_a_block_that_fails_leaves_what_was_there(tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "old").write_text("old")
    with pytest.raises(FileNotFoundError), whole_directory(tmp_path / "d") as work:
        fill_half(work / "new")
    assert [path.name for path in (tmp_path / "d").iterdir()] == ["old"]
    assert [path.name for path in tmp_path.iterdir()] == ["d"], "on a full disk it would be in the way"
    with whole_directory(tmp_path / "d") as work:
        assert list(work.iterdir()) == []
        (work / "new").write_text("new")
    assert [path.name for path in tmp_path.iterdir()] == ["d"]
    assert [path.name for path in (tmp_path / "d").iterdir()] == ["new"]
