"""Holds the target's texts with its likeliest tokens at each position, on which a drafter is trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from outrider.actors.learning.gate import LEAST_TEXTS
from outrider.cluster.link.messages import TAUGHT_TOP

MAX_TEXT_TOKENS = 384
"""Longest text to train on: a part of an answer and what stands before it. A step of 8 texts of 131 tokens takes 0.46 s
of a core (SmolLM2-135M, two layers), and grows with the length."""

TOP = 32
"""The target's likeliest tokens that `outrider distill` keeps; the probability of all others is what remains."""

HELD_OUT = "held_out"  # key in a file's metadata: whether its texts are

LEAST_GENERAL = 2 * LEAST_TEXTS
"""Prompts of general texts: half of them to compare versions on, the rest to train on."""


@dataclass(frozen=True, eq=False)
class Text:
    """Holds the tokens of a prompt, or of its end, and of its answer, or of a part of it."""

    prompt: int  # which of the prompts; of traffic a hash of 63 bits, the same for all answers to one prompt
    sample: int  # 0: greedy
    ids: np.ndarray  # int32 [N]
    start: int  # the first token of the answer; position start - 1 predicts it
    top_ids: np.ndarray  # int32 [N - start, T]: the target's likeliest tokens at positions start - 1 to N - 2
    top_log_p: np.ndarray  # float16, likewise
    held_out: bool = False  # the drafter was not made from it


def read_texts(file: Path, sample: int = 0) -> Iterator[Text]:
    """Reads a file as `outrider distill` keeps them. Raises OSError, SafetensorError and KeyError."""
    from safetensors import safe_open

    with safe_open(file, "np") as opened:
        held_out = (opened.metadata() or {}).get(HELD_OUT) == "true"
        kept = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
    lengths, starts = kept["lengths"], kept["starts"]
    ids = np.split(kept["ids"], lengths.cumsum()[:-1])
    top_ids, top_log_p = (np.split(kept[name], (lengths - starts).cumsum()[:-1]) for name in ("top_ids", "top_log_p"))
    for prompt, text, start, likeliest, log_p in zip(kept["prompts"], ids, starts, top_ids, top_log_p, strict=True):
        yield Text(int(prompt), sample, text, int(start), likeliest, log_p, held_out)


def general_texts(directory: str | None, vocab_size: int) -> list[Text]:
    """Reads ``drafter.learn.general``: the texts that are short enough and whose tokens the drafter has.

    They have as many of the target's likeliest tokens as samples have. They may be greedy or drawn, so acceptance is
    measured as if drawn. Raises OSError, also where there are too few to tell a loss by, and what safetensors raises.
    """
    if directory is None:
        return []
    files = sorted(Path(directory).expanduser().glob("batch-*.safetensors"))
    texts = [
        replace(text, top_ids=text.top_ids[:, :TAUGHT_TOP], top_log_p=text.top_log_p[:, :TAUGHT_TOP])
        for file in files
        for text in read_texts(file, sample=1)
        if len(text.ids) <= MAX_TEXT_TOKENS and int(text.ids.max()) < vocab_size
    ]
    if (prompts := len({text.prompt for text in texts})) < LEAST_GENERAL:
        raise FileNotFoundError(
            f"drafter.learn.general: {directory} has texts to {prompts} prompts that fit in {len(files)} files "
            f"batch-*.safetensors, and {LEAST_GENERAL} are needed; give OUT/texts of `outrider distill` on every node "
            "where the trainer may run, or leave it out"
        )
    return texts
