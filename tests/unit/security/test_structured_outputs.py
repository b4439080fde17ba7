"""What vLLM's scheduler and structured output see of grammars that live in processes of their own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.request import StructuredOutputRequest

from outrider.actors.grammars.bounds import Ending
from outrider.actors.round.request import EXTRA_ARGS_KEY
from outrider.actors.vllm_seam import scheduler, structured_outputs
from outrider.actors.vllm_seam.scheduler import GrammarScheduling
from outrider.actors.vllm_seam.structured_outputs import GuardedStructuredOutputs, guard
from outrider.cluster.config import ServingConfig
from tests.security_vocabulary import EOS, serialised, vocabulary
from tests.tiny_models import VOCAB_SIZE, write_tokenizer

HANG_GUARD_S = 400.0
K = 4


def vllm_config(vocab_size: int, **serving: Any) -> Any:
    return SimpleNamespace(
        additional_config={"outrider": {"serving": ServingConfig(**serving).model_dump()}},
        model_config=SimpleNamespace(
            skip_tokenizer_init=False,
            get_vocab_size=lambda: vocab_size,
            is_diffusion=False,
            hf_config=SimpleNamespace(model_type="llama"),
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=3),
        structured_outputs_config=SimpleNamespace(disable_any_whitespace=False),
        num_speculative_tokens=K,
        speculative_config=None,
    )


def manager_of(config: Any) -> Any:
    """As vLLM's engine core has it, without the threads it makes for compiling."""
    manager = StructuredOutputManager.__new__(StructuredOutputManager)
    manager.vllm_config, manager.enable_in_reasoning, manager.reasoner_cls = config, False, None
    return manager


@pytest.fixture(scope="module")
def guarded() -> Iterator[GuardedStructuredOutputs]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GuardedStructuredOutputs, "_vocabulary", lambda self: serialised())
        guarded = guard(manager_of(vllm_config(len(vocabulary()), structured_output_compile_s=0.5)))
    yield guarded
    assert guarded._host is not None
    guarded._host.close()


def request(request_id: str, **constraint: Any) -> Any:
    structured = StructuredOutputRequest(StructuredOutputsParams(**constraint))
    params = SamplingParams(stop_token_ids=[EOS])
    return SimpleNamespace(
        request_id=request_id,
        structured_output_request=structured,
        sampling_params=params,
        use_structured_output=True,
        is_prefill_chunk=False,
    )


def started(guarded: GuardedStructuredOutputs, *requests: Any) -> dict[str, Any]:
    for each in requests:
        guarded.grammar_init(each)
        guarded.note_added(each.request_id)
    give_up = time.monotonic() + HANG_GUARD_S
    while not all(each.structured_output_request.is_grammar_ready for each in requests):
        assert time.monotonic() < give_up
        time.sleep(0.02)
    return {each.request_id: each for each in requests}


def sets(masks: Any) -> list[set[int]]:
    return [set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()) for row in masks]


def test_a_step_gets_the_masks_of_all_its_requests_in_their_order(guarded: GuardedStructuredOutputs) -> None:
    requests = started(
        guarded, request("a", choice=["one", "two"]), request("b", regex="x[0-9]"), request("c", json_object=True)
    )
    o, t, x = ord("o"), ord("t"), ord("x")
    digits = set(range(ord("0"), ord("9") + 1))
    masks = guarded.grammar_bitmask(requests, ["b", "c", "a"], {"b": [x, -1, -1]})
    assert masks is not None
    words = vocabulary()
    starts = {words.index(text) for text in (b"o", b"on", b"one", b"t", b"tw", b"two")}
    everything = set(range(32 * masks.shape[1]))
    assert sets(masks) == [{x}, digits, everything, everything, {ord("{")}, starts]
    assert guarded.validate_tokens(requests["b"], [x, ord("1"), ord("1"), -1]) == [x, ord("1")]
    drafts = SimpleNamespace(req_ids=["b", "a", "gone"], draft_token_ids=[[x, ord("1"), x], [x], [x]])
    guarded.validate_ahead(requests, drafts)  # type: ignore[arg-type]
    assert guarded.validate_tokens(requests["b"], [x, ord("1"), x]) == [x, ord("1")]
    assert guarded.validate_tokens(requests["a"], [x]) == []
    assert guarded.accept_tokens(requests["b"], [x])
    assert guarded.accept_tokens(requests["a"], [t])
    masks = guarded.grammar_bitmask(requests, ["a", "b"], {})
    assert sets(masks) == [{words.index(b"w"), words.index(b"wo")}, digits]
    assert not guarded.ended()
    assert o not in sets(masks)[0]


def test_a_constraint_that_is_refused_ends_its_request_with_the_reason(guarded: GuardedStructuredOutputs) -> None:
    requests = started(guarded, request("bad", grammar="root ::= ("))
    assert isinstance(requests["bad"].structured_output_request.grammar, Exception), "the scheduler ends it"
    ending = guarded.ending_of("bad")
    assert ending is not None
    assert ending.is_clients
    assert "does not compile" in ending.problem


