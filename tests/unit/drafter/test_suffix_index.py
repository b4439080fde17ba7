"""The suffix index and the path chosen from it, against the definitions written without an index."""

import random

import pytest

from outrider.actors.drafter.suffix_index import SEPARATOR, SuffixIndex, SuffixLimits, best_path

DEPTH = 24
LIMITS = SuffixLimits(24, 1.0, 0.1)


def indexed(*texts):
    index = SuffixIndex(DEPTH, 1 << 10)
    for text in texts:
        index.append([SEPARATOR, *text])
    return index


def match_len(text, position, end):
    length = 0
    while length < min(position, len(end), DEPTH) and text[position - 1 - length] == end[-1 - length]:
        length += 1
    return length


def reference_path(text, num_wanted, limits):
    """Every context length, every earlier place, the whole walk; the best sum of products."""
    end, best = text[-limits.max_tree_depth :], (0.0, [])
    lengths = {position: match_len(text, position, end) for position in range(1, len(text))}
    for n in range(limits.max_tree_depth, 0, -1):
        most = min(num_wanted, int(limits.max_spec_factor * n), limits.max_tree_depth - n)
        at = sorted((p for p, length in lengths.items() if length >= n), key=lambda p: (-lengths[p], -p))
        draft, prob, score = [], 1.0, 0.0
        while len(draft) < most and at:
            whole = text + draft
            followers = [whole[p] for p in at]
            token = max(dict.fromkeys(followers), key=followers.count)
            prob *= followers.count(token) / len(followers)
            if prob < limits.min_token_prob:
                break
            draft.append(token)
            score += prob
            at = [p + 1 for p in at if whole[p] == token]
        if score > best[0] + 1e-9:
            best = (score, draft)
    return best


@pytest.mark.parametrize("seed", range(30))
def test_the_path_is_the_one_that_searching_the_text_gives(seed):
    """Short texts, so that no place is left out for being too old."""
    chance = random.Random(seed)
    limits = SuffixLimits(chance.choice([4, 8, 24]), chance.choice([0.5, 1.0, 2.0]), chance.choice([0.0, 0.1, 0.4]))
    text = [chance.randrange(6) for _ in range(chance.randint(1, 20))]
    index = SuffixIndex(limits.max_tree_depth, 1 << 10)
    index.append(text)
    for _ in range(12):
        wanted = chance.randint(1, 8)
        path = best_path(index, text[-limits.max_tree_depth :], wanted, limits, is_the_text=True)
        score, draft = reference_path(text, wanted, limits)
        assert path.score == pytest.approx(score)
        assert path.token_ids == draft or path.score == pytest.approx(score)
        more = [chance.randrange(6) for _ in range(chance.randint(1, 2))]
        text += more
        index.append(more)


def test_texts_do_not_run_into_each_other():
    index = indexed([1, 2, 3, 4], [5, 6, 7, 8])
    assert best_path(index, [1, 2, 3, 4], 4, LIMITS, is_the_text=False).token_ids == []
    assert best_path(index, [3, 4, 5, 6], 4, LIMITS, is_the_text=False).token_ids == [7, 8]
    assert [found.match_len for found in index.occurrences([3, 4, 5, 6])] == [2]
    far = SuffixLimits(24, 4, 0.1)
    assert best_path(index, [1, 2], 8, far, is_the_text=False).token_ids == [3, 4]


def test_what_is_forgotten_is_not_found_again_and_room_is_given_back():
    index = indexed([1, 2, 3, 4, 5])
    end_of_first = index.end
    index.append([SEPARATOR, 6, 7, 8, 9])
    index.append([SEPARATOR, *range(100, 150)])
    index.forget_before(end_of_first)
    assert index.base == 0, "not freed yet"
    assert index.occurrences([1, 2, 3]) == []
    assert best_path(index, [6, 7], 2, LIMITS, is_the_text=False).token_ids == [8, 9]
    for _ in range(200):
        index.append([SEPARATOR, *range(40)])
        index.forget_before(index.end - 100)
    assert len(index.tokens) < 150
    assert best_path(index, [10, 11, 12], 3, LIMITS, is_the_text=False).token_ids == [13, 14, 15]


def test_few_buckets_cost_drafts_never_wrong_matches():
    chance = random.Random(1)
    text = [chance.randrange(500) for _ in range(3000)]
    index = SuffixIndex(DEPTH, 4)
    index.append(text)
    for start in range(0, 2900, 50):
        end = text[start : start + 10]
        for found in index.occurrences(end):
            assert match_len(text, found.position, end) == found.match_len


def test_a_text_of_one_token_over_and_over_costs_no_more_than_another():
    index = indexed([7] * 5000)
    assert best_path(index, [7] * DEPTH, 8, LIMITS, is_the_text=True).token_ids == [7] * 8
    assert len(index.occurrences([7] * DEPTH)) <= 24
