"""``outrider top`` without HTTP: what the gRPC status of one replica tells."""

from __future__ import annotations

from deploy.top.view import DrafterView, LinkView, ReplicaView, RoundView, View
from outrider.v1 import generation_pb2 as pb

ONE_REPLICA = "(one)"
"""A status call reaches one replica, which does not say which it is."""


def view_of_status(status: pb.GetServerStatusResponse) -> View:
    """Ratios are those since the replica's start; there are no rates."""
    rounds = status.rounds
    drafted = bool(rounds.drafted_rounds)
    answers = rounds.main_line_hits + rounds.side_branch_hits + rounds.misses
    counts = dict(rounds.lengths.chosen_lengths)
    replica = ReplicaView(
        ONE_REPLICA,
        up=True,
        model=status.model,
        running=status.target.running,
        waiting=status.target.waiting,
        kv_cache_usage=status.target.kv_cache_usage,
        acceptance_length=rounds.mean_acceptance_length if drafted else None,
        acceptance_rate=rounds.acceptance_rate if drafted else None,
        hit_rate=(rounds.main_line_hits + rounds.side_branch_hits) / answers if answers else None,
        chosen_k=sum(k * count for k, count in counts.items()) / sum(counts.values()) if counts else None,
        round=_round(rounds.median) if rounds.HasField("median") else None,
        link=_link(status.link) if status.HasField("link") else None,
        drafter=_drafter(status) if status.HasField("link") else None,
    )
    return View(0.0, [replica])


def _round(median: pb.RoundTime) -> RoundView:
    return RoundView(median.period_ms, median.target_ms, median.draft_ms, median.wait_ms, median.other_ms)


def _link(link: pb.LinkStatus) -> LinkView:
    state = pb.LinkState.Name(link.state).removeprefix("LINK_STATE_").lower()
    return LinkView(state, link.epoch, link.reconnects, link.rtt_us)


def _drafter(status: pb.GetServerStatusResponse) -> DrafterView:
    if not status.HasField("drafter"):
        return DrafterView(up=False)
    load = status.drafter
    return DrafterView(True, load.running, load.waiting, load.kv_cache_usage, status.rounds.draft_step_ms or None)