def test_what_is_compiled_and_followed_is_put_down_to_who_asks(
    guarded: GuardedStructuredOutputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    host = guarded._host
    assert host is not None
    compile_ = host.compile
    monkeypatch.setattr(
        host, "compile", lambda constraint, caller, **_: (asked.append(caller), compile_(constraint))[1]
    )
    mine, nobodys = request("mine", regex="m"), request("nobodys", regex="n")
    mine.sampling_params.extra_args = {EXTRA_ARGS_KEY: {"asker": 7}}
    requests = started(guarded, mine, nobodys)
    assert asked == [7, 0]
    assert requests["mine"].structured_output_request.grammar.matcher._caller == 7


def test_one_that_overruns_in_a_step_allows_everything_and_is_told_with_its_reason(
    guarded: GuardedStructuredOutputs,
) -> None:
    requests = started(guarded, request("lost", regex="[a-z]+"), request("well", regex="y"))
    guarded.grammar_bitmask(requests, ["lost"], {})
    lost = requests["lost"].structured_output_request.grammar.matcher
    lost._own.close()  # as the kernel does when it ends the process
    masks = guarded.grammar_bitmask(requests, ["lost", "well"], {})
    assert masks is not None
    assert (masks[0] == -1).all()
    assert sets(masks[1:]) == [{ord("y")}]
    assert guarded.ended() == ["lost"]
    assert not guarded.accept_tokens(requests["lost"], [5]), "nothing of it goes on"
    assert guarded.ending_of("lost") is not None
    assert guarded.ended() == [], "told once"
    assert guarded.ending_of("well") is None


def test_what_has_finished_is_forgotten_and_what_has_not_come_yet_is_not(guarded: GuardedStructuredOutputs) -> None:
    requests = started(guarded, request("x", regex="x"), request("y", regex="y"))
    coming = request("coming", regex="z")
    guarded.grammar_init(coming)
    guarded.grammar_bitmask(requests, ["x"], {})
    guarded.forget_finished({"y": requests["y"]})
    assert {"y", "coming"} <= set(guarded._requests)
    assert "x" not in guarded._requests
    assert requests["x"].structured_output_request.grammar.matcher._closed
    guarded.note_added("coming")
    guarded.forget_finished({})
    assert not guarded._requests


def test_switched_off_no_process_is_started() -> None:
    off = guard(manager_of(vllm_config(100, structured_output="off")))
    assert off._host is None
    each = request("r", regex="a")
    off.grammar_init(each)
    assert isinstance(each.structured_output_request.grammar, Exception)


def test_the_vocabulary_is_what_vllms_backend_makes_of_a_tokenizer(tmp_path: Path) -> None:
    import xgrammar
    from transformers import AutoTokenizer

    write_tokenizer(tmp_path)
    patch = pytest.MonkeyPatch()
    patch.setattr(structured_outputs.GrammarHost, "warm_up", lambda self: None)
    manager = manager_of(vllm_config(VOCAB_SIZE))
    manager.tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    guarded = guard(manager)
    patch.undo()
    made = xgrammar.TokenizerInfo.deserialize_json(guarded._vocabulary())
    assert made.vocab_size == VOCAB_SIZE
    assert made.decoded_vocab[ord("a")] == b"a"
    assert guarded._host is not None
    guarded._host.close()


class Books:
    """A scheduler that keeps books."""

    def __init__(self) -> None:
        self.structured_output_manager = object()
        self.requests: dict[str, Any] = {}
        self.grammar_compile_error_reqs: set[str] = set()
        self.outputs: dict[int, EngineCoreOutputs] = {}

    def add_request(self, request: Any) -> None:
        self.requests[request.request_id] = request

    def schedule(self) -> list[str]:
        return list(self.requests)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, EngineCoreOutputs]:
        return self.outputs


class Scheduler(GrammarScheduling, Books): ...


def test_the_scheduler_ends_what_its_constraint_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten: list[list[str]] = []
    added: list[str] = []
    ending = Ending("is too costly", "step")
    grammars = SimpleNamespace(
        ended=lambda: ["a"],
        ending_of=lambda request_id: ending if request_id == "a" else None,
        note_added=added.append,
        forget_finished=lambda requests: forgotten.append(list(requests)),
    )
    monkeypatch.setattr(scheduler, "guard", lambda manager: grammars)
    books: Any = Scheduler()
    books.add_request(SimpleNamespace(request_id="a"))
    assert added == ["a"]
    assert books.schedule() == ["a"]
    assert forgotten == [["a"]]
    outputs = [
        EngineCoreOutput("a", [3, 4], finish_reason=FinishReason.ERROR),
        EngineCoreOutput("b", [], finish_reason=FinishReason.ERROR),
        EngineCoreOutput("c", [1], finish_reason=FinishReason.STOP, stop_reason="word"),
    ]
    books.outputs = {0: EngineCoreOutputs(outputs=outputs)}
    books.update_from_output(None, None)
    assert books.grammar_compile_error_reqs == {"a"}
    assert [Ending.of(output.stop_reason) for output in outputs] == [ending, None, None]
    assert outputs[0].new_token_ids == [], "what was chosen under no mask is shown to nobody"
    assert (outputs[2].stop_reason, outputs[2].new_token_ids) == ("word", [1])
