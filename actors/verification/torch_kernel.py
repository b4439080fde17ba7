"""Verifies drafts in torch; it is the reference for the Triton kernel.

Verification has two steps. `scan` reads the logits once and keeps nothing of the size of a row: the largest logit and,
for each tile of `TILE` tokens, the tile's mass, the sum of exp((logit - largest) / T). The probability of any token and
a draw from p (or from p less a sparse q) need only these and one tile. The second step works on [B, K] and [D, n].

The last token of a rejection round is drawn from norm(max(0, s p - q)), or from p where nothing is subtracted, by
inverting the distribution function with one uniform: first over tiles, then inside one tile. Sums are float64 there, so
that a tail of tiny probabilities keeps its share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.actors.verification.batch import (
    Status,
    VerificationBatch,
    VerificationResult,
    leading,
    valid_ids,
    valid_q,
)
from outrider.actors.verification.constraints import thresholds
from outrider.actors.verification.coupled import FEW_TOKENS, coupled_ranking
from outrider.actors.verification.noise import Role, to_uniform, to_uniform64, words
from outrider.actors.verification.search import CHUNK_ELEMENTS, argmax, search_maxima, tile_size
from outrider.cluster.modes import Mode

EXACT_MATCH_MODES = (Mode.GREEDY, Mode.COUPLED)
"""Modes that accept a draft where it is the token that the target chooses."""


def verify(batch: VerificationBatch) -> VerificationResult:
    """Verifies one step, as `dispatch.Verification` says."""
    scanned = scan(batch)
    K, layout = batch.max_drafts, Layout(batch)
    draft_ids = layout.of_drafts(batch.draft_ids)
    good_row = layout.of_rows(scanned.row_max.abs() < math.inf)
    choice = layout.of_rows(scanned.choice)
    sampled = None
    valid = valid_ids(draft_ids, batch.vocab_size) & layout.inside
    if scanned.tile_mass is not None:
        sampled = (batch.mode == Mode.REJECTION) | (batch.mode == Mode.BLOCK)
        if batch.q_ids is not None and batch.q_probs is not None:
            proper = valid_q(batch.draft_ids, batch.q_ids, batch.q_probs, batch.vocab_size)
            valid &= layout.of_drafts(proper) | ~sampled.unsqueeze(1)
    bad_proposal = leading(valid) < batch.num_drafts
    # A bad row ends the drafts too. Whether it is bad depends only on the tokens before it, so nothing is biased.
    usable = valid & good_row[:, :K]

    # Greedy; coupled (Daliri et al. 2024): accept while the draft is the target's own choice.
    length = leading((choice[:, :K] == draft_ids) & usable).unsqueeze(1)
    last = choice.gather(1, length)
    if sampled is not None:
        rejection_len, rejection_last = _rejection(batch, scanned, layout, leading(usable))
        sampled = sampled.unsqueeze(1)
        length = torch.where(sampled, rejection_len.unsqueeze(1), length)
        last = torch.where(sampled, rejection_last.unsqueeze(1), last)

    bad_logits = ~good_row.gather(1, length)
    tokens = torch.cat([draft_ids, last], dim=1).scatter_(1, length, last)
    absent = (layout.column > length) | bad_logits
    bad_logits = bad_logits.squeeze(1)
    return VerificationResult(
        token_ids=tokens.masked_fill_(absent, -1).to(torch.int32),
        status=bad_proposal * int(Status.BAD_PROPOSAL) + bad_logits * int(Status.BAD_LOGITS),
    )


class Layout:
    """Gathers values of rows and drafts by request.

    column: int64 [K + 1], 0, 1 and so on. row: int64 [B, K + 1] and draft: int64 [B, K], the indices; one that does not
    exist is clamped, and its value never used. inside: bool [B, K], whether the request has such a draft.
    """

    def __init__(self, batch: VerificationBatch) -> None:
        self.column = torch.arange(batch.max_drafts + 1, device=batch.logits.device)
        self.row = (batch.first_row.unsqueeze(1) + self.column).clamp_max(len(batch.logits) - 1)
        self.draft = (batch.first_draft.unsqueeze(1) + self.column[:-1]).clamp_max(len(batch.draft_ids) - 1)
        self.inside = self.column[:-1] < batch.num_drafts.unsqueeze(1)

    def of_rows(self, values: Tensor) -> Tensor:
        """Returns [B, K + 1, ...] from [R, ...]."""
        return values[self.row]

    def of_drafts(self, values: Tensor) -> Tensor:
        """Returns [B, K, ...] from [D, ...]."""
        return values[self.draft]


def _rejection(batch: VerificationBatch, scanned: RowScan, layout: Layout, usable: Tensor) -> tuple[Tensor, Tensor]:
    """Returns accepted length [B] and last token [B] by standard or block rejection.

    It treats every request as if it were in one of these modes; the caller ignores the others. usable: int64 [B], the
    number of drafts that can be considered.
    """
    assert scanned.tile_mass is not None
    assert scanned.total is not None
    V, logits, temperature = batch.vocab_size, batch.logits, batch.constraints.temperature
    requests, K = layout.inside.shape
    considered = layout.column[:K] < usable.unsqueeze(1)
    draft_ids = layout.of_drafts(batch.draft_ids).unsqueeze(2)
    if batch.q_ids is None or batch.q_probs is None:
        q_ids, q = draft_ids, considered.unsqueeze(2).to(torch.float32)
    else:
        q_ids, q = layout.of_drafts(batch.q_ids), layout.of_drafts(batch.q_probs)
        q = torch.where(considered.unsqueeze(2), q, 0.0)
    n = q_ids.shape[2]
    q_ids = q_ids.clamp(0, V - 1)  # a bad q is never considered

    def of_draft_rows(values: Tensor) -> Tensor:
        return layout.of_rows(values)[:, :K].unsqueeze(2)

    value = logits[layout.row[:, :K].unsqueeze(2), q_ids]
    p = ((value - of_draft_rows(scanned.row_max)) / of_draft_rows(temperature)).exp()
    if scanned.threshold is not None:
        p = torch.where(value >= of_draft_rows(scanned.threshold), p, 0.0)
    p = p / of_draft_rows(scanned.total)
    own = (q_ids == draft_ids) & (q > 0)
    p_draft = torch.where(own, p, 0.0).sum(-1)
    q_draft = torch.where(own, q, 0.0).sum(-1)

    u, u_last = _noise(batch)
    # Leviathan et al. 2023: accept with probability min(1, p / q) until the first rejection.
    accepted_len = leading((u * q_draft < p_draft) & considered)
    scale = torch.ones(requests, device=logits.device)
    block = batch.mode == Mode.BLOCK
    if any(group.mode is Mode.BLOCK for group in batch.groups):
        block_len, block_scale = _block(p, q, p_draft, q_draft, u, usable)
        accepted_len = torch.where(block, block_len, accepted_len)
        scale = torch.where(block, block_scale, scale)

    last_row = batch.first_row + accepted_len
    at = accepted_len.clamp_max(max(K - 1, 0)).view(-1, 1, 1).expand(-1, 1, n)
    subtract = accepted_len < usable  # the bonus token after the last usable draft is drawn from p alone
    last = sample_residual(
        logits,
        last_row,
        scanned.row_max[last_row],
        temperature[last_row],
        None if scanned.threshold is None else scanned.threshold[last_row],
        scanned.tile_mass[last_row],
        torch.where(subtract, scale, 1.0),
        q_ids.gather(1, at).squeeze(1) if K else q_ids.new_zeros(requests, n),
        torch.where(subtract, scanned.total[last_row], 0.0).unsqueeze(1) * q.gather(1, at).squeeze(1)
        if K
        else q.new_zeros(requests, n),
        u_last.gather(1, accepted_len.unsqueeze(1)).squeeze(1),
    )
    return accepted_len, last


def _noise(batch: VerificationBatch) -> tuple[Tensor, Tensor]:
    """Returns accept noise, float32 [B, K], and residual noise, float64 [B, K + 1], of every position of the round.

    It makes one Philox call, since on a CPU a small call costs its hundred operations and little else.
    """
    K, device = batch.max_drafts, batch.seed.device
    place = torch.cat([torch.arange(K, device=device), torch.arange(K + 1, device=device)])
    role = torch.full((2 * K + 1,), int(Role.RESIDUAL), device=device)
    role[:K] = int(Role.ACCEPT)
    start = batch.position.unsqueeze(1)
    first, second, _, _ = words(batch.seed.unsqueeze(1), role, start + place, 0, start)
    return to_uniform(first[:, :K]), to_uniform64(first[:, K:], second[:, K:])


def _block(p: Tensor, q: Tensor, p_draft: Tensor, q_draft: Tensor, u: Tensor, usable: Tensor) -> tuple[Tensor, Tensor]:
    """Accepts drafts by block verification, Sun et al. 2024, algorithm 2 (their M_b is p, M_s is q).

    Args:
        p, q: float32 [B, K, n] on q's support; q is 0 where not considered.
        p_draft, q_draft, u: float32 [B, K].

    Returns:
        the accepted length tau [B] and the scale p_tau [B]: the residual is norm(max(0, p_tau p - q)).
    """
    requests, K = u.shape
    reach = torch.ones(requests, device=u.device)  # the paper's p_i = min(1, p_{i-1} p(x_i) / q(x_i)), p_0 = 1
    tau = torch.zeros(requests, dtype=torch.int64, device=u.device)
    scale, least = reach, torch.finfo(torch.float32).tiny
    for i in range(1, K + 1):
        reach = torch.minimum(reach * p_draft[:, i - 1] / q_draft[:, i - 1].clamp_min(least), torch.ones_like(reach))
        if i < K:
            # This sums max(0, p_i p - q) over the vocabulary from q's support alone, since p sums to 1.
            overlap = torch.minimum(reach.unsqueeze(1) * p[:, i], q[:, i]).sum(-1)
            surplus = (reach - overlap).clamp_min(0)
            bottom = surplus + 1 - reach
            # 0 / 0 means p = q with p_i = 1, where the next draft is accepted with certainty.
            h = torch.where(bottom > 0, surplus / bottom, 1.0)
            h = torch.where(usable == i, reach, h)
        else:
            h = reach
        accept = (u[:, i - 1] < h) & (i <= usable)
        tau = torch.where(accept, i, tau)
        scale = torch.where(accept, reach, scale)
    return tau, scale


@dataclass(frozen=True, eq=False)
class RowScan:
    """Holds what verification needs of each row of logits.

    row_max: float32 [R], not finite where the row is bad. choice: int64 [R], of GREEDY and COUPLED rows.
    threshold: float32 [R] or None; tokens below have p = 0. tile_mass: float32 [R, ceil(V / tile)] and total: float32
    [R], of REJECTION and BLOCK rows, or None when there are none.
    """

    row_max: Tensor
    choice: Tensor
    threshold: Tensor | None
    tile_mass: Tensor | None
    total: Tensor | None


def scan(batch: VerificationBatch) -> RowScan:
    """Reads the logits once."""
    logits, constraints = batch.logits, batch.constraints
    rows, vocab_size = logits.shape
    # One pass gives the maxima of tiles, where a mode looks for single tokens, and of rows. NaN wins.
    maxima = search_maxima(logits) if any(group.mode in EXACT_MATCH_MODES for group in batch.groups) else None
    row_max = (logits if maxima is None else maxima).amax(-1)
    threshold = thresholds(logits, row_max, constraints) if constraints.any else None
    choices: list[Tensor] = []
    tile_mass: Tensor | None = None
    if any(group.mode not in EXACT_MATCH_MODES for group in batch.groups):
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
            ranking, _ = coupled_ranking(
                logits[part],
                constraints.temperature[part],
                floor,
                row_max[part],
                batch.seed[request],
                row_position(batch, part),
                few_tokens=constraints.all_top_k and constraints.max_top_k <= FEW_TOKENS,
                maxima=part_maxima,
            )
            choices.append(ranking.squeeze(1))
        else:
            assert tile_mass is not None
            _add_mass(tile_mass[part], logits[part], row_max[part], constraints.temperature[part], floor)
            choices.append(batch.row_request.new_zeros(part.stop - part.start))
    choice = choices[0] if len(choices) == 1 else torch.cat([batch.row_request[:0], *choices])
    total = None if tile_mass is None else tile_mass.sum(-1)
    return RowScan(row_max, choice, threshold, tile_mass, total)


def row_position(batch: VerificationBatch, rows: slice) -> Tensor:
    """Returns the position of the token that each row predicts, int64 [rows]."""
    request = batch.row_request[rows]
    row = torch.arange(rows.start, rows.stop, device=request.device)
    return batch.position[request] + row - batch.first_row[request]


def _add_mass(tile_mass: Tensor, logits: Tensor, row_max: Tensor, temperature: Tensor, floor: Tensor | None) -> None:
    """Fills tile_mass, [R, tiles], in place."""
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


def sample_residual(
    logits: Tensor,
    row: Tensor,
    row_max: Tensor,
    temperature: Tensor,
    threshold: Tensor | None,
    tile_mass: Tensor,
    scale: Tensor,
    q_ids: Tensor,
    q_weights: Tensor,
    u: Tensor,
) -> Tensor:
    """Draws one token of each request from norm(max(0, scale p - q)), int64 [B].

    If rounding leaves no residual at all (then p = q, and a rejection has probability 0), the draw is from p.

    Args:
        logits: float32 [R, V].
        row: int64 [B], the row to draw from. All following arguments are those of that row.
        row_max, temperature, threshold, scale: float32 [B].
        tile_mass: float32 [B, tiles], in units of exp((logit - row_max) / T).
        q_ids: int64 [B, n].
        q_weights: float32 [B, n], q in the unit of tile_mass, 0 where nothing is subtracted.
        u: float64 [B] in (0, 1).
    """
    vocab_size = logits.shape[1]
    tile = tile_size(vocab_size)

    def weight(ids: Tensor) -> Tensor:
        values = logits[row.unsqueeze(1), ids]
        e = ((values - row_max.unsqueeze(1)) / temperature.unsqueeze(1)).exp()
        return e if threshold is None else torch.where(values >= threshold.unsqueeze(1), e, 0.0)

    # q takes min(s p, q) from each token of its support.
    scale = scale.unsqueeze(1)
    taken = torch.minimum(scale * weight(q_ids), q_weights).to(torch.float64)
    mass = tile_mass.to(torch.float64)
    residual = (scale * mass).scatter_add(1, q_ids // tile, -taken).clamp_min(0)
    nothing = residual.sum(-1, keepdim=True) <= 0
    chosen = _invert(torch.where(nothing, mass, residual), u)
    tile_of, u_inside = chosen

    start = (tile_of * tile).unsqueeze(1)
    ids = start + torch.arange(tile, device=logits.device)
    inside = torch.where(ids < vocab_size, weight(ids.clamp_max(vocab_size - 1)), 0.0).to(torch.float64)
    offset = q_ids - start
    here = (offset >= 0) & (offset < tile)
    left = (scale * inside).scatter_add(1, offset.clamp(0, tile - 1), -torch.where(here, taken, 0.0)).clamp_min(0)
    nothing = nothing | (left.sum(-1, keepdim=True) <= 0)
    place, _ = _invert(torch.where(nothing, inside, left), u_inside)
    return tile_of * tile + place


def _invert(weights: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the index that u [B] falls on, where each has a share of (0, 1) proportional to its weight [B, m].

    Also returns how far into its share u falls, in [0, 1]. An index of weight 0 is chosen only if all are 0.
    """
    cumulative = weights.cumsum(-1)
    target = u * cumulative[:, -1]
    index = (cumulative <= target.unsqueeze(1)).sum(-1, keepdim=True)
    last = weights.shape[1] - 1 - (weights > 0).flip(-1).to(torch.uint8).argmax(-1, keepdim=True)
    index = torch.minimum(index, last)
    share = weights.gather(1, index).squeeze(1)
    before = cumulative.gather(1, index).squeeze(1) - share
    rest = torch.where(share > 0, (target - before) / share, 0.0)
    return index.squeeze(1), rest.clamp(0, 1)
