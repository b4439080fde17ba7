"""A drafter whose tokenizer has another added token where the target has one of its own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from outrider.v1 import generation_pb2 as pb
from tests.support.cluster.serving import Deployment, Deployments, K, Models, engine
from tests.support.models.reference import GREEDY, Coupled
from tests.support.models.tiny_models import EOS, VOCAB_SIZE

pytestmark = [pytest.mark.engine, pytest.mark.exhaustive, pytest.mark.timeout(900)]

PROMPTS = [b"Hello world, this is", b"a", b"1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12"]
NUM_TOKENS = 64


def with_added_token(model: Path, token: str) -> Path:
    """The checkpoint, with the added token at the first of the ids that it likes."""
    path = model.parent / f"{model.name}-{token.strip('<>')}"
    shutil.copytree(model, path)
    document = json.loads((path / "tokenizer.json").read_text())
    added = document["added_tokens"]
    alike = {index: f"<{index}>" for index in range(EOS + 1, VOCAB_SIZE)}
    added += [{**added[0], "id": index, "content": text} for index, text in {**alike, VOCAB_SIZE: token}.items()]
    (path / "tokenizer.json").write_text(json.dumps(document))
    return path


@pytest.fixture(scope="module")
def other_added(deployments: Deployments, models: Models) -> Deployment:
    drafter = with_added_token(models.wide_drafter, "<other>")
    deployments.add(
        "other_added",
        {
            "target": engine(with_added_token(models.wide_target, "<think>")),
            "drafter": {"method": "draft_model", **engine(drafter)},
            "speculation": {"num_speculative_tokens": K, "adaptive": False},
        },
    )
    return deployments.use("other_added")


@pytest.mark.parametrize("choice", [GREEDY, Coupled(seed=11), None], ids=["greedy", "coupled", "rejection"])
def test_what_means_another_token_is_never_drafted(other_added: Deployment, choice: Coupled | None) -> None:
    sampling = {"temperature": 1.0} if choice is None else choice.options()
    drafts: list[int] = []
    own: list[int] = []
    for prompt in [list(prompt) for prompt in PROMPTS] + [[*PROMPTS[0], VOCAB_SIZE, *PROMPTS[1]]]:
        answer: list[int] = []
        with other_added.client.stream(prompt, max_tokens=NUM_TOKENS, ignore_eos=True, **sampling) as stream:
            for message in stream:
                answer += message.token_ids
                for token, origin in zip(message.token_ids, message.origins, strict=True):
                    (drafts if origin == pb.TOKEN_ORIGIN_ACCEPTED else own).append(token)
        if choice is not None:
            other_added.reference.check(prompt, answer, label="other added tokens", choice=choice)
    assert drafts
    assert max(drafts) < VOCAB_SIZE
    assert max(own) >= VOCAB_SIZE, "the target likes what it alone has"
    assert other_added.status().link.reconnects == 0
