"""A closed loop of requests over gRPC: as many under way as asked for, the next one sent when one ends."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from deploy.bench.answers import Answer, Ask
from deploy.bench.error import BenchError
from deploy.client.sync_client import CompletionStream, OutriderClient, OutriderError
from outrider.v1 import generation_pb2 as pb

POLL_S = 0.5


def ask_all(
    client: OutriderClient,
    asks: Sequence[Ask],
    concurrency: int,
    on_progress: Callable[[int, int], None],
    verification: str | None = None,
) -> tuple[float, list[Answer]]:
    """(seconds, answers, in the order in which they ended). on_progress gets answers and tokens so far.

    Raises BenchError for the first request that fails. Whatever ends it, every request is cancelled or complete.
    """
    loop = _Loop(client, asks, verification)
    threads = [threading.Thread(target=loop.work, daemon=True) for _ in range(min(concurrency, len(asks)))]
    started = time.perf_counter()
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(POLL_S)
                if thread.is_alive():
                    on_progress(len(loop.answers), sum(len(answer.token_ids) for answer in loop.answers))
    finally:
        loop.cancel()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    if loop.error is not None:
        raise loop.error
    return loop.ended - started, loop.answers


class _Loop:
    """What the threads of one call share."""

    def __init__(self, client: OutriderClient, asks: Sequence[Ask], verification: str | None) -> None:
        self.answers: list[Answer] = []
        self.ended = 0.0
        self.error: BenchError | None = None
        self._client, self._verification = client, verification
        self._waiting = deque(asks)
        self._streams: set[CompletionStream] = set()
        self._lock = threading.Lock()
        self._cancelled = False

    def work(self) -> None:
        while True:
            with self._lock:
                if self._cancelled or not self._waiting:
                    return
                ask = self._waiting.popleft()
                sent = time.perf_counter()
                stream = self._open(ask)
                self._streams.add(stream)
            try:
                answer = collect(ask, stream, sent)
            except (OutriderError, BenchError) as error:
                with self._lock:
                    if not self._cancelled:
                        self.error = BenchError(f"our side: prompt {ask.index + 1} of the dataset: {error}")
                self.cancel()
                return
            with self._lock:
                self._streams.discard(stream)
                self.answers.append(answer)
                self.ended = time.perf_counter()

    def cancel(self) -> None:
        with self._lock:
            self._cancelled = True
            for stream in self._streams:
                stream.close()
            self._streams.clear()

    def _open(self, ask: Ask) -> CompletionStream:
        return self._client.stream(
            ask.text,
            temperature=ask.temperature,
            max_tokens=ask.max_tokens,
            seed=ask.seed,
            ignore_eos=ask.ignore_eos or None,
            verification=self._verification,
        )


def collect(ask: Ask, stream: CompletionStream, sent: float) -> Answer:
    """Read a stream to its end. sent: when its request was, by ``time.perf_counter``.

    Raises OutriderError for a call that fails, BenchError for an answer that is cut short.
    """
    arrivals: list[tuple[float, int]] = []
    token_ids: list[int] = []
    last: pb.GenerateStreamResponse | None = None
    for last in stream:
        if last.token_ids:
            arrivals.append((time.perf_counter() - sent, len(last.token_ids)))
            token_ids.extend(last.token_ids)
    if last is None or last.finish_reason not in (pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH):
        raise BenchError("the answer broke off")
    counted, timing = last.metrics.speculative_decoding, last.metrics.timing
    return Answer(
        ask.index,
        tuple(arrivals),
        time.perf_counter() - sent,
        tuple(token_ids),
        counted.num_spec_steps,
        counted.num_draft_tokens,
        counted.num_accepted_draft_tokens,
        timing.decode_time_s,
        timing.e2e_latency_s,
    )
