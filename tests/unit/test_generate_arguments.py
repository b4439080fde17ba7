"""Flags of ``outrider generate`` that say how to sample: the options they become."""

from __future__ import annotations

import argparse

import pytest

from outrider.deploy.cli.generate import add_arguments, options_of
from outrider.deploy.client.requests import GenerationOptions, build_request
from outrider.v1 import generation_pb2 as pb


def options(*flags: str) -> GenerationOptions:
    parser = argparse.ArgumentParser(prog="outrider generate")
    add_arguments(parser)
    return options_of(parser.parse_args([*flags, "hello"]))


def test_every_flag_becomes_the_field_of_its_name() -> None:
    flags = (
        "--n 2 --min-p 0.1 --min-tokens 3 --repetition-penalty 1.1 --presence-penalty 0.5 --frequency-penalty -0.5 "
        "--logit-bias 5=-2.5 --logit-bias 6=1 --stop-token-ids 7,8 --allowed-token-ids 9 --bad-words no "
        "--bad-words never --logprobs 0 --prompt-logprobs 2 --regex a+ --verification block"
    )
    assert build_request(pb.GenerateRequest(), "hello", options(*flags.split())) == pb.GenerateRequest(
        text="hello",
        sampling=pb.SamplingParameters(
            n=2, min_p=0.1, min_tokens=3, repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=-0.5,
            logit_bias={5: -2.5, 6: 1.0}, stop_token_ids=[7, 8], allowed_token_ids=[9], bad_words=["no", "never"],
            logprobs=0, prompt_logprobs=2, structured_outputs=pb.StructuredOutputs(regex="a+"),
        ),
        speculation=pb.SpeculationParameters(verification=pb.VERIFICATION_BLOCK),
    )  # fmt: skip


@pytest.mark.parametrize(
    "flags",
    [
        ["--regex", "a", "--json-object"],
        ["--allowed-token-ids", "1,x"],
        ["--logit-bias", "5"],
        ["--logit-bias", "5=much"],
        ["--verification", "greedy"],
    ],
)
def test_what_no_option_can_hold_is_a_wrong_command_line(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        options(*flags)
    assert exit_.value.code == 2
    capsys.readouterr()
