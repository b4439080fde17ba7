"""vLLM's generate under a span of ours, whose rounds and whose vLLM span are its children."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from actors.observability.request_trace import target_span
from actors.observability.tracing import process_tracer
from actors.round_settings import EXTRA_ARGS_KEY


def traced_generate(
    llm: Any, prompt: Any, params: Any, request_id: str, trace_headers: Mapping[str, str] | None = None, **options: Any
) -> AsyncGenerator[Any, None]:
    """``llm.generate``, traced where tracing is on. trace_headers: W3C, of whoever asks. options: more for vLLM."""
    if process_tracer("target") is None:
        outputs: AsyncGenerator[Any, None] = llm.generate(prompt, params, request_id, **options)
        return outputs
    return _traced(llm, prompt, params, request_id, trace_headers or {}, options)


async def _traced(
    llm: Any, prompt: Any, params: Any, request_id: str, trace_headers: Mapping[str, str], options: dict[str, Any]
) -> AsyncGenerator[Any, None]:
    with target_span(request_id, trace_headers) as span:
        if span.is_recorded:
            extra = dict(params.extra_args or {})
            extra[EXTRA_ARGS_KEY] = {**extra.get(EXTRA_ARGS_KEY, {}), "trace_headers": span.headers}
            params.extra_args = extra
        # Also when it is not sampled: vLLM would begin a trace of its own otherwise.
        stream = llm.generate(prompt, params, request_id, trace_headers=span.headers, **options)
        num_tokens = 0
        async with aclosing(stream):
            async for output in stream:
                num_tokens += sum(len(completion.token_ids) for completion in output.outputs)
                if output.finished:
                    span.set(
                        prompt_tokens=len(output.prompt_token_ids or ()),
                        completion_tokens=num_tokens,
                        cached_tokens=output.num_cached_tokens,
                        finish_reason=output.outputs[0].finish_reason if output.outputs else None,
                    )
                yield output
