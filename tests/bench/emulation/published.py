"""Holds the acceptance of one-pass draft models (PARD, PARD-2) as published, and the texts that have it.

No source gives acceptance by position, only acceptance lengths: tokens a round commits, the target's own included, with
so many drafts. A text has two numbers, its acceptance at the first position and the decay from each position to the
next. PARD-2's lengths are published for two numbers of drafts, which determine both. PARD's are for one: the decay is
that of PARD-2 on the same data set. `tests/unit/bench` holds the texts against the lengths.

How good the second and third choices of such a model are is not published either: the shares are those that we measured
on HumanEval and on chat with a draft model that drafts one token after another.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.bench.emulation.text_process import TextProcess

SECOND, THIRD = 0.735, 0.176
"""Shares of misses in which the second and the third likeliest token are right, on HumanEval."""

SECOND_IN_CHAT, THIRD_IN_CHAT = 0.5625, 0.2292

_PARD_SPEED = (
    "https://github.com/AMD-AGI/PARD, README, vLLM 0.16.0, Llama-3.3-70B with PARD-Llama-3.2-1B on H20s, greedy, batch "
    "1: {} times plain decoding, at the best K. A round of K = 8 takes 1.063 plain steps (profile 70b-1b)."
)
_PARD_2 = "https://github.com/vllm-project/vllm/pull/49406, table of taichiliu, Llama-3.1-8B, K = 9 and 15"


@dataclass(frozen=True)
class Published:
    lengths: dict[int, float]
    """Acceptance length by number of drafts."""

    acceptance: float
    decay: float
    source: str
    second: float = SECOND
    third: float = THIRD

    def text(self) -> TextProcess:
        return TextProcess(self.acceptance, self.second, self.third, self.decay)


PUBLISHED = {
    # PARD (arXiv 2504.18583) sees token ids only, as a drafter in a process of its own does. The length with
    # Llama-3.1-8B; with 70B the speed-up of 5.38 (README) gives 5.72.
    "pard-humaneval": Published(
        {8: 5.6},
        0.885,
        0.9946,
        "https://github.com/vllm-project/vllm/pull/18541, comment of 19 June 2025, its script's K",
    ),
    "pard-gsm8k": Published({8: 4.80}, 0.8516, 0.9873, _PARD_SPEED.format(4.52)),
    "pard-mt-bench": Published({8: 2.87}, 0.6657, 0.9938, _PARD_SPEED.format(2.70), SECOND_IN_CHAT, THIRD_IN_CHAT),
    # PARD-2 (arXiv 2605.08632) in its target-dependent mode, which vLLM 0.32 does not have, and which feeds hidden
    # states of the target to the drafter: an upper bound for token ids alone.
    "pard2-humaneval": Published({9: 7.12, 15: 8.88}, 0.934, 0.9946, _PARD_2),
    "pard2-gsm8k": Published({9: 6.06, 15: 6.83}, 0.9083, 0.9873, _PARD_2),
    "pard2-mt-bench": Published({9: 4.05, 15: 4.25}, 0.7809, 0.9938, _PARD_2, SECOND_IN_CHAT, THIRD_IN_CHAT),
}
