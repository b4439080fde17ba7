"""What a soak says of a run: phases, ratio, and which goals are met."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from tests.bench.soak_attacks import CREWS
from tests.bench.soak_load import Answer, Client, Load, clients, differing, longest_gap_s, lost, tokens_between
from tests.bench.soak_report import Phase, Sample, Soak, Turn, phases, report
from tests.certificates import Authority

MIB = 1 << 20
SAMPLES = {
    "proxy": Sample(200 * MIB, Counter(socket=50), 1),
    "engine core": Sample(900 * MIB, Counter(socket=60), 1),
}


def client(*answers: Answer) -> Client:
    made = Client("grpc-0", "grpc", ("x",), [Answer("x", [1, 2, 3], "length")])
    made.answers = list(answers) or [Answer("x", [1, 2, 3], "length")]
    return made


def a_run(beside: int = 90, **changes: object) -> Soak:
    """Alone 100 tokens a second, beside attackers so many."""
    turns = [
        Turn(phase, phase.start_s, phase.end_s, {"server": 1.0}, round((beside if phase.beside else 100) * 10))
        for phase in phases(40)
    ]
    endings = {attack.name: Counter({"UNAUTHENTICATED": 3}) for crew in CREWS.values() for attack in crew}
    return replace(Soak(turns, [client()], SAMPLES, [SAMPLES], SAMPLES, [], endings), **changes)


def missed(run: Soak) -> list[str]:
    return [goal.what.partition(":")[0] for goal in run.goals() if not goal.is_met]


@pytest.mark.parametrize("seconds", [20, 40, 60, 300, 3600])
def test_phases_fill_the_time_and_are_as_often_beside_as_alone(seconds: float) -> None:
    planned = phases(seconds)
    assert [phase.beside for phase in planned] == [False, True] * (len(planned) // 2)
    assert planned[0].start_s == 0
    assert planned[-1].end_s == pytest.approx(seconds)
    assert all(before.end_s == after.start_s for before, after in pairwise(planned))


def test_a_run_like_alone_meets_every_goal() -> None:
    run = a_run()
    assert run.ratio == pytest.approx(0.9)
    assert run.ratios() == pytest.approx([0.9, 0.9])
    assert not missed(run)


@pytest.mark.parametrize(
    ("run", "goal"),
    [
        (a_run(beside=79), "throughput beside attackers, of that alone"),
        (a_run(load=[client(Answer("x", [1, 2], None))]), "legitimate requests lost"),
        (a_run(load=[client(Answer("x", [1, 2, 3], "abort"))]), "legitimate requests lost"),
        (a_run(load=[Client("grpc-0", "grpc", ("x",))]), "legitimate requests lost"),
        (a_run(wrong=["token 1 is 7"]), "answers other than alone"),
        (a_run(end={**SAMPLES, "proxy": Sample(265 * MIB, Counter(socket=50), 1)}), "memory of a process at the end"),
        (a_run(end={**SAMPLES, "proxy": Sample(200 * MIB, Counter(socket=50, pipe=1), 1)}), "open files at the end"),
    ],
)
def test_each_goal_can_be_missed(run: Soak, goal: str) -> None:
    assert missed(run) == [goal]


def test_what_is_lost_and_what_differs() -> None:
    asked = client(
        Answer("x", [1, 2, 3], "length"), Answer("x", [1, 9, 3], "length"), Answer("x", [1, 2], "stop"),
        Answer("x", [1], None), Answer("x", [1], "abort"),
    )  # fmt: skip
    assert lost(asked) == 2
    assert [answer.tokens for _, answer in differing(asked)] == [[1, 9, 3], [1, 2]]


def test_tokens_count_where_they_arrive_and_a_silence_counts_to_both_ends() -> None:
    one, other = client(), client()
    one.arrivals = [(0.5, 3), (1.0, 2), (9.0, 1)]
    other.arrivals = [(float(second), 1) for second in range(10)]
    assert tokens_between([one, other], 1.0, 9.0) == 2 + 8
    assert longest_gap_s([one, other], 0.0, 9.5) == 8.0
    assert longest_gap_s([one], 2.0, 8.0) == 6.0


def test_a_pause_between_answers_is_no_silence_of_the_server_s() -> None:
    paced = client()
    paced.every_s, paced.asked, paced.arrivals = 10.0, [0.0, 10.0], [(1.0, 1), (4.0, 1), (12.0, 1)]
    assert longest_gap_s([paced], 0.0, 20.0) == 3.0
    paced.arrivals.append((18.0, 1))
    assert longest_gap_s([paced], 0.0, 20.0) == 6.0


async def test_clients_are_as_busy_as_they_are_told_to_be() -> None:
    load = Load("127.0.0.1:1", "127.0.0.1:1", Authority().certificate.decode(), "key", [client()])
    async with load:
        load.clients[0].took = [(0.0, 2.0), (3.0, 4.0)]
        load.pace(0.5)
        assert load.clients[0].every_s == 6.0
        load.pace(1.0)
        assert load.clients[0].every_s == 0.0


def test_clients_and_attacks_have_names_of_their_own() -> None:
    load = clients()
    assert [each.kind for each in load] == ["grpc"] * 4 + ["http"] * 2 + ["json"]
    prompts = [prompt for each in load for prompt in each.prompts]
    assert len(set(prompts)) == len(prompts)
    names = [attack.name for crew in CREWS.values() for attack in crew]
    assert len(set(names)) == len(names)


def test_the_report_names_every_attack_and_every_goal() -> None:
    run = a_run()
    told = "\n".join(report(run))
    for name in run.endings:
        assert f"{name:42} " in told
    for goal in run.goals():
        assert f"met     {goal.what}" in told
    assert "MISSED" not in told


def test_a_turn_tells_how_many_cores_each_side_had() -> None:
    turn = Turn(Phase(0, 10, True), 0.0, 10.0, {"server": 12.0, "attackers": 1.5}, 500, 0.25)
    assert str(turn) == "beside    50.0 tok/s, longest gap  0.25 s, cores: server 1.20, attackers 0.15"
