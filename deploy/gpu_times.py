"""What ``outrider doctor --gpu`` measures: a draft step and the CUDA graphs it uses, the way from logits to tokens on
the host, and a link's round trip. `main` is a process of its own.

Everything takes a device, so that tests run all of it on the CPU.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from outrider.actors.drafter.engine import Draw, StepPlan, StepRow
from outrider.actors.verification.batch import choose
from outrider.cluster.backends import DEVICE_BACKENDS
from outrider.cluster.config import ConfigError, DraftModelConfig, OutriderConfig
from outrider.cluster.installed import installed_version
from outrider.cluster.link import Link, LinkInvitation, host_link, join_link
from outrider.cluster.link.codec import frame_capacity_words
from outrider.cluster.link.messages import DraftSampling, SparseQ
from outrider.cluster.modes import Mode

if TYPE_CHECKING:
    from outrider.actors.vllm_seam.draft_engine import DraftEngine

ROWS = (1, 4, 16, 64)
"""Of a draft step."""

BATCHES = (1, 8, 32)
"""Requests whose tokens are chosen at once."""

TOP_PS = (1.0, 0.9)
REPEATS, WARM_UPS = 40, 5
CONTEXT_TOKENS = 256
PINGS = 400
_CONNECT_S = 60.0

Times = dict[str, float]
"""``median_ms`` and ``p90_ms``."""


def timed(run: Callable[[], object], repeats: int = REPEATS) -> Times:
    """run: its end is on the host, so nothing of it is left on a device."""
    taken = []
    for repeat in range(WARM_UPS + repeats):
        start = time.perf_counter()
        run()
        if repeat >= WARM_UPS:
            taken.append((time.perf_counter() - start) * 1e3)
    taken.sort()
    return {"median_ms": statistics.median(taken), "p90_ms": taken[math.ceil(0.9 * len(taken)) - 1]}


def versions() -> dict[str, Any]:
    """Of what runs on the GPU; ``gpus`` as torch sees them."""
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "triton": installed_version("triton"),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if names else "",
        "gpus": names,
    }


def link_round_trip(config: OutriderConfig, devices: Sequence[str] = (), pings: int = PINGS) -> dict[str, Any]:
    """Microseconds between two processes of this machine, over the configured wire, with the deployment's frames.

    devices: of the two ends of an NCCL link, as CUDA_VISIBLE_DEVICES names them. Raises ConfigError without two.
    """
    backend = config.link.backend
    if backend in DEVICE_BACKENDS and (backend != "nccl" or len(devices) < 2):
        raise ConfigError(f"link.backend: {backend} is not measured here, nccl between two GPUs is; leave it at auto")
    secret = secrets.token_bytes(32)
    capacity = frame_capacity_words(
        config.target.max_num_seqs, config.num_speculative_tokens, config.speculation.draft_top_n
    )
    invitation, complete = host_link(
        host="127.0.0.1",
        epoch=1,
        backend=backend,
        capacity_words=capacity,
        round_deadline_ms=1e3,
        link_deadline_ms=_CONNECT_S * 1e3,
        vocab_size=1,
        num_speculative_tokens=config.num_speculative_tokens,
        verifier_id="doctor",
        secret=secret,
        sealed=config.link.frame_mac == "always",
        device="cuda:0" if backend == "nccl" else None,
    )
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    peer = spawn.Process(target=_answer_pings, args=(there, invitation, secret, devices[1:2]), daemon=True)
    peer.start()
    try:
        transport = complete(_CONNECT_S)
        link = _linked(transport, capacity)
        try:
            link.ping(count=max(pings // 10, 1), timeout_s=_CONNECT_S)
            stats = link.ping(count=pings, timeout_s=_CONNECT_S)
        finally:
            link.close("measured")
    finally:
        here.send(None)
        peer.join(_CONNECT_S)
        if peer.is_alive():
            peer.kill()
    return {"backend": transport.backend, "capacity_words": capacity, **asdict(stats)}


def _linked(transport: Any, capacity_words: int) -> Link[np.ndarray]:
    link = Link(
        transport,
        epoch=1,
        capacity_words=capacity_words,
        link_deadline_s=_CONNECT_S,
        decode=np.copy,
        name="doctor",
    )
    link.start()
    return link


def _answer_pings(done: Connection, invitation: LinkInvitation, secret: bytes, devices: Sequence[str]) -> None:
    """The other process: a link answers pings by itself."""
    if devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices[0]
    link = _linked(join_link(invitation, secret, _CONNECT_S), invitation.capacity_words)
    done.recv()
    link.abort("measured")


def sampler_tail(
    vocab_size: int,
    num_drafts: int,
    top_n: int,
    device: torch.device,
    batches: Sequence[int] = BATCHES,
    repeats: int = REPEATS,
) -> list[dict[str, Any]]:
    """From the target's logits, float32 on the device, to token ids on the host: rejection verification of num_drafts
    drafts a request, their q of top_n tokens each from the host, with top_p and without. 0 drafts: plain sampling."""
    from outrider.actors.vllm_seam.target_sampler import verification_batch

    verify = choose(device)
    found = []
    for batch in batches:
        drafts, logits, q = _proposed(batch, num_drafts, vocab_size, min(top_n, vocab_size), device)
        for top_p in TOP_PS:
            sampling = [DraftSampling(Mode.REJECTION, 1.0, top_p=top_p, seed=seed) for seed in range(batch)]

            def run(
                logits: torch.Tensor = logits,
                sampling: list[DraftSampling] = sampling,
                drafts: list[list[int]] = drafts,
                q: list[SparseQ | None] = q,
            ) -> list[list[int]]:
                positions = [CONTEXT_TOKENS] * len(drafts)
                tokens: list[list[int]] = verify(
                    verification_batch(logits, sampling, positions, drafts, q)
                ).token_ids.tolist()
                return tokens

            with torch.inference_mode():
                found.append({"batch": batch, "top_p": top_p, **timed(run, repeats)})
    return found


def _proposed(
    batch: int, num_drafts: int, vocab_size: int, top_n: int, device: torch.device
) -> tuple[list[list[int]], torch.Tensor, list[SparseQ | None]]:
    """Drafts, drawn from their q; logits that mostly agree with it, float32 [R, V]; q by request."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(batch * (num_drafts + 1), vocab_size, generator=generator) * 2.5
    if not num_drafts:
        return [[]] * batch, logits.to(device), [None] * batch
    drafted = logits.view(batch, num_drafts + 1, vocab_size)[:, :num_drafts]
    top = drafted.topk(max(top_n, 1), dim=-1)
    drafted.scatter_add_(-1, top.indices, torch.full_like(top.values, 6.0))
    if not top_n:
        return top.indices[:, :, 0].tolist(), logits.to(device), [None] * batch
    probs = (top.values + 0.5 * torch.randn(top.values.shape, generator=generator)).softmax(-1)
    places = torch.multinomial(probs.view(-1, top_n), 1, generator=generator).view(batch, num_drafts, 1)
    ids = top.indices.to(torch.int32).numpy()
    q: list[SparseQ | None] = [SparseQ(*of_request) for of_request in zip(ids, probs.numpy(), strict=True)]
    return top.indices.gather(-1, places).squeeze(-1).tolist(), logits.to(device), q


