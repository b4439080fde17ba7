"""Implements ``outrider generate``: one request to a running server, streamed to the terminal or printed as JSON.

Exit status: 0 the answer is complete, 1 the call failed (one line on stderr says why), 2 the command line is wrong,
130 interrupted (the request is then cancelled on the server).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from google.protobuf import json_format

from outrider.deploy.cli import fail
from outrider.deploy.cli.arguments import add_connection_arguments, address, credentials_of
from outrider.deploy.client.requests import GenerationOptions
from outrider.deploy.client.sync_client import DEFAULT_ADDRESS, OutriderClient, OutriderError
from outrider.v1 import generation_pb2 as pb


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def _token_ids(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    return int(token_id), float(bias)


_CONSTRAINTS: dict[str, dict[str, Any]] = {
    "json_schema": {"help": "answer in JSON of this schema"},
    "json_object": {"action": "store_true", "default": None, "help": "answer with a JSON object"},
    "regex": {"help": "answer with a match of this pattern"},
    "grammar": {"help": "answer in this EBNF or Lark grammar"},
    "choice": {"action": "append", "help": "answer with one of those given"},
}
_SAMPLING = [field for field in pb.SamplingParameters.DESCRIPTOR.fields if field.name != "structured_outputs"]
_OPTIONS = (*(field.name for field in _SAMPLING), *_CONSTRAINTS, "num_speculative_tokens", "verification", "adapter")
"""Flags that become the option of the same name."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags. The server alone checks ranges."""
    parser.add_argument("prompt", metavar="PROMPT", help="text to continue; - reads it from standard input")
    parser.add_argument(
        "--address", metavar="HOST:PORT", type=address, default=DEFAULT_ADDRESS, help="gRPC port: %(default)s"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object when the answer is complete")
    parser.add_argument("--chat", action="store_true", help="apply the model's chat template to the prompt")
    parser.add_argument("--adapter", metavar="NAME", help="LoRA adapter to answer with")
    parser.add_argument("--timeout", metavar="SECONDS", type=float, help="give up, and abort the request, after this")
    add_connection_arguments(parser)
    sampling = parser.add_argument_group("sampling, as in generation.proto (what is left out, the server decides)")
    for field in _SAMPLING:
        sampling.add_argument(_flag(field.name), **_how(field))
    one_of = parser.add_argument_group("structured output (one of them)").add_mutually_exclusive_group()
    for name, how in _CONSTRAINTS.items():
        one_of.add_argument(_flag(name), **how)
    speculation = parser.add_argument_group("speculation")
    drafts = speculation.add_mutually_exclusive_group()
    drafts.add_argument("--no-speculation", action="store_true", help="decode without drafts")
    drafts.add_argument("--num-speculative-tokens", metavar="N", type=int, help="draft at most N tokens a round")
    speculation.add_argument("--verification", choices=("rejection", "block", "coupled"), help="of drafts")


def _how(field: Any) -> dict[str, Any]:
    """Returns argparse's options for a sampling parameter, by its type in the protocol."""
    if field.name == "logit_bias":
        return {"type": _bias, "action": "append", "metavar": "ID=BIAS"}
    if field.is_repeated:
        return {"action": "append"} if field.type == field.TYPE_STRING else {"type": _token_ids, "metavar": "ID,ID"}
    if field.type == field.TYPE_BOOL:
        return {"action": argparse.BooleanOptionalAction}
    return {"type": float if field.type in (field.TYPE_FLOAT, field.TYPE_DOUBLE) else int, "metavar": "X"}


def options_of(args: argparse.Namespace) -> GenerationOptions:
    """Returns the options of the given flags."""
    given = {name: value for name in _OPTIONS if (value := getattr(args, name)) is not None}
    if args.logit_bias is not None:
        given["logit_bias"] = dict(args.logit_bias)
    given |= {"apply_chat_template": True} if args.chat else {}
    given |= {"speculation": False} if args.no_speculation else {}
    given |= {"timeout_s": args.timeout} if args.timeout is not None else {}
    return GenerationOptions(**given)  # type: ignore[typeddict-item]


def run(args: argparse.Namespace) -> int:
    """Sends the request and prints the answer. Returns the exit status."""
    options = options_of(args)
    if not args.json and ("logprobs" in options or "prompt_logprobs" in options):
        return fail("--logprobs and --prompt-logprobs are printed with --json only; add it", status=2)
    try:
        prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
        with OutriderClient(args.address.partition("://")[2], credentials=credentials_of(args)) as client:
            if args.json:
                print(json.dumps(as_json(client.generate(prompt, **options))), flush=True)
            else:
                print_text(client, prompt, options)
    except OutriderError as error:
        return fail(str(error))
    except ValueError as error:  # wrong flags, standard input that is no text, or a malformed key
        return fail(str(error), status=2)
    return 0


def as_json(response: pb.GenerateResponse) -> dict[str, Any]:
    """Returns the response by its fields' names (generation.proto), with stop_reason null if there is none."""
    document: dict[str, Any] = json_format.MessageToDict(
        response, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    for answer in (document, *document["completions"]):
        answer["finish_reason"] = answer["finish_reason"].removeprefix("FINISH_REASON_").lower()
        answer.setdefault("stop_reason", None)
    return document


def print_text(client: OutriderClient, prompt: str, options: GenerationOptions) -> None:
    """Streams one response, or prints several when all are complete, then one line of statistics on stderr."""
    started_s = time.monotonic()
    answers: list[Any] = []
    if (options.get("n") or 1) > 1:
        response = client.generate(prompt, **options)
        answers, tokens = list(response.completions), response.usage.completion_tokens
        for index, answer in enumerate(answers):
            print(f"--- answer {index} ({_finish_reason(answer)})\n{answer.text}", flush=True)
    else:
        with client.stream(prompt, **options) as rounds:
            for message in rounds:
                print(message.text_delta, end="", flush=True)
                answers = [message]
        print(flush=True)
        tokens = sum(last.usage.completion_tokens for last in answers)
    elapsed_s = time.monotonic() - started_s
    counted = [answer.metrics.speculative_decoding for answer in answers]
    steps, drafted = sum(each.num_spec_steps for each in counted), sum(each.num_draft_tokens for each in counted)
    accepted = sum(each.num_accepted_draft_tokens for each in counted)
    print(
        f"[{tokens} tokens in {elapsed_s:.2f} s, {tokens / elapsed_s:.1f} tok/s; "
        f"{steps} drafted rounds: {accepted} of {drafted} drafts accepted, "
        f"mean acceptance length {1 + accepted / steps if steps else 1:.2f}; "
        f"finished: {', '.join(map(_finish_reason, answers))}]",
        file=sys.stderr,
    )


def _finish_reason(answer: pb.GenerateStreamResponse | pb.Completion) -> str:
    return pb.FinishReason.Name(answer.finish_reason).removeprefix("FINISH_REASON_").lower()
