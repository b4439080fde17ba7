"""vLLM's structured output, with the grammars in processes of their own (outrider.actors.grammars).

In the replica `checked` looks at a request's constraint, in vLLM's stead: what does so there compiles half of it on the
event loop. In the engine's process `GuardedStructuredOutputs` is vLLM's StructuredOutputManager, whose grammars are
`GuardedGrammar`: what vLLM asks of them is asked of their matchers, with a deadline. What is at fault with a request is
found under `ending_of`, and the scheduler ends the request with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.structured_output import StructuredOutputManager, backend_xgrammar
from vllm.v1.structured_output.backend_types import StructuredOutputOptions
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend, has_xgrammar_unsupported_json_features
from vllm.v1.structured_output.request import get_structured_output_key
from vllm.v1.structured_output.utils import choice_as_grammar, grammar_is_likely_lark, strip_speculative_padding

from outrider.actors.grammars.bounds import FIX, Bounds, Ending, Mode, check_kind, check_size
from outrider.actors.grammars.host import Constraint, GrammarHost
from outrider.actors.grammars.matching import Matcher, Siblings, gather
from outrider.actors.grammars.refusals import REFUSALS, refused
from outrider.actors.grammars.rooms import ConstraintEnded, Room
from outrider.actors.replica_calls import TooManyRefused
from outrider.actors.round.request import carried
from outrider.actors.vllm_seam import leans_on

if TYPE_CHECKING:
    from vllm.v1.outputs import DraftTokenIds
    from vllm.v1.request import Request

logger = init_logger(__name__)

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""Fields of StructuredOutputsParams, one of which is set."""

_ANY_OBJECT = '{"type": "object"}'


def checked(params: StructuredOutputsParams, field: str, mode: Mode) -> None:
    """Holds a constraint against what is served and against sizes. field: where the request has it. Raises RequestError
    naming the field."""
    kind = kind_of(params)
    field = f"{field}.{kind}"
    check_kind(field, kind, mode)
    value = getattr(params, kind)
    check_size(field, kind, value)
    if kind == "json":
        schema = _parsed(field, value)
        if isinstance(schema, dict) and has_xgrammar_unsupported_json_features(schema):
            raise refused(
                "invalid",
                field,
                "uses what the compiler of schemas does not know",
                "leave out multipleOf, uniqueItems and the like",
            )
    elif kind == "structural_tag":
        _parsed(field, value)
    elif kind == "regex" and "\0" in value:
        raise refused("invalid", field, "contains a NUL character", "remove it")
    elif kind == "choice" and not value:
        raise refused("invalid", field, "there is nothing to choose from", "send at least one value")
    elif kind == "grammar" and not value.strip():
        raise refused("invalid", field, "the grammar is empty", "send a grammar in EBNF or Lark")
    elif kind == "json_object" and not value:
        raise refused("invalid", field, "false is no constraint", "send true or leave it out")


def leave_constraints_to_rooms() -> None:
    """For the rest of this process: what vLLM's request models and tool parsers compile to see whether a constraint can
    be, on the event loop and without any bound, is looked at only. `checked` and the rooms find what is wrong with it.
    """
    backend_xgrammar.validate_xgrammar_grammar = _looked_at


def _looked_at(sampling_params: SamplingParams) -> None:
    """In place of vLLM's function of that name. Raises VLLMValidationError for what a tool parser would not join with
    its tools: what xgrammar does not know of schemas, and Lark, which is compiled when it is joined."""
    constraint = sampling_params.structured_outputs
    if constraint is None:
        return
    if constraint.json:
        schema = constraint.json
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError):
                raise VLLMValidationError("Invalid JSON grammar specification.") from None
        if isinstance(schema, dict) and has_xgrammar_unsupported_json_features(schema):
            raise VLLMValidationError("The JSON schema contains features that xgrammar does not support.")
    elif constraint.grammar and grammar_is_likely_lark(constraint.grammar):
        raise VLLMValidationError("A grammar in Lark is not joined with tools.")


def kind_of(params: StructuredOutputsParams) -> str:
    return next(kind for kind in KINDS if getattr(params, kind) is not None)