def load_engine(config: DraftModelConfig) -> tuple[DraftEngine, Any]:
    """The draft model's engine as a drafter actor has it, but for Ray: in this process, or with ranks in vLLM's own.
    And vLLM's configuration of it. Raises ConfigError."""
    from outrider.actors.drafter.load import cut_head
    from outrider.actors.vllm_seam.draft_engine import DraftEngine
    from outrider.actors.vllm_seam.engine_args import drafter_vllm_config

    adapters = [] if config.lora is None else [adapter.path for adapter in config.lora.adapters]
    vllm_config = drafter_vllm_config(config, None, None)
    engine = DraftEngine(vllm_config, in_process=config.tensor_parallel_size == 1, adapters=adapters)
    cut_head(config, engine)
    return engine, vllm_config


def graphs(vllm_config: Any, max_rows: int) -> dict[str, Any]:
    """By the configuration's value: what the drafter captures. vllm_config: vLLM's. max_rows: of its largest draft
    step."""
    compilation = vllm_config.compilation_config
    mode = compilation.cudagraph_mode
    sizes = sorted(compilation.cudagraph_capture_sizes or [])
    captures = mode is not None and mode.name != "NONE"
    return {"mode": mode.name if captures else "NONE", "sizes": sizes if captures else [], "max_rows": max_rows}


