"""Corrects what vLLM's input processor does to sampling parameters, for a replica and for the library alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.input_processor import InputProcessor


class ParameterProcessor(InputProcessor):
    """Bans each bad word in both of its spellings. ``serve_all_parameters`` makes it of vLLM's InputProcessor."""

    def process_inputs(self, *args: Any, **kwargs: Any) -> EngineCoreRequest:
        """Returns the request for the engine, see InputProcessor."""
        request = super().process_inputs(*args, **kwargs)
        params = request.sampling_params
        if params is not None and params.bad_words and self.tokenizer is not None:
            params._bad_words_token_ids = banned_sequences(params.bad_words, self.tokenizer)
        return request


def serve_all_parameters(processor: InputProcessor, vllm_config: VllmConfig) -> None:
    """Lets the processor pass ``min_p``, ``logit_bias`` and ``bad_words`` on as Outrider's sampler applies them.

    vLLM refuses the first two under speculation, since its rejection sampler does not apply them to drafted tokens
    (vllm#42744). Co-located drafting is verified by vLLM's sampler, so the refusal stays there.
    """
    processor.__class__ = ParameterProcessor
    if (speculative := vllm_config.speculative_config) is not None and speculative.method == "custom_class":
        processor.speculative_config = None


def banned_sequences(words: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """Returns the token ids of each word at the start of a text and after a space.

    vLLM leaves the second out where it has another number of tokens than the first (vllm#32557).
    """
    found: list[list[int]] = []
    for word in words:
        for text in (word.lstrip(), f" {word.lstrip()}"):
            ids = list(tokenizer.encode(text, add_special_tokens=False))
            if ids and not any(ids[-len(known) :] == known for known in found):  # its end is banned already
                found.append(ids)
    return found
