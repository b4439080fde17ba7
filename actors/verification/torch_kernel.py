"""Verification in torch, the reference. No host sync inside but where `gumbel.py` and `constraints.py` say so (CPU).

Two steps: `row_scan.scan` reads the logits once; what follows works on [B, K] and [D, n].
"""

from __future__ import annotations

import torch
from torch import Tensor

from actors.verification.batch import Mode, Status, VerificationBatch, VerificationResult
from actors.verification.philox import Role, to_uniform, to_uniform64, words
from actors.verification.proposals import usable_drafts, valid_ids, valid_q
from actors.verification.residual import sample_residual
from actors.verification.row_scan import RowScan, scan


def verify(batch: VerificationBatch) -> VerificationResult:
    """See `interface.Verification`."""
    scanned = scan(batch)
    requests, K = len(batch.num_drafts), batch.max_drafts
    column = torch.arange(K, device=batch.logits.device).unsqueeze(0)
    inside = column < batch.num_drafts.unsqueeze(1)
    # [B, K], clamped where the request has no such draft: never used.
    draft = (batch.first_draft.unsqueeze(1) + column).clamp_max(max(len(batch.draft_ids) - 1, 0))
    row = (batch.first_row.unsqueeze(1) + column).clamp_max(len(batch.logits) - 1)

    draft_ids = batch.draft_ids[draft] if K else batch.draft_ids.new_zeros(requests, 0)
    good_row = scanned.row_max.isfinite()
    sampled = (batch.mode == Mode.REJECTION) | (batch.mode == Mode.BLOCK)
    valid = valid_ids(draft_ids, batch.vocab_size) & inside
    if K and batch.q_ids is not None and batch.q_probs is not None:
        proper = valid_q(batch.draft_ids, batch.q_ids, batch.q_probs, batch.vocab_size)
        valid = valid & (proper[draft] | ~sampled.unsqueeze(1))
    usable = usable_drafts(valid, batch.num_drafts)
    bad_proposal = usable < batch.num_drafts
    # A bad row ends the drafts too. Whether it is one depends on the tokens before it only, so nothing is biased.
    usable = torch.minimum(usable, usable_drafts(good_row[row] & inside, batch.num_drafts))
    considered = column < usable.unsqueeze(1)

    # Greedy; coupled (Daliri et al. 2024): accept while the draft is the target's own choice.
    accepted = (scanned.choice[row] == draft_ids) & considered
    accepted_len = accepted.to(torch.int64).cumprod(-1).sum(-1)
    last = scanned.choice[batch.first_row + accepted_len]
    if scanned.tile_mass is not None:
        rejection_len, rejection_last = _rejection(batch, scanned, draft, row, considered, usable)
        accepted_len = torch.where(sampled, rejection_len, accepted_len)
        last = torch.where(sampled, rejection_last, last)

    bad_logits = ~good_row[batch.first_row + accepted_len]
    wide = torch.arange(K + 1, device=batch.logits.device).unsqueeze(0)
    length = accepted_len.unsqueeze(1)
    drafts_then_last = torch.where(wide < length, torch.nn.functional.pad(draft_ids, (0, 1)), last.unsqueeze(1))
    committed = (wide <= length) & ~bad_logits.unsqueeze(1)
    return VerificationResult(
        token_ids=torch.where(committed, drafts_then_last, -1).to(torch.int32),
        accepted_len=torch.where(bad_logits, 0, accepted_len),
        status=bad_proposal * int(Status.BAD_PROPOSAL) + bad_logits * int(Status.BAD_LOGITS),
    )