def draft_steps(
    engine: DraftEngine,
    sampling: DraftSampling,
    sizes: Sequence[int],
    repeats: int = REPEATS,
) -> list[dict[str, Any]]:
    """One token more for so many sequences, from plan to drawn tokens on the host: ``rows``, times, and ``graphs``, the
    modes and padded sizes of all its steps. Sizes beyond the KV cache are left out."""
    engine.count_graphs()
    length = max(min(CONTEXT_TOKENS, engine.max_model_len - 2), 1)
    found: list[dict[str, Any]] = []
    rows: list[StepRow] = []
    try:
        for size in sorted(sizes):
            while len(rows) < size and (row := _prefilled(engine, len(rows), length, sampling)) is not None:
                rows.append(row)
            if len(rows) < size:
                break
            plan = StepPlan(rows[:size])
            engine.take_graph_hits()
            times = timed(lambda plan=plan: engine.run(plan), repeats)  # type: ignore[misc]
            found.append({"rows": size, **times, "graphs": engine.take_graph_hits()})
    finally:
        for number in range(len(rows)):
            engine.finish(str(number))
    return found


def _prefilled(engine: DraftEngine, number: int, length: int, sampling: DraftSampling) -> StepRow | None:
    """A sequence of so many tokens, and the row that feeds it one more; None: no KV is left."""
    name, tokens = str(number), [(number + place) % engine.vocab_size for place in range(length)]
    start = engine.start(name, tokens, engine.hashed(name, tokens, sampling))
    if not engine.allocate(name, start, length - start, 1):
        engine.finish(name)
        return None
    for first in range(start, length, engine.max_num_batched_tokens):
        chunk = tokens[first : min(first + engine.max_num_batched_tokens, length)]
        engine.run(StepPlan([StepRow(chunk, first, engine.block_ids(name))]))
    return StepRow([tokens[0]], length, engine.block_ids(name), Draw(sampling, length + 1, length))


def draft_sampling(config: OutriderConfig) -> DraftSampling:
    """Of a sampled request without a seed."""
    mode = Mode[config.speculation.verification.upper()]
    return DraftSampling(mode, temperature=1.0, seed=1, top_n=config.speculation.draft_top_n)


def measured(config: OutriderConfig, device: str, vocab_size: int, devices: Sequence[str] = ()) -> dict[str, Any]:
    """Everything, by name; where one could not be measured, ``{"error": why}``: the others stand. The draft model is
    loaded last, since it takes the memory that there is. config: with the device's defaults. vocab_size: the target's.
    devices: as for `link_round_trip`."""
    found: dict[str, Any] = {"device": device, "versions": versions()}

    def note(name: str, measure: Callable[[], Any]) -> None:
        try:
            found[name] = measure()
        except Exception as error:  # noqa: BLE001 - of torch, vLLM or the machine: the other figures stand
            found[name] = {"error": f"{type(error).__name__}: {error}"}

    def of_the_drafter(drafter: DraftModelConfig) -> list[dict[str, Any]]:
        engine, vllm_config = load_engine(drafter)
        max_rows = max(drafter.max_num_seqs, drafter.max_draft_rows)
        found["graphs"] = graphs(vllm_config, max_rows)
        return draft_steps(engine, draft_sampling(config), [size for size in ROWS if size <= max_rows])

    note("link", lambda: link_round_trip(config, devices))
    drafts = config.num_speculative_tokens if config.drafter is not None else 0
    note("tail", lambda: sampler_tail(vocab_size, drafts, config.speculation.draft_top_n, torch.device(device)))
    if isinstance(config.drafter, DraftModelConfig):
        drafter = config.drafter
        note("steps", lambda: of_the_drafter(drafter))
    return found


def main(arguments: str) -> None:
    """arguments: JSON, those of `measured` by name. The last line on stdout is JSON: what it gives."""
    given = json.loads(arguments)
    config = OutriderConfig.model_validate(given.pop("config"))
    print(json.dumps(measured(config, **given)), flush=True)
    os._exit(0)  # the engine's threads are of no interest any more
