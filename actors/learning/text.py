"""What is trained on: a text of the target's, with its likeliest tokens at each position."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence

TOP = 32
"""The target's likeliest tokens that are kept; the rest is one number, which they give."""


HELD_OUT = "held_out"
"""Of a file's metadata: whether its texts are."""


@dataclass(frozen=True)
class Text:
    """A prompt's tokens and its answer's."""

    prompt: int
    """Which of the prompts."""

    sample: int
    """0: greedy."""

    ids: torch.Tensor
    """int64 [N]."""

    start: int
    """The first token of the answer. Position start - 1 predicts it."""

    top_ids: torch.Tensor
    """int64 [N - start, TOP], of positions start - 1 to N - 2."""

    top_log_p: torch.Tensor
    """float32, likewise."""

    held_out: bool = False
    """What the drafter was made from does not hold it."""


def read_texts(file: Path, sample: int = 0) -> Iterator[Text]:
    """Of a file as `outrider distill` keeps them. sample: see Text. Raises OSError, SafetensorError and KeyError."""
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        held_out = (opened.metadata() or {}).get(HELD_OUT) == "true"
        kept = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
    lengths, starts = kept["lengths"].tolist(), kept["starts"].tolist()
    ids = kept["ids"].long().split(lengths)
    answers = [length - start for length, start in zip(lengths, starts, strict=True)]
    top_ids, top_log_p = kept["top_ids"].long().split(answers), kept["top_log_p"].float().split(answers)
    parts = zip(kept["prompts"].tolist(), ids, starts, top_ids, top_log_p, strict=True)
    for prompt, text, start, likeliest, log_p in parts:
        yield Text(prompt, sample, text, start, likeliest, log_p, held_out)


def padded(texts: Sequence[Text], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """ids int64 [B, N] with padding behind, and the mask."""
    ids = pad_sequence([text.ids for text in texts], batch_first=True, padding_value=pad)
    lengths = torch.tensor([len(text.ids) for text in texts])
    return ids, (torch.arange(ids.shape[1])[None] < lengths[:, None]).long()


def answer_positions(texts: Sequence[Text]) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and position of everything that predicts a token of an answer, text after text: int64 [P] each."""
    rows = [torch.full((len(text.ids) - text.start,), row) for row, text in enumerate(texts)]
    return torch.cat(rows), torch.cat([torch.arange(text.start - 1, len(text.ids) - 1) for text in texts])
