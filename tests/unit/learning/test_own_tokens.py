"""Branches of a drafter's own tokens, judged in one pass, are what each would be on its own."""

import pytest
import torch

from outrider.actors.learning.own_tokens import grown, reach, rooted
from outrider.actors.learning.text import Text
from tests.unit.learning.tiny_learner import VOCAB, drafter


@pytest.fixture(scope="module")
def model():
    return drafter(layers=2).eval()


def a_text(length, start, seed):
    ids = torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed))
    return Text(0, 0, ids, start, torch.empty(0), torch.empty(0))


def test_every_branch_is_judged_as_if_it_were_alone(model):
    texts = [a_text(17, 9, 1), a_text(12, 3, 2)]
    generator = torch.Generator().manual_seed(3)

    def draw(branches, columns):
        return torch.randint(0, VOCAB, columns.shape, generator=generator), torch.ones(columns.shape)

    branches, _ = grown(rooted(texts, 0, generator, num_anchors=5), draw, depth=3)
    with torch.no_grad():
        together = model.model(
            branches.ids, attention_mask=branches.sees, position_ids=branches.positions, use_cache=False
        ).last_hidden_state
        for row, text in enumerate(texts):
            for branch, anchor in enumerate(branches.anchors[row].tolist()):
                assert text.start - 1 <= anchor < len(text.ids) - 1
                columns = [int(branches.columns(depth)[row, branch]) for depth in range(4)]
                alone_ids = torch.cat([text.ids[: anchor + 1], branches.ids[row, columns[1:]]])
                alone = model.model(alone_ids[None], use_cache=False).last_hidden_state[0]
                torch.testing.assert_close(together[row, columns], alone[anchor : anchor + 4], atol=1e-5, rtol=1e-4)


def test_a_context_counts_as_often_as_a_round_gets_there():
    p, q = torch.tensor([[[0.2, 0.9, 0.1]]]), torch.tensor([[[0.4, 0.3, 0.2]]])
    torch.testing.assert_close(reach(p, q), torch.tensor([[[0.5, 0.5, 0.25]]]))
