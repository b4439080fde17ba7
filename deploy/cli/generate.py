"""``outrider generate PROMPT``: one request to a running server, streamed to the terminal or printed as JSON.

Exit status: 0 the answer is complete, 1 the call failed (one line on stderr says why), 2 the command line is wrong,
130 interrupted (the request is then cancelled on the server).
"""

from __future__ import annotations

import argparse
import io
import json
import math
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from google.protobuf import json_format
from google.protobuf.message import Message

from outrider.deploy.argument_types import address
from outrider.deploy.cli import fail
from outrider.deploy.cli.connection import add_connection_arguments, tls_of
from outrider.deploy.client.requests import GenerationOptions
from outrider.deploy.client.sync_client import DEFAULT_ADDRESS, OutriderClient, OutriderError
from outrider.v1 import generation_pb2 as pb

_OPTIONS = (
    "temperature", "top_p", "top_k", "min_p", "seed", "n", "max_tokens", "min_tokens", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "stop", "stop_token_ids", "allowed_token_ids", "bad_words", "logprobs",
    "prompt_logprobs", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output",
    "json_schema", "regex", "grammar", "choice", "num_speculative_tokens", "verification", "adapter",
)  # fmt: skip
"""Flags that are the option of the same name as they are."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Ranges are the server's to check, so that there is one answer to them."""
    parser.add_argument("prompt", metavar="PROMPT", help="text to continue; - reads it from standard input")
    parser.add_argument("--address", metavar="HOST:PORT", type=address, default=DEFAULT_ADDRESS,
                        help="gRPC address of the server (default: %(default)s)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object when the answer is complete")
    parser.add_argument("--chat", action="store_true", help="apply the model's chat template to the prompt")
    parser.add_argument("--adapter", metavar="NAME", help="LoRA adapter to answer with")
    parser.add_argument("--timeout", metavar="SECONDS", type=float, help="give up, and abort the request, after this")
    add_connection_arguments(parser)
    _add_sampling(parser.add_argument_group("sampling (what is left out, the server decides)"))
    _add_constraints(parser.add_argument_group("structured output (one of them)").add_mutually_exclusive_group())
    speculation = parser.add_argument_group("speculation")
    drafts = speculation.add_mutually_exclusive_group()
    drafts.add_argument("--no-speculation", action="store_true", help="decode without drafts")
    drafts.add_argument("--num-speculative-tokens", metavar="N", type=int, help="draft at most N tokens a round")
    speculation.add_argument(
        "--verification", choices=("rejection", "block", "coupled"), help="how drafts are verified"
    )


def options_of(args: argparse.Namespace) -> GenerationOptions:
    """Of the flags that were given, and no others."""
    given = {name: value for name in _OPTIONS if (value := getattr(args, name)) is not None}
    if args.chat:
        given["apply_chat_template"] = True
    if args.ignore_eos:
        given["ignore_eos"] = True
    if args.json_object:
        given["json_object"] = True
    if args.no_speculation:
        given["speculation"] = False
    if args.logit_bias is not None:
        given["logit_bias"] = dict(args.logit_bias)
    if args.timeout is not None:
        given["timeout_s"] = args.timeout
    return GenerationOptions(**given)  # type: ignore[typeddict-item]


def run(args: argparse.Namespace) -> int:
    """Send the request and print the answer. Returns the exit status."""
    options = options_of(args)
    if not args.json and ("logprobs" in options or "prompt_logprobs" in options):
        return fail("--logprobs and --prompt-logprobs are printed with --json only; add it", status=2)
    try:
        prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
        tls = tls_of(args)
        credentials = tls.credentials() if tls is not None else None
        with OutriderClient(args.address, credentials=credentials) as client, _interrupt_closes(client):
            if args.json:
                print(json.dumps(as_json(client.generate(prompt, **options))), flush=True)
            else:
                print_stream(client, prompt, options)
    except OutriderError as error:
        return fail(str(error))
    except UnicodeDecodeError as error:
        return fail(f"standard input is not text: {error}", status=2)
    except ValueError as error:  # of tls_of, and of a key that cannot be one
        return fail(str(error), status=2)
    return 0


