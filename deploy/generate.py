"""``outrider generate PROMPT``: one request to a running server, streamed to the terminal or printed as JSON.

Exit status: 0 the answer is complete, 1 the call failed (one line on stderr says why), 2 the command line is wrong,
130 interrupted (the request is then cancelled on the server).
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import time
from typing import Any

from deploy.client import DEFAULT_ADDRESS, GenerationOptions, OutriderClient, OutriderError
from outrider.v1 import generation_pb2 as pb


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``outrider generate``. Ranges are the server's to check, so that there is one answer to them."""
    parser.add_argument("prompt", metavar="PROMPT", help="text to continue; - reads it from standard input")
    parser.add_argument("--address", metavar="HOST:PORT", type=_address, default=DEFAULT_ADDRESS,
                        help="gRPC address of the server (default: %(default)s)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object when the answer is complete")
    parser.add_argument("--chat", action="store_true", help="apply the model's chat template to the prompt")
    sampling = parser.add_argument_group("sampling (what is left out, the server decides)")
    sampling.add_argument("--temperature", metavar="T", type=float, help="0 is greedy")
    sampling.add_argument("--top-p", metavar="P", type=float, help="sample from the likeliest tokens of total mass P")
    sampling.add_argument("--top-k", metavar="K", type=int, help="sample from the K likeliest tokens")
    sampling.add_argument("--seed", metavar="S", type=int, help="make sampling reproducible")
    sampling.add_argument("--max-tokens", metavar="N", type=int, help="most tokens to generate")
    sampling.add_argument("--stop", metavar="TEXT", action="append", help="end before this text; may be repeated")
    sampling.add_argument("--ignore-eos", action="store_true", help="go on after the end-of-sequence token")
    speculation = parser.add_argument_group("speculation").add_mutually_exclusive_group()
    speculation.add_argument("--no-speculation", action="store_true", help="decode without drafts")
    speculation.add_argument("--num-speculative-tokens", metavar="N", type=int, help="draft at most N tokens a round")
    parser.add_argument("--timeout", metavar="SECONDS", type=float, help="give up, and abort the request, after this")


def run(args: argparse.Namespace) -> int:
    """Send the request and print the answer. Returns the exit status."""
    try:
        prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
        with OutriderClient(args.address) as client:
            if args.json:
                print(json.dumps(as_json(client.generate(prompt, **_options(args)))), flush=True)
            else:
                _print_stream(client, prompt, _options(args))
    except OutriderError as error:
        return _fail(str(error))
    except UnicodeDecodeError as error:
        return _fail(f"standard input is not text: {error}", status=2)
    except KeyboardInterrupt:
        return _fail("interrupted", status=130)
    except BrokenPipeError:
        # Whoever read our output has had enough. Leave the interpreter nothing to flush into the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


def as_json(response: pb.GenerateResponse) -> dict[str, Any]:
    """The object ``--json`` prints. Every key is always there; stop_reason is null when nothing stopped the answer."""
    usage, speculative = response.usage, response.metrics.speculative_decoding
    return {
        "request_id": response.request_id,
        "text": response.text,
        "token_ids": list(response.token_ids),
        "finish_reason": _finish_reason(response.finish_reason),
        "stop_reason": response.stop_reason if response.HasField("stop_reason") else None,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.total_tokens,
        },
        "metrics": {
            "speculative_decoding": {
                "num_spec_steps": speculative.num_spec_steps,
                "num_draft_tokens": speculative.num_draft_tokens,
                "num_accepted_draft_tokens": speculative.num_accepted_draft_tokens,
                "mean_acceptance_length": speculative.mean_acceptance_length,
                "draft_acceptance_rate": speculative.draft_acceptance_rate,
                "acceptance_histogram": list(speculative.acceptance_histogram),
            }
        },
    }


def _print_stream(client: OutriderClient, prompt: str, options: GenerationOptions) -> None:
    """Text to stdout as it comes, then one line of statistics to stderr."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without UTF-8 must not end the answer
    started_s, last = time.monotonic(), None
    with client.stream(prompt, **options) as rounds:
        for last in rounds:
            print(last.text_delta, end="", flush=True)
    print(flush=True)
    if last is not None:
        print(_statistics(last, time.monotonic() - started_s), file=sys.stderr)


def _statistics(last: pb.GenerateStreamResponse, elapsed_s: float) -> str:
    tokens, speculative = last.usage.completion_tokens, last.metrics.speculative_decoding
    return (
        f"[{tokens} tokens in {elapsed_s:.2f} s, {tokens / elapsed_s:.1f} tok/s; "
        f"{speculative.num_spec_steps} drafted rounds: {speculative.num_accepted_draft_tokens} of "
        f"{speculative.num_draft_tokens} drafts accepted, mean acceptance length "
        f"{speculative.mean_acceptance_length:.2f}; finished: {_finish_reason(last.finish_reason)}]"
    )


def _options(args: argparse.Namespace) -> GenerationOptions:
    return {
        "apply_chat_template": True if args.chat else None,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "seed": args.seed,
        "max_tokens": args.max_tokens,
        "stop": args.stop,
        "ignore_eos": True if args.ignore_eos else None,
        "speculation": False if args.no_speculation else None,
        "num_speculative_tokens": args.num_speculative_tokens,
        "timeout_s": args.timeout,
    }


def _finish_reason(value: pb.FinishReason) -> str:
    return pb.FinishReason.Name(value).removeprefix("FINISH_REASON_").lower()


def _fail(message: str, status: int = 1) -> int:
    print(f"outrider: {' '.join(message.split())}", file=sys.stderr)
    return status


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return text
