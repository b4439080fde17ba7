"""The heads of an MLP speculator against a plain implementation of the paper's, and what checkpoints hold."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import gelu

from outrider.actors.drafter.mlp_speculator import MLPSpeculator, SpeculatorShape
from outrider.cluster.config import ConfigError, parse_config
from outrider.cluster.link.messages import DraftSampling
from outrider.cluster.modes import Mode
from outrider.deploy.models.check import check_models
from tests.support.models.tiny_heads import HIDDEN, MLP_WIDTH, NUM_MLP_HEADS, build_mlp_speculator
from tests.support.models.tiny_models import VOCAB_SIZE

GREEDY = DraftSampling()


def hidden_states(count: int) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(3))


def greedy_chain(tensors, hidden, token, count, scale_input):
    """Drafts one request as the paper writes it: the sum of both parts by their weights, normalised, then GELU."""
    state_weight = 0.5 ** (0.5 / NUM_MLP_HEADS)
    token_weight = math.sqrt((1 - state_weight**2) * (MLP_WIDTH / 2))

    def normalised(x):
        return x / torch.sqrt((x**2).mean() + 1e-6)

    state, drafts = normalised(hidden) / 2**0.5 if scale_input else hidden, []
    for i in range(count):
        weight = {name: tensors[f"speculator.{name.replace('#', str(i))}"] for name in ("emb.#.weight", "proj.#.weight",
                  "ln.#.weight", "ln.#.bias", "head.#.weight")}  # fmt: skip
        state = state_weight * (weight["proj.#.weight"] @ state) + token_weight * weight["emb.#.weight"][token]
        state = gelu(normalised(state) * weight["ln.#.weight"] + weight["ln.#.bias"])
        token = int((weight["head.#.weight"] @ state).argmax())
        drafts.append(token)
    return drafts


@pytest.mark.parametrize("scale_input", [False, True])
def test_a_batch_drafts_what_the_paper_s_heads_draft_for_each_request(tmp_path, scale_input):
    path = build_mlp_speculator(tmp_path, scale_input)
    speculator = MLPSpeculator.load(path, torch.float32, "cpu")
    hidden, last, counts = hidden_states(4), [5, 6, 7, 8], [3, 0, 1, 3]
    drafts = speculator.draft(hidden, last, [GREEDY] * 4, [9] * 4, counts)
    tensors = load_file(path / "model.safetensors")
    assert [[each.token for each in one] for one in drafts] == [
        greedy_chain(tensors, *given, scale_input) for given in zip(hidden, last, counts, strict=True)
    ]


def test_requests_of_one_batch_draw_as_each_asks(tmp_path):
    """Draws are those of the request alone; where they are sampled, with the distribution they came from."""
    speculator = MLPSpeculator.load(build_mlp_speculator(tmp_path), torch.float32, "cpu")
    samplings = [
        GREEDY,
        DraftSampling(Mode.COUPLED, 0.8, seed=5, top_n=0),
        DraftSampling(Mode.REJECTION, 0.8, seed=6, top_n=16),
        DraftSampling(biases=((3, 0.0),), only_biased=True),
    ]
    hidden = hidden_states(4)
    together = speculator.draft(hidden, [5, 6, 7, 8], samplings, [20, 30, 40, 50], [3] * 4)
    for row, drawn in enumerate(together):
        place = slice(row, row + 1)
        (alone,) = speculator.draft(hidden[place], [5 + row], samplings[place], [20 + 10 * row], [3])
        assert [each.token for each in alone] == [each.token for each in drawn]
    assert [one[0].q_ids is not None for one in together] == [False, False, True, False]
    assert [each.token for each in together[3]] == [3, 3, 3]


def test_a_draft_that_cannot_be_drawn_is_the_last_of_its_request(tmp_path):
    speculator = MLPSpeculator.load(build_mlp_speculator(tmp_path), torch.float32, "cpu")
    hidden = hidden_states(2)
    hidden[0] = math.nan
    bad, good = speculator.draft(hidden, [5, 6], [GREEDY] * 2, [9, 9], [3, 3])
    assert (len(bad), len(good)) == (0, 3)


def test_tied_weights_are_stored_once_under_any_head_s_name(tmp_path):
    path = build_mlp_speculator(tmp_path / "whole")
    tensors = load_file(path / "model.safetensors")
    parts = ("emb.{}.weight", "ln.{}.weight", "ln.{}.bias", "head.{}.weight")
    for part in parts:
        for head in range(1, NUM_MLP_HEADS):
            tensors[f"speculator.{part.format(head)}"] = tensors[f"speculator.{part.format(0)}"].clone()
    tensors["speculator.proj.2.weight"] = tensors["speculator.proj.1.weight"].clone()
    save_file(tensors, path / "model.safetensors")
    document = json.loads((path / "config.json").read_text())
    tied = tmp_path / "tied"
    tied.mkdir()
    (tied / "config.json").write_text(json.dumps({**document, "tie_weights": True}))
    kept = {"proj.0.weight", "proj.1.weight", *(part.format(2) for part in parts)}
    save_file({name: tensors[f"speculator.{name}"] for name in kept}, tied / "model.safetensors")
    whole, once = (MLPSpeculator.load(each, torch.float32, "cpu") for each in (path, tied))
    given = (hidden_states(1), [5], [GREEDY], [9], [3])
    assert whole.draft(*given) == once.draft(*given)
    assert once.num_bytes < whole.num_bytes


WRONG = {
    "another architecture": ({"architectures": ["MedusaModel"]}, "is a MedusaModel, and method mlp_speculator takes"),
    "no number of heads": ({"n_predict": None}, "config.json of an MLP speculator lacks"),
    "more heads than stored": ({"n_predict": NUM_MLP_HEADS + 1}, "emb.3.weight is missing"),
    "another width": ({"inner_dim": 7}, r"emb.0.weight is \[.*, and must be \[.* 7\]"),
}


@pytest.mark.parametrize(("changes", "error"), WRONG.values(), ids=WRONG)
def test_a_checkpoint_that_does_not_hold_what_its_config_says(tmp_path, changes, error):
    path = build_mlp_speculator(tmp_path)
    document = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**document, **changes}))
    with pytest.raises(ConfigError, match=f"^drafter.model: .*{error}"):
        MLPSpeculator.load(path, torch.float32, "cpu")


@pytest.mark.parametrize(
    ("sizes", "error"),
    [
        ((VOCAB_SIZE + 1, HIDDEN, 3), r"drafter.model: .*\(vocab_size\)"),
        ((VOCAB_SIZE, HIDDEN * 2, 3), r"drafter.model: .*\(emb_dim\)"),
        ((VOCAB_SIZE, HIDDEN, 4), r"speculation.num_speculative_tokens: 4 is above the 3 heads"),
    ],
)
def test_heads_that_do_not_fit_the_target_are_refused(tmp_path, sizes, error):
    document = json.loads((build_mlp_speculator(tmp_path) / "config.json").read_text())
    shape = SpeculatorShape.of(document)
    shape.check(VOCAB_SIZE, HIDDEN, NUM_MLP_HEADS)
    with pytest.raises(ConfigError, match=error):
        shape.check(*sizes)


def test_checkpoints_are_compared_before_anything_starts(tmp_path):
    drafter = {"method": "mlp_speculator", "model": str(build_mlp_speculator(tmp_path / "heads"))}
    cases = ((VOCAB_SIZE, 3, None), (VOCAB_SIZE, 4, "n_predict"), (VOCAB_SIZE + 1, 3, "vocab_size"))
    for vocab_size, k, problem in cases:
        (tmp_path / "config.json").write_text(json.dumps({"vocab_size": vocab_size, "hidden_size": HIDDEN}))
        tree = {"target": {"model": str(tmp_path)}, "drafter": {**drafter, "num_speculative_tokens": k}}
        with nullcontext() if problem is None else pytest.raises(ConfigError, match=problem):
            check_models(parse_config(tree))
