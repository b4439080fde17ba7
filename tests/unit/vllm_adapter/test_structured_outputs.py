"""vLLM's manager with both backends: vLLM's own validation, grammars and masks, without an engine."""

from __future__ import annotations

from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from outrider.actors.vllm_adapter.structured_outputs import serve_both
from tests.support.models.tiny_models import EOS
from tests.unit.vllm_adapter.book import ahead_config

BOTH = {
    "xgrammar": ({"regex": "[a-c]+x"}, "abx", "abd"),
    "guidance": ({"json": {"type": "integer", "multipleOf": 7, "minimum": 10}}, "14", "15"),
}
"""By backend: a constraint that vLLM gives to it, a text that follows it and one that does not."""


@pytest.fixture(scope="module")
def vllm_config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return ahead_config(tmp_path_factory.mktemp("models"))


@pytest.fixture
def manager(vllm_config: Any) -> Any:
    manager = StructuredOutputManager(vllm_config)
    serve_both(manager)
    yield manager
    manager.clear_backend()


def asked(vllm_config: Any, name: str, constraint: dict[str, Any]) -> Request:
    """Make it as vLLM's front end and core do."""
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**constraint))
    tokenizer = cached_tokenizer_from_config(vllm_config.model_config)
    params.verify(vllm_config.model_config, None, vllm_config.structured_outputs_config, tokenizer)
    params.update_from_generation_config({}, EOS)
    return Request(name, [1], params, None)


def compiled(request: Request) -> Any:
    request.structured_output_request._grammar.exception()
    return request.structured_output_request.grammar


@pytest.mark.parametrize("order", [list(BOTH), list(BOTH)[::-1]], ids=" first, ".join)
def test_a_batch_of_both_is_masked_by_each_ones_own_backend(vllm_config: Any, manager: Any, order: list[str]) -> None:
    requests = {name: asked(vllm_config, name, BOTH[name][0]) for name in order}
    for name, request in requests.items():
        assert request.sampling_params.structured_outputs._backend == name, "vLLM gives it to another"
        manager.grammar_init(request)
        assert type(compiled(request)).__name__.lower().startswith(name)
    drafts = {name: list(BOTH[name][1].encode()) for name in order}
    rows = iter(manager.grammar_bitmask(requests, order, drafts))
    for name in order:
        _, right, wrong = BOTH[name]
        for token in [*right.encode(), EOS]:
            mask = next(rows)
            assert mask[token // 32] >> (token % 32) & 1, "forbidden"
            assert not mask[1] >> (ord("!") % 32) & 1, "everything is allowed"
        assert manager.validate_tokens(requests[name], list(right.encode())) == list(right.encode())
        assert manager.validate_tokens(requests[name], [*wrong.encode(), EOS]) != [*wrong.encode(), EOS]
        assert manager.accept_tokens(requests[name], [*right.encode(), EOS])


def test_a_schema_that_vllm_gives_to_xgrammar_is_compiled_by_guidance(vllm_config: Any, manager: Any) -> None:
    """xgrammar drops ``required`` here."""
    request = asked(vllm_config, "r", {"json": {"type": "object", "required": ["name"]}})
    assert request.sampling_params.structured_outputs._backend == "xgrammar"
    manager.grammar_init(request)
    assert type(compiled(request)).__name__ == "GuidanceGrammar"
    assert manager.validate_tokens(request, list(b"{}")) == list(b"{")
