"""Computes what a target could give at best, with in-process drafters and with its own, in a chain or several paths.

    python -m tests.bench.ceilings --texts stated,pard-humaneval,pard-mt-bench --batches 1,8,32

Rivals have no host work and their best K. Our sides add host work to every round. Several paths are verified as rows of
their own: a path of n tokens takes n + 1 rows, since it has a private copy of what it shares with others. Which paths:
those whose expected tokens are worth their rows' time. A drafter is asked when the outcome is known, or prepares for
the likeliest one, two or three tokens after every node; whichever is fastest is printed.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from tests.bench.emulation.measurement import ceiling, sides_of
from tests.bench.emulation.profiles import PROFILES, TEXTS, Profile
from tests.bench.emulation.text_process import Text, TextProcess

LONGEST = 16
"""Drafts a round. Nobody has published acceptance beyond it."""

RANKS = (1, 2, 3)
POOL = 8
"""Targets that share a drafter in the last columns."""

Path = tuple[int, ...]
"""The rank of each of its tokens among the drafter's choices."""


@dataclass(frozen=True)
class Drafted:
    """A text as one kind of drafter follows it."""

    process: TextProcess
    one_pass: bool

    @functools.cache  # noqa: B019  (a handful of them, for one run)
    def probabilities(self, prefix: Path) -> tuple[float, ...]:
        """That each rank is the target's choice after a prefix. One pass drafts a path from its last token that is no
        first choice."""
        masks = next((n for n, rank in enumerate(reversed(prefix)) if rank != 1), len(prefix))
        right = self.process.acceptance_after(masks if self.one_pass else 0)
        return right, (1 - right) * self.process.second, (1 - right) * self.process.third

    @functools.cache  # noqa: B019  (a handful of them, for one run)
    def reach(self, prefix: Path) -> float:
        """Probability that the target writes a prefix."""
        return self.reach(prefix[:-1]) * self.probabilities(prefix[:-1])[prefix[-1] - 1] if prefix else 1.0


def best_paths(drafted: Drafted, row_price: float, longest: int, most: int) -> list[Path]:
    """The paths that bring more tokens than their rows' price, the main line first and then by what they bring."""

    def grown(prefix: Path) -> Iterator[tuple[float, Path]]:
        """The best path from a prefix, whose last token is in no other path, and those that leave it."""
        worth = drafted.reach(prefix) - row_price * (len(prefix) + 1)
        best, path = (worth, prefix), prefix
        while len(path) < longest:
            path = (*path, 1)
            worth += drafted.reach(path) - row_price
            best = max(best, (worth, path))
        if best[0] > 0 or not prefix:
            yield best
            for at in range(len(prefix), len(best[1]) if most > 1 else 0):
                for rank in RANKS[1:]:
                    yield from grown((*best[1][:at], rank))

    main, *others = grown(())
    return [path for _, path in (main, *sorted(others, reverse=True)[: most - 1])]


class Tree:
    """Some paths, verified in one step."""

    def __init__(self, drafted: Drafted, paths: list[Path]) -> None:
        self.paths, self._drafted = paths, drafted
        self.rows = sum(len(path) + 1 for path in paths)
        self.drafted_beside = sum(
            len(path) - max(at for at, rank in enumerate(path) if rank != 1) for path in paths[1:]
        )
        """Tokens of side branches, each from the one that begins it on."""

        self._nodes = {path[:end] for path in paths for end in range(len(path) + 1)}
        self.tokens = sum(map(drafted.reach, self._nodes))
        """Expected of a round: the target's own and every draft that is reached."""

    def outcomes(self, ranks: int) -> tuple[int, float]:
        """How many there are to prepare for with so many choices after each node, and the share of rounds that end in
        one of them."""
        ends = {(*node, rank) for node in self._nodes for rank in RANKS[:ranks]} - self._nodes
        return len(ends), sum(map(self._drafted.reach, ends))


@dataclass(frozen=True)
class Ours:
    """One way to draft and verify."""

    speed: float
    """tok/s of the batch."""

    tree: Tree
    prepared: int
    """Choices after each node that are drafted ahead; 0: drafts begin when the outcome is known."""


def ours(profile: Profile, drafted: Drafted, batch: int, host_ms: float, most_paths: int, targets: int = 1) -> Ours:
    """The fastest way found, where so many targets share the drafter."""
    found: list[Ours] = []
    for longest in (LONGEST,) if drafted.one_pass else range(1, 9):
        speed = 2e3 * batch / profile.target.step_ms(batch)
        for number in range(1, most_paths + 1):
            for _ in range(3):  # a row's price follows from the speed, and the speed from the rows
                price = speed / 1e3 * profile.target.extra_token_ms
                tree = Tree(drafted, best_paths(drafted, price, longest, number))
                speeds = _speeds(profile, drafted, batch, host_ms, tree, targets)
                found.append(max((Ours(speed, tree, ranks) for ranks, speed in speeds), key=_speed))
                speed = found[-1].speed
    return max(found, key=_speed)


