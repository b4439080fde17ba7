"""At which settings vLLM's own engine is fastest: each tried on a few prompts before the run, engine by engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from deploy.bench.answers import Ask
from deploy.bench.other import Cores, InProcessEngine


@dataclass(frozen=True)
class Setting:
    k: int | None
    """None: no speculation."""

    cores: Cores | None
    """Of the model's threads, by rank. None on GPUs."""

    def __str__(self) -> str:
        drafts = "no speculation" if self.k is None else f"K = {self.k}"
        if self.cores is None:
            return f"in-process vLLM, {drafts}:"
        return f"in-process vLLM, {drafts}, cores {'|'.join(','.join(map(str, rank)) for rank in self.cores)}:"


@dataclass(frozen=True)
class Trial:
    setting: Setting
    tok_per_s: float


def prompts_to_try(asks: Sequence[Ask], concurrency: int) -> list[Ask]:
    """Evenly spread, enough to fill the concurrency twice."""
    count = min(len(asks), max(2 * concurrency, 4))
    return [asks[place * len(asks) // count] for place in range(count)]


def one_core_fewer(cores: Cores | None) -> Cores | None:
    """A core of each rank left to vLLM's scheduler process, which polls while the model works; vLLM's own automatic
    binding does that. None where a rank has no second core."""
    if cores is None or min(map(len, cores)) < 2:
        return None
    return tuple(rank[:-1] for rank in cores)


def try_out(
    settings: Sequence[Setting],
    make: Callable[[Setting], InProcessEngine],
    warm_up: Sequence[Ask],
    asks: Sequence[Ask],
    concurrency: int,
    say: Callable[[str], None],
    waiting: Callable[[str], None],
) -> list[Trial]:
    """In the order of ``settings``. make: an engine that is not started. say: gets each result; waiting: is called
    with what is going on, now and then. Raises BenchError."""
    trials = []
    for setting in settings:
        engine = make(setting)
        try:
            engine.start(partial(waiting, f"{setting} loading"))
            engine.run(warm_up, concurrency, lambda done, tokens: None)
            seconds, answers = engine.run(asks, concurrency, partial(_trying, waiting, setting))
        finally:
            engine.stop()
        trials.append(Trial(setting, sum(len(answer.token_ids) for answer in answers) / seconds))
        say(f"{setting} {trials[-1].tok_per_s:.2f} tok/s on {len(asks)} prompts")
    return trials


def _trying(waiting: Callable[[str], None], setting: Setting, done: int, tokens: int) -> None:
    waiting(f"{setting} trying")


def best(trials: Sequence[Trial]) -> Setting:
    """The fastest; of equals the first."""
    return max(trials, key=lambda trial: trial.tok_per_s).setting
