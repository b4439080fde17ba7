"""What ``make demo`` prints of its answers."""

from __future__ import annotations

from outrider.deploy.demo import comparison
from outrider.v1 import generation_pb2 as pb


def answer(seconds: float, per_round: float) -> pb.GenerateResponse:
    metrics = pb.GenerationMetrics(
        timing=pb.RequestTiming(decode_time_s=seconds),
        speculative_decoding=pb.SpeculativeDecodingMetrics(mean_acceptance_length=per_round),
    )
    return pb.GenerateResponse(token_ids=range(29), metrics=metrics)


def test_the_comparison_gives_medians_their_ratio_and_the_tokens_of_a_round() -> None:
    drafted = [answer(seconds, 3.0) for seconds in (0.5, 1.0, 2.0)]
    plain = [answer(seconds, 1.0) for seconds in (0.5, 2.0, 4.0)]
    assert [line.split() for line in comparison(drafted, plain).splitlines()] == [
        ["with", "speculation", "28.0", "tokens/s", "3.00", "tokens", "a", "round"],
        ["without", "14.0", "tokens/s", "1.00", "tokens", "a", "round"],
        ["2.00", "times", "as", "fast", "(medians", "of", "3,", "in", "turns)"],
        ["the", "tokens", "are", "the", "same", "each", "time"],
    ]
