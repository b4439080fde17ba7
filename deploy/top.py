"""What ``outrider top`` shows: replicas, rounds, links and drafters, computed from two looks at ``/metrics``.

Counts are compared with those of the look before. Where nothing has happened since, ratios are those since the start
of the replica, so that an idle server still shows what it did. Without HTTP the gRPC status of one replica has to do.
"""

from __future__ import annotations

import os
import ssl
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from outrider.actors.learning.history import SERVES
from outrider.deploy.client.calls import API_KEY_VARIABLE
from outrider.v1 import generation_pb2 as pb

_TIMEOUT_S = 10.0
_MAX_BYTES = 64 << 20

ONE_REPLICA = "(one)"
"""A status call reaches one replica, which does not say which it is."""


class ScrapeError(Exception):
    """No metrics to be had there. The message is one line."""


@dataclass(frozen=True)
class Scrape:
    """at_s: when, on a clock that only goes forward. samples: name -> [(labels, value)]."""

    at_s: float
    samples: Mapping[str, list[tuple[dict[str, str], float]]] = field(default_factory=dict)

    def sum(self, name: str, **labels: str) -> float:
        """Of all samples with these labels, whatever their others; 0 without any."""
        return sum(value for _, value in self.of(name, **labels))

    def value(self, name: str, **labels: str) -> float | None:
        """The first such sample's."""
        return next((value for _, value in self.of(name, **labels)), None)

    def of(self, name: str, **labels: str) -> Iterator[tuple[dict[str, str], float]]:
        for found, value in self.samples.get(name, ()):
            if labels.items() <= found.items():
                yield found, value


def parse(text: str, at_s: float) -> Scrape:
    """Raises ScrapeError for what is no exposition."""
    samples: dict[str, list[tuple[dict[str, str], float]]] = defaultdict(list)
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples[sample.name].append((sample.labels, sample.value))
    except (ValueError, IndexError) as error:
        raise ScrapeError(f"not Prometheus' text format: {error}") from None
    return Scrape(at_s, dict(samples))


def scrape(http_address: str, tls: ssl.SSLContext | None = None) -> Scrape:
    """http_address: ``host:port``. tls None: plain text. Shows the key of OUTRIDER_API_KEY. Raises ScrapeError."""
    url = f"{'http' if tls is None else 'https'}://{http_address}/metrics"
    # A proxy named in the environment is for the way out of this machine.
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if tls is not None:
        handlers.append(urllib.request.HTTPSHandler(context=tls))
    opener = urllib.request.build_opener(*handlers)
    request = urllib.request.Request(url)
    if key := os.environ.get(API_KEY_VARIABLE):
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with opener.open(request, timeout=_TIMEOUT_S) as response:
            text = response.read(_MAX_BYTES).decode()
    except urllib.error.HTTPError as error:
        raise ScrapeError(f"{url} answers {error.code} {error.reason}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise ScrapeError(f"no metrics at {url}: {reason}") from None
    found = parse(text, time.monotonic())
    if not found.samples.get("outrider:replicas_silent"):
        raise ScrapeError(f"{url} is no Outrider server's")
    return found


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
    backend: str = ""
    """Its wire; "" where it is not up."""


@dataclass(frozen=True)
class DrafterView:
    up: bool
    sequences: int = 0
    prefilling: int = 0
    kv_cache_usage: float = 0.0
    step_ms: float | None = None
    links: int = 0
    """Targets that it drafts for."""

    version: int | None = None
    """Of what it learned; None: it does not learn."""


@dataclass(frozen=True)
class GainView:
    """Of acceptance per token. margin: one side, 95%; None: too few texts to say."""

    mean: float
    margin: float | None


@dataclass(frozen=True)
class VersionView:
    """Of a drafter that learns. gains: by texts; ``since``: why it was withdrawn."""

    number: int
    state: str
    gains: dict[str, GainView] = field(default_factory=dict)
    again: int | None = None
    """The former version that it is; as what follows, known by the gRPC status alone."""

    step: int | None = None
    began_unix_s: int | None = None
    kept: bool | None = None
    """Whether one can go back to it."""


@dataclass(frozen=True)
class LearningView:
    """versions: the latest last. refused: comparisons that brought none, by reason."""

    versions: list[VersionView]
    refused: dict[str, int]

    @property
    def serving(self) -> int | None:
        return next((version.number for version in self.versions if version.state == SERVES), None)


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

    @property
    def is_pooled(self) -> bool:
        """It is a drafter of the pool, and no target."""
        return self.drafter is not None and self.link is None


@dataclass(frozen=True)
class ScalingView:
    """Of target replicas that follow the load."""

    wanted: int
    running: int
    most: int
    reason: str


@dataclass(frozen=True)
class View:
    interval_s: float
    """Between the two looks; 0 for a single one, whose rates are all 0."""

    replicas: list[ReplicaView] = field(default_factory=list)
    rejected_per_s: float = 0.0
    scaling: ScalingView | None = None
    """None: the number of replicas is fixed, or what was decided is not known."""

    learning: LearningView | None = None
    """None: no drafter learns."""

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
        changes.rate("outrider:refused_generations_total"),
        _scaling(now),
        _learning(now),
    )