@contextmanager
def _interrupt_closes(client: OutriderClient) -> Iterator[None]:
    """Ctrl-C closes the client, which ends its calls, and raises KeyboardInterrupt here. Raised wherever the main
    thread happens to be, as Python does, it is lost when that is a destructor."""
    interrupted = threading.Event()

    def close(*_: object) -> None:
        if not interrupted.is_set():
            interrupted.set()
            # Not by this thread: it may hold the locks that closing takes.
            threading.Thread(target=client.close, daemon=True).start()

    before = signal.signal(signal.SIGINT, close)
    try:
        yield
    except Exception:
        if not interrupted.is_set():
            raise
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupted.is_set():
        raise KeyboardInterrupt


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


def _add_sampling(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--temperature", metavar="T", type=float, help="0 is greedy")
    group.add_argument("--top-p", metavar="P", type=float, help="sample from the likeliest tokens of total mass P")
    group.add_argument("--top-k", metavar="K", type=int, help="sample from the K likeliest tokens")
    group.add_argument("--min-p", metavar="P", type=float, help="drop tokens less likely than P times the likeliest")
    group.add_argument("--seed", metavar="S", type=int, help="make sampling reproducible")
    group.add_argument("--n", metavar="N", type=int, help="answers to generate, each printed whole when it is complete")
    group.add_argument("--max-tokens", metavar="N", type=int, help="most tokens to generate")
    group.add_argument("--min-tokens", metavar="N", type=int, help="tokens to generate before the answer may end")
    group.add_argument("--repetition-penalty", metavar="X", type=float, help="above 1: repeat less; 1 is off")
    group.add_argument("--presence-penalty", metavar="X", type=float, help="above 0: repeat less; 0 is off")
    group.add_argument("--frequency-penalty", metavar="X", type=float, help="above 0: repeat less; 0 is off")
    group.add_argument("--logit-bias", metavar="ID=BIAS", type=_bias, action="append",
                       help="add BIAS to the logits of token ID; may be repeated")  # fmt: skip
    group.add_argument("--stop", metavar="TEXT", action="append", help="end before this text; may be repeated")
    group.add_argument("--stop-token-ids", metavar="ID,ID", type=_token_ids, help="end at these tokens")
    group.add_argument("--allowed-token-ids", metavar="ID,ID", type=_token_ids, help="generate no other tokens")
    group.add_argument("--bad-words", metavar="WORD", action="append", help="never generate WORD; may be repeated")
    switch = argparse.BooleanOptionalAction
    group.add_argument("--include-stop-str-in-output", action=switch, default=None, help="the text ends with its stop")
    group.add_argument("--skip-special-tokens", action=switch, default=None, help="leave them out of the text")
    group.add_argument("--spaces-between-special-tokens", action=switch, default=None, help="set them apart")
    group.add_argument("--ignore-eos", action="store_true", help="go on after the end-of-sequence token")
    group.add_argument("--logprobs", metavar="N", type=int,
                       help="with --json: log-probabilities of each token and of the N likeliest")  # fmt: skip
    group.add_argument("--prompt-logprobs", metavar="N", type=int, help="the same for the prompt's tokens")


def _add_constraints(group: argparse._MutuallyExclusiveGroup) -> None:
    group.add_argument("--json-schema", metavar="FILE_OR_TEXT", type=_schema,
                       help="answer in JSON of this schema; text starts with {")  # fmt: skip
    group.add_argument("--json-object", action="store_true", help="answer with a JSON object")
    group.add_argument("--regex", metavar="PATTERN", help="answer with a match of PATTERN")
    group.add_argument("--grammar", metavar="FILE_OR_TEXT", type=_grammar,
                       help="answer in this EBNF or Lark grammar; text has a colon")  # fmt: skip
    group.add_argument("--choice", metavar="TEXT", action="append", help="answer with one TEXT of those given")


def _schema(text: str) -> str:
    return text if text.lstrip().startswith("{") else _read(text)


def _grammar(text: str) -> str:
    return text if ":" in text else _read(text)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"cannot read {path!r}: {error}") from None


def _token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token ids such as 5,17") from None


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not ID=BIAS, such as 17=-2.5") from None
