"""What ``outrider top`` shows, computed from two looks at the metrics. Pure.

Counts are compared with those of the look before. Where nothing has happened since, ratios are those since the start
of the replica, so that an idle server still shows what it did.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from deploy.top.scrape import Scrape


@dataclass(frozen=True)
class RoundView:
    """Means of decode steps, milliseconds. The draft counts as far as the target waited for it."""

    period_ms: float
    target_ms: float
    draft_ms: float
    wait_ms: float
    """Standing still for proposals; the draft is in it unless it was drafted ahead."""

    other_ms: float


@dataclass(frozen=True)
class LinkView:
    state: str
    epoch: int
    reconnects: int
    rtt_us: float


@dataclass(frozen=True)
class DrafterView:
    up: bool
    sequences: int = 0
    prefilling: int = 0
    kv_cache_usage: float = 0.0
    step_ms: float | None = None


@dataclass(frozen=True)
class ReplicaView:
    replica: str
    up: bool
    model: str = ""
    running: int = 0
    waiting: int = 0
    kv_cache_usage: float = 0.0
    tokens_per_s: float = 0.0
    requests_per_s: float = 0.0
    acceptance_length: float | None = None
    """With the bonus token. None, as below: nothing was drafted yet, or there is no drafter."""

    acceptance_rate: float | None = None
    hit_rate: float | None = None
    chosen_k: float | None = None
    """Mean number of drafts wanted a round, 0 included."""

    late_per_s: float = 0.0
    degraded_requests: int = 0
    """Since the start."""

    round: RoundView | None = None
    link: LinkView | None = None
    drafter: DrafterView | None = None


@dataclass(frozen=True)
class View:
    interval_s: float
    """Between the two looks; 0 for a single one, whose rates are all 0."""

    replicas: list[ReplicaView] = field(default_factory=list)
    rejected_per_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return sum(replica.tokens_per_s for replica in self.replicas)


def view(before: Scrape | None, now: Scrape) -> View:
    """before: the look before this one; None for the first."""
    interval_s = now.at_s - before.at_s if before is not None else 0.0
    replicas = sorted({labels["replica"] for labels, _ in now.of("outrider:replica_up")})
    changes = _Changes(before, now, {})
    return View(
        interval_s,
        [_replica(before, now, replica) for replica in replicas],
        changes.rate("outrider:admission_rejections_total"),
    )


class _Changes:
    """What has been counted between two looks, of samples with some labels."""

    def __init__(self, before: Scrape | None, now: Scrape, labels: dict[str, str]) -> None:
        self._before, self._now, self._labels = before, now, labels

    def since_start(self, name: str, **labels: str) -> float:
        return self._now.sum(name, **self._labels, **labels)

    def change(self, name: str, **labels: str) -> float:
        """0 without a look before. A counter that fell began anew."""
        if self._before is None:
            return 0.0
        total, earlier = self.since_start(name, **labels), self._before.sum(name, **self._labels, **labels)
        return total - earlier if total >= earlier else total

    def rate(self, name: str, **labels: str) -> float:
        interval_s = self._now.at_s - self._before.at_s if self._before is not None else 0.0
        return self.change(name, **labels) / interval_s if interval_s > 0 else 0.0

    def ratio(self, above: list[tuple[str, dict[str, str]]], below: list[tuple[str, dict[str, str]]]) -> float | None:
        """Sum over sum: since the look before, or since the start when nothing was counted below since."""
        for counted in (self.change, self.since_start):
            whole = sum(counted(name, **labels) for name, labels in below)
            if whole > 0:
                return sum(counted(name, **labels) for name, labels in above) / whole
        return None

    def mean(self, histogram: str) -> float | None:
        return self.ratio([(f"{histogram}_sum", {})], [(f"{histogram}_count", {})])


def _replica(before: Scrape | None, now: Scrape, replica: str) -> ReplicaView:
    of = {"replica": replica}
    if now.value("outrider:replica_up", **of) != 1:
        return ReplicaView(replica, up=False)
    changes = _Changes(before, now, of)
    accepted, drafts = "vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_drafts_total"
    extra = changes.ratio([(accepted, {})], [(drafts, {})])
    origins = [("outrider:proposal_origins_total", {"origin": origin}) for origin in ("main_line", "side_branch")]
    return ReplicaView(
        replica,
        up=True,
        model=next((labels.get("model_name", "") for labels, _ in now.of("outrider:build_info", **of)), ""),
        running=int(now.sum("vllm:num_requests_running", **of)),
        waiting=int(now.sum("vllm:num_requests_waiting", **of)),
        kv_cache_usage=now.value("vllm:kv_cache_usage_perc", **of) or 0.0,
        tokens_per_s=changes.rate("vllm:generation_tokens_total"),
        requests_per_s=changes.rate("vllm:request_success_total"),
        acceptance_length=None if extra is None else 1.0 + extra,
        acceptance_rate=changes.ratio([(accepted, {})], [("vllm:spec_decode_num_draft_tokens_total", {})]),
        hit_rate=changes.ratio(origins, [("outrider:proposal_origins_total", {})]),
        chosen_k=_chosen_k(changes, now, of),
        late_per_s=changes.rate("outrider:late_rounds_total"),
        degraded_requests=int(changes.since_start("outrider:degraded_requests_total")),
        round=_round(changes),
        link=_link(now, of),
        drafter=_drafter(changes, now, of),
    )


def _chosen_k(changes: _Changes, now: Scrape, of: dict[str, str]) -> float | None:
    name = "outrider:chosen_lengths_total"
    lengths = sorted({labels["k"] for labels, _ in now.of(name, **of)})
    for counted in (changes.change, changes.since_start):
        counts = {int(k): counted(name, k=k) for k in lengths}
        if (rounds := sum(counts.values())) > 0:
            return sum(k * count for k, count in counts.items()) / rounds
    return None


def _round(changes: _Changes) -> RoundView | None:
    parts = ("step", "step_target", "step_draft", "proposal_wait")
    means = [changes.mean(f"outrider:{part}_seconds") for part in parts]
    if None in means:
        return None
    period, target, draft, wait = (1e3 * mean for mean in means if mean is not None)
    return RoundView(period, target, draft, wait, max(0.0, period - target - draft))


def _link(now: Scrape, of: dict[str, str]) -> LinkView | None:
    state = next((labels["state"] for labels, value in now.of("outrider:link_state", **of) if value == 1), None)
    if state is None:
        return None
    return LinkView(
        state,
        int(now.sum("outrider:link_epoch", **of)),
        int(now.sum("outrider:link_reconnects_total", **of)),
        now.sum("outrider:link_rtt_seconds", **of) * 1e6,
    )


def _drafter(changes: _Changes, now: Scrape, of: dict[str, str]) -> DrafterView | None:
    up = now.value("outrider:drafter_up", **of)
    if up is None:
        return None
    step_s = changes.mean("outrider:drafter_step_seconds")
    return DrafterView(
        up == 1,
        int(now.sum("outrider:drafter_sequences", **of)),
        int(now.sum("outrider:drafter_prefilling_sequences", **of)),
        now.sum("outrider:drafter_kv_cache_usage_ratio", **of),
        None if step_s is None else step_s * 1e3,
    )
