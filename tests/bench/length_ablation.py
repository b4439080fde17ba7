"""What a length controller gains over fixed lengths, in virtual time: nothing here is a served measurement.

Each run writes one contender's rates, on the same texts and step times as every other contender's; `--table` compares.

    python -m tests.bench.length_ablation --contender 8 --out fixed-8.json            # K = 8, nobody waits on a miss
    python -m tests.bench.length_ablation --contender 4w --out fixed-4w.json          # K = 4, every miss is waited for
    python -m tests.bench.length_ablation --contender adaptive --out adaptive.json
    python -m tests.bench.length_ablation --table fixed-8.json adaptive.json [--scan fixed-*.json]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

MAX_TOKENS = 8
SEEDS = 8
STEPS = {1: 256, 8: 96, 32: 96}
"""By batch, of each seed; a step is a round of every request."""

T_95 = {2: 12.706, 4: 3.182, 8: 2.365}
"""Student's, by number of seeds."""


def cells() -> dict[str, tuple[Any, Any]]:
    """Pair and text by name."""
    from tests.unit.length.virtual_time import PAIRS, TEXTS

    found = {f"{pair} {text}": (PAIRS[pair], TEXTS[text]) for pair in reversed(PAIRS) for text in TEXTS}
    for name, pair in PAIRS.items():
        found[f"{name} slow drafter"] = pair.slower_drafter(4.0), TEXTS["stated"]
    # Where a step's tokens are no longer hidden behind its weights.
    busy = dataclasses.replace(PAIRS["70b-8b"], compute_bound=(64.0, 0.0006))
    for text in ("stated", "mixed", "poor", "hopeless"):
        found[f"70b-8b busy {text}"] = busy, TEXTS[text]
    return found


def contender(name: str) -> Callable[[], Any]:
    from outrider.actors.round.length import FixedLengths, LengthController, Lengths

    class NeverWaiting(FixedLengths):
        def __init__(self, num_tokens: int) -> None:
            self._lengths = Lengths(num_tokens, 0)

    if name == "adaptive":
        return lambda: LengthController(MAX_TOKENS)
    if name.endswith("w"):
        return lambda: FixedLengths(int(name[:-1]))
    return lambda: NeverWaiting(int(name))


def measure(make: Callable[[], Any], seeds: int, batches: list[int], only: str, out: Path) -> None:
    """Writes rates over the plain rate, by cell: one for each seed."""
    from tests.unit.length.virtual_time import VirtualRounds

    found: dict[str, list[float]] = {}
    for name, (pair, text) in cells().items():
        for batch in batches:
            if only in name and (batch == 32 or "busy" not in name):
                rates = []
                for seed in range(seeds):
                    steps = STEPS[batch]
                    rounds = VirtualRounds(pair, text, batch, make(), seed, steps, MAX_TOKENS)
                    rates.append(float(rounds.run(steps).rate) / pair.plain_rate(batch))
                found[f"{name}, {batch}"] = rates
                out.write_text(json.dumps(found))
                print(f"{name}, {batch}: {np.mean(rates):.3f}", file=sys.stderr, flush=True)


def ratio(ours: list[float], theirs: list[float]) -> tuple[float, float]:
    """Geometric mean of the seeds' ratios, and half of its 95% interval in logarithms."""
    logs = np.log(np.array(ours) / np.array(theirs))
    return float(np.exp(logs.mean())), float(T_95[len(logs)] * logs.std(ddof=1) / math.sqrt(len(logs)))


def table(paths: list[Path], scan: list[Path]) -> None:
    """The first is what the others are compared with."""
    rates = {path.stem: json.loads(path.read_text()) for path in paths}
    scanned = {path.stem: json.loads(path.read_text()) for path in scan}
    if scanned:
        print("geometric mean over all cells:")
        for name, values in scanned.items():
            print(f"  {name}: {np.exp(np.mean([np.log(np.mean(v)) for v in values.values()])):.3f}")
    first, *others = rates
    print("| cell, batch | " + f"{first} / plain | " + " | ".join(f"{o} / {first}" for o in others) + " | best fixed |")
    print("|---" * (len(others) + 3) + "|")
    for cell, base in rates[first].items():
        row = [cell, f"{np.mean(base):.2f}"]
        for other in others:
            if cell not in rates[other]:
                row.append("not run")
                continue
            mean, half = ratio(rates[other][cell], base)
            row.append(f"{mean:.3f} ({mean * math.exp(-half):.3f} to {mean * math.exp(half):.3f})")
        found = [(float(np.mean(values[cell])), name) for name, values in scanned.items() if cell in values]
        row.append("{1}: {0:.2f}".format(*max(found)) if found else "")
        print("| " + " | ".join(row) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contender", help="adaptive, or K, or K and w: misses are waited for")
    parser.add_argument("--out", type=Path, default=Path("rates.json"))
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--only", default="", help="cells whose name has this")
    parser.add_argument("--table", type=Path, nargs="+", default=[])
    parser.add_argument("--scan", type=Path, nargs="+", default=[])
    args = parser.parse_args()
    if args.table:
        table(args.table, args.scan)
        return
    batches = [int(batch) for batch in args.batches.split(",")]
    measure(contender(args.contender), args.seeds, batches, args.only, args.out)


if __name__ == "__main__":
    main()
