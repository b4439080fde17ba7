"""What ``outrider generate`` prints: text as it comes, or one JSON object."""

from __future__ import annotations

import io
import math
import sys
import time
from collections import defaultdict
from typing import Any

from google.protobuf import json_format
from google.protobuf.message import Message

from deploy.client.request import GenerationOptions
from deploy.client.sync_client import OutriderClient
from outrider.v1 import generation_pb2 as pb


def as_json(response: pb.GenerateResponse) -> dict[str, Any]:
    """The object ``--json`` prints. Every key is always there; stop_reason is null when nothing stopped the answer, a
    log-probability when it is minus infinity, and the first entry of prompt_logprobs always."""
    usage = response.usage
    return {
        "request_id": response.request_id,
        **_answer(response),
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.total_tokens,
        },
        "completions": [
            {**_answer(completion), "logprobs": [_token_logprobs(entry) for entry in completion.logprobs]}
            for completion in response.completions
        ],
        "prompt_logprobs": [_token_logprobs(entry) for entry in response.prompt_logprobs],
    }


def print_stream(client: OutriderClient, prompt: str, options: GenerationOptions) -> None:
    """Text to stdout as it comes, then one line of statistics to stderr. Of several answers each is printed whole when
    it is complete, after a line with its index."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without UTF-8 must not end the answer
    several = (options.get("n") or 1) > 1
    texts: dict[int, list[str]] = defaultdict(list)
    ended: list[pb.GenerateStreamResponse] = []
    started_s = time.monotonic()
    with client.stream(prompt, **options) as rounds:
        for message in rounds:
            if several:
                texts[message.index].append(message.text_delta)
            else:
                print(message.text_delta, end="", flush=True)
            if message.finish_reason:
                ended.append(message)
                if several:
                    print(f"--- answer {message.index} ({_finish_reason(message.finish_reason)})")
                    print("".join(texts.pop(message.index)), flush=True)
    if not several:
        print(flush=True)
    if ended:
        print(_statistics(ended, time.monotonic() - started_s), file=sys.stderr)


def _statistics(ended: list[pb.GenerateStreamResponse], elapsed_s: float) -> str:
    """ended: the last message of each answer."""
    tokens = sum(last.usage.completion_tokens for last in ended)
    counted = [last.metrics.speculative_decoding for last in ended]
    steps = sum(metrics.num_spec_steps for metrics in counted)
    drafted = sum(metrics.num_draft_tokens for metrics in counted)
    accepted = sum(metrics.num_accepted_draft_tokens for metrics in counted)
    return (
        f"[{tokens} tokens in {elapsed_s:.2f} s, {tokens / elapsed_s:.1f} tok/s; "
        f"{steps} drafted rounds: {accepted} of {drafted} drafts accepted, "
        f"mean acceptance length {1 + accepted / steps if steps else 1:.2f}; "
        f"finished: {', '.join(_finish_reason(last.finish_reason) for last in ended)}]"
    )


def _answer(answer: pb.GenerateResponse | pb.Completion) -> dict[str, Any]:
    return {
        "text": answer.text,
        "token_ids": list(answer.token_ids),
        "finish_reason": _finish_reason(answer.finish_reason),
        "stop_reason": answer.stop_reason if answer.HasField("stop_reason") else None,
        "metrics": {
            "speculative_decoding": _every_field(answer.metrics.speculative_decoding),
            "timing": _every_field(answer.metrics.timing),
        },
    }


def _every_field(message: Message) -> dict[str, Any]:
    return json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )


def _token_logprobs(entry: pb.TokenLogprobs) -> dict[str, Any] | None:
    if not entry.rank:
        return None
    return {
        **_token_logprob(entry),
        "rank": entry.rank,
        "top": [_token_logprob(likely) for likely in entry.top],
    }


def _token_logprob(entry: pb.TokenLogprobs | pb.TokenLogprob) -> dict[str, Any]:
    """JSON has no infinities."""
    return {"token_id": entry.token_id, "logprob": entry.logprob if math.isfinite(entry.logprob) else None}


def _finish_reason(value: pb.FinishReason) -> str:
    return pb.FinishReason.Name(value).removeprefix("FINISH_REASON_").lower()