def _scaling(now: Scrape) -> ScalingView | None:
    numbers = {labels["state"]: int(value) for labels, value in now.of("outrider:autoscaling_replicas")}
    reasons = (labels["reason"] for labels, value in now.of("outrider:autoscaling_reason") if value == 1)
    if not {"wanted", "running", "most"} <= numbers.keys():
        return None
    return ScalingView(numbers["wanted"], numbers["running"], numbers["most"], next(reasons, ""))


def _learning(now: Scrape) -> LearningView | None:
    """Of the replica that knows of the latest version: all have theirs from one trainer, some a second later."""
    states = "outrider:learning_version_state"
    latest = max(((int(labels["version"]), labels["replica"]) for labels, _ in now.of(states)), default=None)
    if latest is None:
        return None
    of = {"replica": latest[1]}
    margins = "outrider:learning_version_margin"
    versions = []
    for labels, _ in now.of(states, **of):
        version = labels["version"]
        gains = {
            each["texts"]: GainView(mean, now.value(margins, version=version, texts=each["texts"], **of))
            for each, mean in now.of("outrider:learning_version_gain", version=version, **of)
        }
        versions.append(VersionView(int(version), labels["state"], gains))
    refused = {labels["reason"]: int(value) for labels, value in now.of("outrider:learning_refused_total", **of)}
    return LearningView(sorted(versions, key=lambda version: version.number), refused)


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
        next((labels["backend"] for labels, _ in now.of("outrider:link_backend", **of)), ""),
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
        int(now.sum("outrider:drafter_links", **of)),
        None if (version := now.value("outrider:drafter_version", **of)) is None else int(version),
    )


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
        round=_median_round(rounds.median) if rounds.HasField("median") else None,
        link=_status_link(status.link) if status.HasField("link") else None,
        drafter=_status_drafter(status) if status.HasField("link") else None,
    )
    return View(0.0, [replica], learning=learning_of_status(status))


def learning_of_status(status: pb.GetServerStatusResponse) -> LearningView | None:
    if not status.HasField("learning"):
        return None
    return LearningView([_version(version) for version in status.learning.versions], dict(status.learning.refused))


def _version(version: pb.DrafterVersion) -> VersionView:
    gains = {
        texts: gain_of(getattr(version.verdict, texts))
        for texts in ("recent", "past", "general")
        if version.HasField("verdict") and version.verdict.HasField(texts)
    }
    if version.HasField("since"):
        gains["since"] = gain_of(version.since)
    return VersionView(
        version.number,
        pb.DrafterVersionState.Name(version.state).removeprefix("DRAFTER_VERSION_STATE_").lower(),
        gains,
        version.again if version.HasField("again") else None,
        version.step,
        version.began_at.seconds,
        version.kept,
    )


def gain_of(difference: pb.GateDifference) -> GainView:
    return GainView(difference.mean, difference.margin if difference.HasField("margin") else None)


def _median_round(median: pb.RoundTime) -> RoundView:
    return RoundView(median.period_ms, median.target_ms, median.draft_ms, median.wait_ms, median.other_ms)


def _status_link(link: pb.LinkStatus) -> LinkView:
    state = pb.LinkState.Name(link.state).removeprefix("LINK_STATE_").lower()
    return LinkView(state, link.epoch, link.reconnects, link.rtt_us, link.backend)


def _status_drafter(status: pb.GetServerStatusResponse) -> DrafterView:
    if not status.HasField("drafter"):
        return DrafterView(up=False)
    load = status.drafter
    return DrafterView(True, load.running, load.waiting, load.kv_cache_usage, status.rounds.draft_step_ms or None)