def _parsed(field: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise refused("invalid", field, f"is not JSON: {error}", "send a JSON document as text") from None


def refusal_of(ending: Ending, field: str) -> Exception:
    """What a request that was ended by its constraint raises. ConnectionError where the constraint is not to blame.
    Counts."""
    if ending.retry_after_s is not None:
        REFUSALS.count(ending.reason)
        return TooManyRefused(field, ending.problem, ending.retry_after_s)
    if ending.is_clients:
        return refused(ending.reason, field, ending.problem, FIX)
    REFUSALS.count(ending.reason)
    return ConnectionError(f"{field} {ending.problem}")


class GuardedGrammar:
    """What vLLM takes for a StructuredOutputGrammar, of one request. Tokens that are accepted go to the matcher with
    its next question: they were chosen under its mask."""

    def __init__(self, matcher: Matcher, seconds: float) -> None:
        self.matcher, self._seconds = matcher, seconds
        self.known: tuple[list[int], int] | None = None
        """Drafts that have been checked already, and how many of them are valid."""

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        self.known = None
        self.matcher.accept(tokens)
        return self.matcher.ending is None

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        if not tokens:
            return []
        known, self.known = self.known, None
        if known is not None and known[0] == tokens:
            return tokens[: known[1]]
        self.matcher.ask_valid(tokens)
        answer = gather([self.matcher], self._seconds).get(self.matcher)
        return [] if answer is None else tokens[: answer["valid"]]


class GuardedStructuredOutputs(StructuredOutputManager):
    """Made of vLLM's own by `guard`. grammar_init is called on the engine's input thread, all else on its main one."""

    def take_over(self) -> None:
        leans_on.STRUCTURED_OUTPUT.check()
        config = self.vllm_config
        serving = config.additional_config["outrider"]["serving"]
        self._requests: dict[str, _OfRequest] = {}
        self._siblings: WeakValueDictionary[str, Siblings] = WeakValueDictionary()
        """Of requests with several answers, by what stands under ``siblings`` with them."""

        self._masks: npt.NDArray[np.int32] | None = None
        self._host: GrammarHost | None = None
        if serving["structured_output"] == "off" or config.model_config.skip_tokenizer_init:
            return
        vocab_size = config.model_config.get_vocab_size()
        self._any_whitespace = not config.structured_outputs_config.disable_any_whitespace
        self._host = GrammarHost(
            self._vocabulary, (vocab_size + 31) // 32, 1 + config.num_speculative_tokens, Bounds.of(serving)
        )
        self._host.warm_up()

    def _vocabulary(self) -> str:
        """As vLLM's backend makes it of the tokenizer, whose kinds it knows."""
        backend = XgrammarBackend(
            self.vllm_config, tokenizer=self.tokenizer, vocab_size=self.vllm_config.model_config.get_vocab_size()
        )
        compiled = backend.compiler.compile_grammar('root ::= ""')
        return str(compiled.tokenizer_info.serialize_json())

    def grammar_init(self, request: Request) -> None:
        structured = request.structured_output_request
        if structured is None:
            return
        grammar: Future[GuardedGrammar] = Future()
        structured.grammar = grammar
        mine = self._requests[request.request_id] = _OfRequest(grammar)
        host = self._host
        if host is None:
            mine.fail(Ending("is not served here", "kind"))
            return
        stop_ids = request.sampling_params.all_stop_token_ids if request.sampling_params is not None else ()
        ours = carried(request.sampling_params) if request.sampling_params is not None else {}
        asker = int(ours.get("asker", 0))
        siblings = self._siblings_of(ours.get("siblings"), host.bounds)
        mine.compiling = host.compile(self._constraint(structured.params), asker, several=siblings is not None)

        def ready(compiling: Future[Room]) -> None:
            if compiling.cancelled():
                return
            error = compiling.exception()
            if isinstance(error, ConstraintEnded):
                logger.warning("request %s: its constraint %s", request.request_id, error.ending.problem)
                mine.fail(error.ending)
                return
            mine.matcher = compiling.result().matcher(stop_ids, asker, siblings)
            if mine.gone:
                mine.matcher.close()
            with suppress(Exception):  # cancelled meanwhile
                grammar.set_result(GuardedGrammar(mine.matcher, host.bounds.step_wait_s))

        mine.compiling.add_done_callback(ready)

    def _siblings_of(self, request: str | None, bounds: Bounds) -> Siblings | None:
        if request is None:
            return None
        siblings = self._siblings.get(request)
        if siblings is None:
            siblings = self._siblings[request] = Siblings(bounds)
        return siblings

    def _constraint(self, params: StructuredOutputsParams) -> Constraint:
        if params.choice is not None:
            return Constraint("ebnf", choice_as_grammar(params.choice))
        kind, spec = get_structured_output_key(params)
        if kind in (StructuredOutputOptions.JSON, StructuredOutputOptions.JSON_OBJECT):
            return Constraint("json", spec or _ANY_OBJECT, self._any_whitespace)
        if kind == StructuredOutputOptions.REGEX:
            return Constraint("regex", spec)
        if kind == StructuredOutputOptions.STRUCTURAL_TAG:
            return Constraint("structural_tag", spec)
        return Constraint("lark" if grammar_is_likely_lark(spec) else "ebnf", spec)

    def grammar_bitmask(
        self,
        requests: dict[str, Request],
        structured_output_request_ids: list[str],
        scheduled_spec_decode_tokens: dict[str, list[int]],
    ) -> npt.NDArray[np.int32] | None:
        """All requests' matchers work at the same time. One that has ended allows everything: its request is on its way
        out, and what it chooses in this step is shown to nobody."""
        host = self._host
        if not structured_output_request_ids or host is None:
            return None
        if self._masks is None:
            most = self.vllm_config.scheduler_config.max_num_seqs * host.most_rows
            self._masks = np.empty((most, host.words), dtype=np.int32)
        places: list[tuple[Matcher, int, int]] = []
        row = 0
        for request_id in structured_output_request_ids:
            request = requests[request_id]
            scheduled = scheduled_spec_decode_tokens.get(request_id, [])
            tokens = strip_speculative_padding(scheduled)
            grammar_start, constraint_start = self._get_constraint_bounds(request, tokens)
            assert request.structured_output_request is not None
            grammar = request.structured_output_request.grammar
            assert isinstance(grammar, GuardedGrammar)
            grammar.matcher.ask_masks(tokens, grammar_start, constraint_start)
            places.append((grammar.matcher, row, 1 + len(tokens)))
            self._masks[row : row + 1 + len(scheduled)] = -1
            row += 1 + len(scheduled)
        answers = gather([matcher for matcher, _, _ in places], host.bounds.step_wait_s)
        for matcher, start, rows in places:
            if matcher in answers:
                self._masks[start : start + rows] = matcher.masks(rows)
        return self._masks[:row]

    def validate_ahead(self, requests: Mapping[str, Request], drafts: DraftTokenIds) -> None:
        """Have all requests' drafts checked at the same time, before the scheduler asks for them one by one."""
        host = self._host
        asked: list[tuple[GuardedGrammar, list[int]]] = []
        for request_id, drafted in zip(drafts.req_ids, drafts.draft_token_ids, strict=True):
            request = requests.get(request_id)
            structured = None if request is None else request.structured_output_request
            if request is None or structured is None or request.is_prefill_chunk:
                continue
            tokens = strip_speculative_padding(drafted)
            tokens = tokens[self._get_constraint_bounds(request, tokens)[0] :]
            if tokens and isinstance(structured.grammar, GuardedGrammar):
                structured.grammar.matcher.ask_valid(tokens)
                asked.append((structured.grammar, tokens))
        if host is None or not asked:
            return
        answers = gather([grammar.matcher for grammar, _ in asked], host.bounds.step_wait_s)
        for grammar, tokens in asked:
            grammar.known = tokens, answers[grammar.matcher]["valid"] if grammar.matcher in answers else 0

    def ended(self) -> list[str]:
        """Requests whose matchers have ended before them."""
        return [
            request_id
            for request_id, mine in list(self._requests.items())  # the input thread puts new ones in
            if mine.ending is None and mine.matcher is not None and mine.matcher.ending is not None
        ]

    def ending_of(self, request_id: str) -> Ending | None:
        mine = self._requests.get(request_id)
        if mine is None:
            return None
        if mine.ending is None and mine.matcher is not None and mine.matcher.ending is not None:
            mine.ending = mine.matcher.ending
            logger.warning("request %s: its constraint %s", request_id, mine.ending.problem)
        return mine.ending

    def note_added(self, request_id: str) -> None:
        """The scheduler has it: from now on it may be forgotten."""
        if (mine := self._requests.get(request_id)) is not None:
            mine.added = True

    def forget_finished(self, requests: Mapping[str, Any]) -> None:
        """requests: all that the scheduler still has."""
        for request_id in [one for one, mine in list(self._requests.items()) if mine.added and one not in requests]:
            self._requests.pop(request_id).leave()

    def clear_backend(self) -> None:
        super().clear_backend()
        for mine in self._requests.values():
            mine.leave()
        self._requests.clear()
        if self._host is not None:
            self._host.close()


class _OfRequest:
    def __init__(self, grammar: Future[GuardedGrammar]) -> None:
        self._grammar = grammar
        self.compiling: Future[Room] | None = None
        self.matcher: Matcher | None = None
        self.ending: Ending | None = None
        self.added = self.gone = False

    def fail(self, ending: Ending) -> None:
        self.ending = ending
        with suppress(Exception):  # cancelled meanwhile
            self._grammar.set_exception(ConstraintEnded(ending))

    def leave(self) -> None:
        self.gone = True
        if self.compiling is not None:
            self.compiling.cancel()
        if self.matcher is not None:
            self.matcher.close()


def guard(manager: StructuredOutputManager) -> GuardedStructuredOutputs:
    """manager, which the engine's core has made, becomes ours."""
    manager.__class__ = GuardedStructuredOutputs
    assert isinstance(manager, GuardedStructuredOutputs)
    manager.take_over()
    return manager
