"""The pass over the vocabulary: all that verification needs of a row, and nothing of the size of a row is kept.

For p: the largest logit and, for each tile of `TILE` tokens, the tile's mass, the sum of exp((logit - largest) / T).
The probability of any token and a draw from p (or from p less a sparse q) need only these and one tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from actors.verification.batch import VerificationBatch
from actors.verification.constraints import thresholds
from actors.verification.coupled import FEW_TOKENS, coupled_choice
from actors.verification.mode import Mode
from actors.verification.tiles import argmax, search_maxima, tile_size

CHOOSES = (Mode.GREEDY, Mode.COUPLED)
CHUNK_ELEMENTS = 1 << 19  # so that a chunk's exponentials stay in cache


@dataclass(frozen=True, eq=False)
class RowScan:
    """row_max: float32 [R], not finite where the row is bad. choice: int64 [R], of GREEDY and COUPLED rows.
    threshold: float32 [R] or None: tokens below have p = 0. tile_mass: float32 [R, ceil(V / tile)] and total: float32
    [R], of REJECTION and BLOCK rows, or None when there are none."""

    row_max: Tensor
    choice: Tensor
    threshold: Tensor | None
    tile_mass: Tensor | None
    total: Tensor | None


def scan(batch: VerificationBatch) -> RowScan:
    logits, constraints = batch.logits, batch.constraints
    rows, vocab_size = logits.shape
    # One pass gives the maxima of rows and, where a mode looks for single tokens, of tiles. NaN wins.
    maxima = search_maxima(logits) if any(group.mode in CHOOSES for group in batch.groups) else None
    row_max = (logits if maxima is None else maxima).amax(-1)
    threshold = thresholds(logits, row_max, constraints) if constraints.any else None
    choices: list[Tensor] = []
    tile_mass: Tensor | None = None
    if any(group.mode not in CHOOSES for group in batch.groups):
        tile = tile_size(vocab_size)
        tile_mass = torch.zeros(rows, -(-vocab_size // tile), device=logits.device)
    for group in batch.groups:
        part = group.rows
        floor = None if threshold is None else threshold[part]
        part_maxima = None if maxima is None else maxima[part]
        if group.mode is Mode.GREEDY:
            choices.append(argmax(logits[part], row_max[part], part_maxima))
        elif group.mode is Mode.COUPLED:
            request = batch.row_request[part]
            choices.append(
                coupled_choice(
                    logits[part],
                    constraints.temperature[part],
                    floor,
                    row_max[part],
                    batch.seed[request],
                    row_position(batch, part),
                    few_tokens=constraints.all_top_k and constraints.max_top_k <= FEW_TOKENS,
                    maxima=part_maxima,
                )
            )
        else:
            assert tile_mass is not None
            _add_mass(tile_mass[part], logits[part], row_max[part], constraints.temperature[part], floor)
            choices.append(batch.row_request.new_zeros(part.stop - part.start))
    choice = choices[0] if len(choices) == 1 else torch.cat([batch.row_request[:0], *choices])
    total = None if tile_mass is None else tile_mass.sum(-1)
    return RowScan(row_max, choice, threshold, tile_mass, total)


def row_position(batch: VerificationBatch, rows: slice) -> Tensor:
    """int64 [rows]: the position of the token that each row predicts."""
    request = batch.row_request[rows]
    row = torch.arange(rows.start, rows.stop, device=request.device)
    return batch.position[request] + row - batch.first_row[request]


def _add_mass(tile_mass: Tensor, logits: Tensor, row_max: Tensor, temperature: Tensor, floor: Tensor | None) -> None:
    """Fills tile_mass [R, tiles] in place."""
    rows, vocab_size = logits.shape
    tile = tile_size(vocab_size)
    whole = vocab_size // tile * tile
    step = max(1, CHUNK_ELEMENTS // vocab_size)
    buffer = torch.empty(min(step, rows), vocab_size, device=logits.device)
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        weight = buffer[: part.stop - start]
        torch.sub(logits[part], row_max[part].unsqueeze(1), out=weight)
        weight.div_(temperature[part].unsqueeze(1)).exp_()
        if floor is not None:
            weight.masked_fill_(logits[part] < floor[part].unsqueeze(1), 0.0)
        torch.sum(weight[:, :whole].unflatten(-1, (-1, tile)), dim=-1, out=tile_mass[part, : whole // tile])
        if whole < vocab_size:
            tile_mass[part, -1] = weight[:, whole:].sum(-1)
