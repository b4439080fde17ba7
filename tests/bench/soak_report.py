"""What a run of `tests.bench.soak` came to: its phases, its goals, its table. Pure."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import mean

from tests.bench.soak_attacks import CREWS
from tests.bench.soak_load import Client, lost

LEAST_RATIO = 0.8
MOST_GROWTH_BYTES = 64 << 20

PHASE_S = 30.0


@dataclass(frozen=True)
class Phase:
    start_s: float
    end_s: float
    beside: bool
    """Attackers are there."""

    row: str = ""
    """Those alone that do this, or these, joined by ``; ``. Empty: all."""


def phases(seconds: float, rows: Sequence[str] = ()) -> list[Phase]:
    """Alone and beside by turns, as often each, some PHASE_S long. rows: of attacks, one after the other."""
    number = 2 * len(rows) or max(4, 2 * round(seconds / PHASE_S / 2))
    length = seconds / number
    return [
        Phase(turn * length, (turn + 1) * length, bool(turn % 2), rows[turn // 2] if rows and turn % 2 else "")
        for turn in range(number)
    ]


@dataclass(frozen=True)
class Sample:
    """Of one kind of process. memory: resident. opened: files by name, numbers left out."""

    memory: int
    opened: Counter[str]
    processes: int

    @property
    def files(self) -> int:
        return self.opened.total()


@dataclass
class Turn:
    """What a phase came to. cpu_s: processor time of the server's kinds of processes, of the attackers, and of this
    process, with the clients."""

    phase: Phase
    start_s: float = 0.0
    end_s: float = 0.0
    cpu_s: dict[str, float] = field(default_factory=dict)
    tokens: int = 0
    longest_gap_s: float = 0.0
    seconds_an_answer: list[float] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / (self.end_s - self.start_s)

    def __str__(self) -> str:
        cores = ", ".join(f"{who} {used / (self.end_s - self.start_s):.2f}" for who, used in self.cpu_s.items())
        who = self.phase.row or ("beside" if self.phase.beside else "alone")
        return f"{who:6} {self.tokens_per_s:7.1f} tok/s, longest gap {self.longest_gap_s:5.2f} s, cores: {cores}"


@dataclass
class Goal:
    what: str
    value: str
    is_met: bool


@dataclass
class Soak:
    """What a run came to, and what is to be said of it."""

    turns: list[Turn]
    load: list[Client]
    start: dict[str, Sample]
    minutes: list[dict[str, Sample]]
    end: dict[str, Sample]
    wrong: list[str]
    """Answers that are others than alone, and not by rounding."""

    endings: dict[str, Counter[str]]
    """Of each attack."""

    ties: int = 0
    """Of answers that are, where two tokens are equally good."""

    def tokens_per_s(self, *, beside: bool) -> float:
        turns = [turn for turn in self.turns if turn.phase.beside == beside]
        return sum(turn.tokens for turn in turns) / sum(turn.end_s - turn.start_s for turn in turns)

    @property
    def ratio(self) -> float:
        return self.tokens_per_s(beside=True) / max(self.tokens_per_s(beside=False), 1e-9)

    def ratios(self) -> list[float]:
        """Of each phase beside attackers to those alone around it."""
        found = []
        for before, turn, after in zip(self.turns, self.turns[1:], [*self.turns[2:], None], strict=False):
            if turn.phase.beside:
                around = [each.tokens_per_s for each in (before, after) if each is not None]
                found.append(turn.tokens_per_s * len(around) / max(sum(around), 1e-9))
        return found

    def goals(self) -> list[Goal]:
        answers = sum(len(client.answers) for client in self.load)
        gone = sum(map(lost, self.load))
        grown = {kind: self.end[kind].memory - self.start[kind].memory for kind in self.start}
        most = max(grown, key=lambda kind: grown[kind])
        files = {kind: self.end[kind].files - self.start[kind].files for kind in self.start}
        more = {
            kind: dict(self.end[kind].opened - self.start[kind].opened) for kind, number in files.items() if number > 0
        }
        return [
            Goal(f"throughput beside attackers, of that alone: >= {LEAST_RATIO}", f"{self.ratio:.3f}",
                 self.ratio >= LEAST_RATIO),
            Goal("legitimate requests lost: 0", f"{gone} of {answers}", answers > 0 and not gone),
            Goal("answers other than alone: 0", f"{len(self.wrong)} ({self.ties} with a tie)", not self.wrong),
            Goal("memory of a process at the end: 64 MiB more at most", f"{grown[most] / 2**20:+.1f} MiB ({most})",
                 grown[most] <= MOST_GROWTH_BYTES),
            Goal("open files at the end: no more than at the start", json.dumps(more) if more else "no more", not more),
        ]  # fmt: skip


def told(samples: dict[str, Sample]) -> str:
    return ", ".join(f"{kind} {each.memory >> 20} MiB {each.files} files" for kind, each in samples.items())


def report(result: Soak) -> Iterator[str]:
    """Lines."""
    yield ""
    yield f"{'attack':42} {'attempts':>8}  how they ended"
    for crew in CREWS.values():
        for row in dict.fromkeys(attack.row for attack in crew):
            yield f"-- {row}"
            for attack in (each for each in crew if each.row == row):
                endings = result.endings[attack.name]
                ways = ", ".join(f"{ending} {count}" for ending, count in endings.most_common())
                yield f"{attack.name:42} {endings.total():8}  {ways or 'none'}"
    yield ""
    columns = ["start", *(f"{number} min" for number in range(1, len(result.minutes) + 1)), "end"]
    yield (f"{'MiB / open files':16} " + " ".join(f"{name:>12}" for name in columns))
    for kind in result.start:
        samples = [result.start[kind], *(minute[kind] for minute in result.minutes), result.end[kind]]
        yield (f"{kind:16} " + " ".join(f"{each.memory / 2**20:6.0f} / {each.files:3}" for each in samples))
    yield ""
    for beside in (False, True):
        turns = [turn for turn in result.turns if turn.phase.beside == beside]
        seconds = sum(turn.end_s - turn.start_s for turn in turns)
        cores = {who: sum(turn.cpu_s[who] for turn in turns) / seconds for who in turns[0].cpu_s}
        used = ", ".join(f"{who} {each:.2f}" for who, each in cores.items())
        gap = max(turn.longest_gap_s for turn in turns)
        rate = result.tokens_per_s(beside=beside)
        name = "beside attackers" if beside else "alone"
        took = [seconds for turn in turns for seconds in turn.seconds_an_answer]
        answer = f"an answer takes {mean(took):.2f} s, longest {max(took):.2f}" if took else "no answer"
        yield f"{name:16} {rate:7.1f} tok/s; {answer}; longest gap {gap:.2f} s; cores: {used}"
    low, high = min(result.ratios()), max(result.ratios())
    yield f"{'ratio':16} {result.ratio:7.3f}; of single phases {low:.3f} to {high:.3f}"
    for error, count in Counter(error for client in result.load for error in client.errors).most_common(10):
        yield f"lost, {count} times: {error}"
    for error in result.wrong[:10]:
        yield f"wrong: {error}"
    yield ""
    for goal in result.goals():
        yield f"{'met' if goal.is_met else 'MISSED':7} {goal.what}: {goal.value}"
