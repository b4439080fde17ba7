"""The load of a benchmark: its prompts, and a closed loop of requests over gRPC that asks them, as many under way as
asked for, the next one sent when one ends.

Prompts are JSONL, gzipped or not, with a field ``prompt``. There is one Ask and one Answer a prompt, and a Chunk of
answers a turn. Times are seconds, measured by whoever asked: the gRPC client on our side, the engine's own process on
the other.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from outrider.cluster.config import ConfigError
from outrider.deploy.bench.machine import BenchError
from outrider.deploy.client.sync_client import CompletionStream, OutriderClient, OutriderError
from outrider.v1 import generation_pb2 as pb

SideName = Literal["ours", "other"]

QUIET_CORES = 0.25
"""CPU seconds a second of programs that are no part of the benchmark from which on a chunk counts as spoilt."""

POLL_S = 0.5


@dataclass(frozen=True)
class Dataset:
    path: Path
    sha256: str
    """Of the file as it is, compressed or not."""

    prompts: tuple[str, ...]

    def spread(self, count: int | None) -> tuple[int, ...]:
        """Indices of ``count`` prompts, evenly spread over the file; of all when there are fewer, or count is None."""
        total = len(self.prompts)
        if count is None or count >= total:
            return tuple(range(total))
        return tuple(position * total // count for position in range(count))


def read_dataset(path: Path) -> Dataset:
    """Raises ConfigError: no such file, no JSON object in a line, no text in its field prompt, no line at all."""
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    except FileNotFoundError:
        raise ConfigError(f"--dataset: {path}: no such file; give a JSONL file with a field prompt") from None
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ConfigError(f"--dataset: {path} is not readable: {error}") from None
    # Not splitlines: JSON strings may hold line separators of Unicode's.
    lines = enumerate(text.split("\n"), start=1)
    prompts = tuple(_prompt(line, f"--dataset: {path}, line {number}") for number, line in lines if line.strip())
    if not prompts:
        raise ConfigError(f'--dataset: {path} is empty; one JSON object a line is expected, such as {{"prompt": "…"}}')
    return Dataset(path, hashlib.sha256(data).hexdigest(), prompts)


def _prompt(line: str, where: str) -> str:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON ({error}); one JSON object a line is expected") from None
    prompt = row.get("prompt") if isinstance(row, dict) else None
    if not isinstance(prompt, str) or not prompt:
        found = f"the fields are {', '.join(row)}" if isinstance(row, dict) and "prompt" not in row else "no text in it"
        raise ConfigError(f'{where}: no field prompt ({found}); each line needs one, such as {{"prompt": "…"}}')
    return prompt


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt with its sampling parameters, the same for both sides."""

    index: int
    """Of the prompt in the dataset."""

    text: str
    max_tokens: int
    temperature: float
    seed: int | None
    """None at temperature 0, which draws nothing."""

    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """How one Ask was answered."""

    index: int
    arrivals: tuple[tuple[float, int], ...]
    """(seconds since the request was sent, tokens) of every message that carried tokens."""

    ended_s: float
    """Seconds from sending the request to the end of its stream."""

    token_ids: tuple[int, ...]
    drafted_rounds: int = 0
    """Rounds with at least one draft; this and the next two as the engine counted them for this request."""

    drafted: int = 0
    accepted: int = 0

    engine_decode_s: float | None = None
    """From the first token to the last, by the engine's clock; this and the next are None where it is not told."""

    engine_latency_s: float | None = None
    """From the request's arrival in the target replica to its end there."""

    @property
    def ttft_s(self) -> float | None:
        """None when no token came."""
        return self.arrivals[0][0] if self.arrivals else None

    def gaps(self) -> Iterator[tuple[float, int]]:
        """(seconds since the message before, tokens) of every message but the first."""
        for (before_s, _), (at_s, tokens) in zip(self.arrivals, self.arrivals[1:], strict=False):
            yield at_s - before_s, tokens

    @property
    def way_s(self) -> float | None:
        """What the request and the answer's end spent between the client and the engine, both ways together."""
        return None if self.engine_latency_s is None else self.ended_s - self.engine_latency_s

    @property
    def span_s(self) -> float:
        """From the first message to the last; 0 when there are no two."""
        return self.arrivals[-1][0] - self.arrivals[0][0] if self.arrivals else 0.0

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Answer:
        """From what ``dataclasses.asdict`` became on its way through JSON."""
        arrivals = tuple((float(at_s), int(tokens)) for at_s, tokens in data["arrivals"])
        return cls(**{**data, "arrivals": arrivals, "token_ids": tuple(data["token_ids"])})


@dataclass(frozen=True, slots=True)
class Chunk:
    """One side's turn."""

    side: SideName
    pair: int
    """Chunks of both sides with the same pair hold the same prompts, one right after the other. From 0."""

    seconds: float
    """From the first request sent to the last stream's end."""

    answers: tuple[Answer, ...]
    resting_cores: float | None = None
    """CPU seconds a second that the other engine used meanwhile; it should rest. None: there is none, or unknown."""

    foreign_cores: float | None = None
    """Likewise, what no part of the benchmark used on this machine. None: not known."""

    @property
    def tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answers)

    @property
    def tok_per_s(self) -> float:
        return self.tokens / self.seconds


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