def _rejection(
    batch: VerificationBatch, scanned: RowScan, draft: Tensor, row: Tensor, considered: Tensor, usable: Tensor
) -> tuple[Tensor, Tensor]:
    """Accepted length [B] and last token [B] by rejection, standard or block, for every request as if it were in one
    of these modes. draft, row: int64 [B, K]; considered: bool [B, K]; usable: int64 [B]."""
    assert scanned.tile_mass is not None
    assert scanned.total is not None
    V, logits, temperature = batch.vocab_size, batch.logits, batch.constraints.temperature
    requests, K = row.shape
    if batch.q_ids is None or batch.q_probs is None:
        q_ids_D, q_D = batch.draft_ids.unsqueeze(1), torch.ones(len(batch.draft_ids), 1, device=logits.device)
    else:
        q_ids_D, q_D = batch.q_ids, batch.q_probs
    n = q_ids_D.shape[1]
    if K == 0:
        q_ids, q, p = (torch.zeros(requests, 0, n, dtype=kind, device=logits.device) for kind in KINDS)
    else:
        q_ids = q_ids_D[draft].clamp(0, V - 1)  # a bad q is never considered
        q = torch.where(considered.unsqueeze(2), q_D[draft], 0.0)
        value = logits[row.unsqueeze(2), q_ids]
        p = ((value - scanned.row_max[row].unsqueeze(2)) / temperature[row].unsqueeze(2)).exp()
        if scanned.threshold is not None:
            p = torch.where(value >= scanned.threshold[row].unsqueeze(2), p, 0.0)
        p = p / scanned.total[row].unsqueeze(2)
    own = (q_ids == batch.draft_ids[draft].unsqueeze(2)) & (q > 0) if K else q > 0
    p_draft = torch.where(own, p, 0.0).sum(-1)
    q_draft = torch.where(own, q, 0.0).sum(-1)

    u, u_last = _noise(batch)
    # Leviathan et al. 2023: accept with probability min(1, p / q), until the first rejection.
    kept = (u * q_draft < p_draft) & considered
    accepted_len = kept.to(torch.int64).cumprod(-1).sum(-1)
    scale = torch.ones(requests, device=logits.device)
    block = batch.mode == Mode.BLOCK
    if any(group.mode is Mode.BLOCK for group in batch.groups):
        block_len, block_scale = _block(p, q, p_draft, q_draft, u, usable)
        accepted_len = torch.where(block, block_len, accepted_len)
        scale = torch.where(block, block_scale, scale)

    last_row = batch.first_row + accepted_len
    at = accepted_len.clamp_max(max(K - 1, 0)).view(-1, 1, 1).expand(-1, 1, n)
    subtract = accepted_len < usable  # after the last usable draft comes the bonus token, from p alone
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


KINDS = (torch.int64, torch.float32, torch.float32)


def _noise(batch: VerificationBatch) -> tuple[Tensor, Tensor]:
    """Accept noise, float32 [B, K], and residual noise, float64 [B, K + 1], of every position of the round. One call,
    because on a CPU a small Philox call costs its hundred torch operations and little else."""
    K, device = batch.max_drafts, batch.seed.device
    place = torch.cat([torch.arange(K, device=device), torch.arange(K + 1, device=device)])
    role = torch.full((2 * K + 1,), int(Role.RESIDUAL), device=device)
    role[:K] = int(Role.ACCEPT)
    start = batch.position.unsqueeze(1)
    first, second, _, _ = words(batch.seed.unsqueeze(1), role, start + place, 0, start)
    return to_uniform(first[:, :K]), to_uniform64(first[:, K:], second[:, K:])


def _block(p: Tensor, q: Tensor, p_draft: Tensor, q_draft: Tensor, u: Tensor, usable: Tensor) -> tuple[Tensor, Tensor]:
    """Block verification, Sun et al. 2024, algorithm 2 (their M_b is p, M_s is q).

    p, q: float32 [B, K, n] on q's support, q 0 where not considered; p_draft, q_draft, u: float32 [B, K].
    Returns the accepted length tau [B] and the scale p_tau [B]: the residual is norm(max(0, p_tau p - q)).
    """
    requests, K = u.shape
    reach = torch.ones(requests, device=u.device)  # the paper's p_i = min(1, p_{i-1} p(x_i) / q(x_i)), p_0 = 1
    tau = torch.zeros(requests, dtype=torch.int64, device=u.device)
    scale = reach
    for i in range(1, K + 1):
        reach = torch.minimum(reach * p_draft[:, i - 1] / q_draft[:, i - 1].clamp_min(1e-38), torch.ones_like(reach))
        if i < K:
            # sum over the vocabulary of max(0, p_i p - q), from the support alone: p sums to 1.
            overlap = torch.minimum(reach.unsqueeze(1) * p[:, i], q[:, i]).sum(-1)
            surplus = (reach - overlap).clamp_min(0)
            bottom = surplus + 1 - reach
            # 0 / 0 is p = q with p_i = 1: whatever is drafted next will be accepted with certainty.
            h = torch.where(bottom > 0, surplus / bottom, 1.0)
            h = torch.where(usable == i, reach, h)
        else:
            h = reach
        accept = (u[:, i - 1] < h) & (i <= usable)
        tau = torch.where(accept, i, tau)
        scale = torch.where(accept, reach, scale)
    return tau, scale