def _speeds(
    profile: Profile, drafted: Drafted, batch: int, host_ms: float, tree: Tree, targets: int
) -> Iterator[tuple[int, float]]:
    """By choices prepared for after each node. After a miss all wait for a chain, or one decodes plainly."""
    target, draft, longest = profile.target, profile.drafter, len(tree.paths[0])
    step = target.step_ms(batch * tree.rows)
    plain = target.step_ms(batch)

    def drafting(outcomes: float) -> float:
        """Milliseconds, for all targets together.

        One pass drafts the main lines, another the side branches behind their first tokens. One token after the other:
        each outcome's main line, for half of the steps on average, and one outcome's side branches.
        """
        if drafted.one_pass:
            passes = (longest + 1, tree.drafted_beside) if len(tree.paths) > 1 else (longest + 1,)
            return sum(draft.step_ms(round(targets * batch * outcomes * rows)) for rows in passes)
        return (longest + 1) * draft.step_ms(round(targets * batch * (outcomes / 2 + len(tree.paths))))

    yield 0, 1e3 * batch * tree.tokens / (step + drafting(1) + host_ms)
    for ranks in RANKS:
        outcomes, hit = tree.outcomes(ranks)
        ahead = drafting(outcomes)
        full = max(step, ahead)
        late = draft.step_ms(batch * (longest + 1)) if drafted.one_pass else longest * draft.step_ms(batch)
        yield ranks, 1e3 * batch * tree.tokens / (full + (1 - hit**batch) * late + host_ms)
        # After a plain round the one open token is covered as the root's choices are.
        next_hit = sum(drafted.probabilities(())[:ranks])
        share = next_hit / (1 - hit + next_hit)
        rows = target.step_ms(round(batch * (share * tree.rows + 1 - share)))
        some = 1 - (1 - share) ** batch
        period = some * max(rows, ahead) + (1 - some) * plain + host_ms
        yield ranks, 1e3 * batch * (share * tree.tokens + 1 - share) / period


def _speed(way: Ours) -> float:
    return way.speed


def rival(profile: Profile, text: Text, batch: int, name: str) -> tuple[float, int]:
    """tok/s of the batch at its best K, and K."""
    side = sides_of(profile)[name]
    return max((ceiling(side, profile.target, text, batch, k).expected, k) for k in range(1, LONGEST + 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profiles", default=",".join(PROFILES))
    parser.add_argument("--texts", default="stated", help="with one part each, of " + ", ".join(TEXTS))
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--host-ms", type=float, default=1.0, help="of ours, a round of chains")
    parser.add_argument("--paths-host-ms", type=float, default=1.9, help="of ours, a round of several paths")
    parser.add_argument("--paths", type=int, default=8, help="a request, at most")
    options = parser.parse_args()
    columns = ("profile", "text", "batch", "in-process-tp (K)", "in-process-one-pass (K)", "our chain", "our paths",
               "paths, rows, tokens a round", "prepared", "over best rival", f"per acc., {POOL} targets")  # fmt: skip
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for profile, name in itertools.product(options.profiles.split(","), options.texts.split(",")):
        for batch in map(int, options.batches.split(",")):
            print(_row(PROFILES[profile], name, batch, options), flush=True)


def _row(profile: Profile, name: str, batch: int, options: argparse.Namespace) -> str:
    text = TEXTS[name]
    (process,) = text.parts
    # Nobody has published a one-pass drafter of 8B.
    one_pass = profile.name != "70b-8b"
    drafted = Drafted(process, one_pass)
    rivals = [rival(profile, text, batch, "in-process-tp")]
    rivals += [rival(profile, text, batch, "in-process-one-pass")] if one_pass else []
    chain = ours(profile, drafted, batch, options.host_ms, 1)
    paths, pooled = (
        max(chain_of, ours(profile, drafted, batch, options.paths_host_ms, options.paths, targets), key=_speed)
        for targets, chain_of in ((1, chain), (POOL, ours(profile, drafted, batch, options.host_ms, 1, POOL)))
    )
    best = max(rivals)[0]
    side = sides_of(profile)["outrider"]
    shared = pooled.speed / side.accelerators_of(POOL) / (best / profile.target_accelerators)
    told = [f"{speed:.1f} ({k})" for speed, k in rivals] + ["–"] * (not one_pass)
    tree = f"{len(paths.tree.paths)}, {paths.tree.rows}, {paths.tree.tokens:.2f}"
    cells = (profile.name, name, batch, *told, f"{chain.speed:.1f}", f"{paths.speed:.1f}", tree, paths.prepared,
             f"{paths.speed / best:.2f}", f"{shared:.2f}")  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


if __name__ == "__main__":
    main()
