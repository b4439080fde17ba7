"""Lets xgrammar and guidance serve requests of one engine, through vLLM's StructuredOutputManager.

vLLM picks a backend for each request, and its manager keeps the one of the first. `TwoBackends` compiles each request's
constraint with the request's own backend, and JSON schemas with guidance wherever it supports the tokenizer: xgrammar
drops keywords in silence (``required`` without ``properties``, most of those beside ``$ref``, ``anyOf`` or ``enum``)
that guidance enforces or refuses.
"""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING

from llguidance import LLMatcher
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_guidance import (
    GuidanceBackend,
    has_guidance_unsupported_json_features,
    serialize_guidance_grammar,
)
from vllm.v1.structured_output.backend_types import StructuredOutputOptions
from vllm.v1.structured_output.backend_xgrammar import has_xgrammar_unsupported_json_features

from outrider.actors.replica_calls import RequestError
from outrider.actors.request_constraints import Mode, check_bounds, check_kind
from outrider.actors.vllm_adapter.error_text import keep_client_text_out_of_logs, shorten

if TYPE_CHECKING:
    from vllm.v1.request import Request
    from vllm.v1.structured_output.backend_types import StructuredOutputBackend

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""Fields of StructuredOutputsParams, one of which is set."""

BACKENDS = ("xgrammar", "guidance")


def check_constraint(params: StructuredOutputsParams, field: str, mode: Mode) -> None:
    """Checks a constraint for what vLLM does not check. Raises RequestError naming the field.

    field: the request's field that holds the constraint.
    """
    kind = next(kind for kind in KINDS if getattr(params, kind) is not None)
    field, value = f"{field}.{kind}", getattr(params, kind)
    check_kind(field, kind, mode)
    check_bounds(field, kind, value)
    if kind != "json":
        return
    schema = json.loads(value) if isinstance(value, str) else value
    if not isinstance(schema, dict):
        raise RequestError(field, "is not a JSON object", 'send a schema such as {"type": "object"}')
    problem = LLMatcher.validate_grammar(
        serialize_guidance_grammar(StructuredOutputOptions.JSON, schema, params.disable_any_whitespace)
    )
    # vLLM would compile it with a third backend, without any time limit.
    if (
        not problem
        and has_xgrammar_unsupported_json_features(schema)
        and has_guidance_unsupported_json_features(schema)
    ):
        problem = "has the keyword patternProperties beside keywords with which it is not enforced here"
    if problem:
        raise RequestError(field, shorten(problem.partition(". ")[0]), "send a schema without it")


class TwoBackends(StructuredOutputManager):
    """Compiles each constraint with its request's own backend. `serve_both` makes it of the engine core's manager."""

    backend: StructuredOutputBackend | None
    managers: dict[str | None, StructuredOutputManager]
    """A copy of vLLM's manager for each backend, which makes the backend at its first request."""

    def grammar_init(self, request: Request) -> None:
        """Compiles a request's constraint with its own backend. vLLM's core ends that request if this raises.

        Raises:
            KeyError: the request names a third backend.
            ValueError: the two backends' masks differ in size, since the tokenizer has more ids than the model.
        """
        structured = request.structured_output_request
        if structured is None:
            return
        if structured.params.json is not None and GuidanceBackend.is_tokenizer_supported(self.tokenizer):
            structured.params._backend = "guidance"
        manager = self.managers[structured.params._backend]
        manager.grammar_init(request)
        assert manager.backend is not None
        if self.backend is None:
            self.backend = manager.backend  # it allocates the masks
        elif self.backend.allocate_token_bitmask(1).shape != manager.backend.allocate_token_bitmask(1).shape:
            raise ValueError("the tokenizer has more ids than the model: one backend alone can be used")


def serve_both(manager: StructuredOutputManager) -> None:
    """Makes the engine core's manager a TwoBackends. Runs in the engine core's process."""
    keep_client_text_out_of_logs()
    managers: dict[str | None, StructuredOutputManager] = {name: copy.copy(manager) for name in BACKENDS}
    manager.__class__ = TwoBackends
    assert isinstance(manager, TwoBackends)
    manager.managers = managers
