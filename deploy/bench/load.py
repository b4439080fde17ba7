"""Runs turns of load by vLLM's benchmark client, and reads the server's counters meanwhile.

The client's options are those of ``vllm bench serve``. It runs in this process, so that vLLM is imported once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import io
import urllib.request
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.cluster.config import ConfigError
from outrider.deploy.bench.machine import BenchError

DRAFTS, DRAFTED, ACCEPTED, GENERATED = (
    "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total", "vllm:generation_tokens_total",
)  # fmt: skip
_KEPT_LABELS = ("origin", "method", "position")


@dataclass(frozen=True)
class Turn:
    """Holds the results of one side in one turn."""

    figures: dict[str, float]
    counted: dict[str, float] = field(default_factory=dict)
    """Increase of each counter of the server; empty if it has no ``/metrics``."""

    texts: list[str] = field(default_factory=list)


class Load:
    """Sends the same requests to each server, as vLLM's client makes them."""

    def __init__(self, options: Sequence[str]) -> None:
        """Parses options of ``vllm bench serve``. Raises ConfigError for an unknown one."""
        self.options = list(options)
        given = self._parse([])
        self.num_prompts: int = given.num_prompts
        self.concurrency: int = given.max_concurrency or given.num_prompts
        self.seed: int = given.seed

    def turn(self, url: str, number: int, tokenizer: str | None = None, num_prompts: int | None = None) -> Turn:
        """Sends the requests to a server and waits for all responses. Raises BenchError if one fails.

        Args:
            number: Added to the seed, which chooses the prompts, so that no prefix cache has those of another turn.
            num_prompts: In place of the number in the options.
        """
        from vllm.benchmarks.serve import main_async

        given = self._parse(
            ["--base-url", url, "--seed", str(self.seed + number), "--save-detailed"]
            + ([] if tokenizer is None else ["--tokenizer", tokenizer])
            + ([] if num_prompts is None else ["--num-prompts", str(num_prompts)])
        )
        before = counters(url)
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # stdout is for the report
                result: dict[str, Any] = asyncio.run(main_async(given))
        except (ValueError, RuntimeError, ImportError, OSError, NotImplementedError) as error:
            raise BenchError(f"the benchmark client failed at {url}: {error}") from error
        finally:
            gc.unfreeze()  # undoes the client's freeze, after which libraries report leaks at exit
        if result["failed"] or not result["completed"]:
            reason = next((error for error in result["errors"] if error), "no answer")
            raise BenchError(f"{result['failed']} requests failed at {url}: {reason.strip().splitlines()[-1]}")
        rose = {name: value - before.get(name, 0.0) for name, value in counters(url).items()}
        counted = {name: value for name, value in rose.items() if value}
        figures = {name: value for name, value in result.items() if isinstance(value, (int, float))}
        return Turn(figures, counted, result["generated_texts"])

    def _parse(self, options: Sequence[str]) -> argparse.Namespace:
        from vllm.benchmarks.serve import add_cli_args
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        def refuse(message: str) -> None:
            raise ConfigError(f"options of the load, as `vllm bench serve` takes them: {message}")

        parser = FlexibleArgumentParser(prog="vllm bench serve")
        add_cli_args(parser)
        parser.error = refuse
        return parser.parse_args([*self.options, *options])


def counters(url: str) -> dict[str, float]:
    """Returns a server's counters, summed over replicas; none if it has no metrics."""
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
            return parse_counters(response.read().decode())
    except OSError:
        return {}


def parse_counters(text: str) -> dict[str, float]:
    """Returns the sums of vLLM's counters and ours by name and by the labels of a token's origin."""
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith(("vllm:", "outrider:")) and sample.name.endswith("_total"):
                kept = ",".join(f"{label}={sample.labels[label]}" for label in _KEPT_LABELS if label in sample.labels)
                found[f"{sample.name}{{{kept}}}" if kept else sample.name] += sample.value
    return dict(found)
