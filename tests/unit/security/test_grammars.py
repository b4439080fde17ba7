"""Constraints of strangers, in real processes: refused by what they cost, ended alone, and nobody else waits.

Nothing here is measured on a clock: bounds are of processor time, which the kernel keeps."""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from outrider.actors.grammars.bounds import Bounds, Ending
from outrider.actors.grammars.host import IDLE_S, NICENESS, SUSPECTS_NICENESS, Constraint, GrammarHost
from outrider.actors.grammars.matching import Matcher, Siblings, gather
from outrider.actors.grammars.rooms import ConstraintEnded, Room
from outrider.actors.request_ids import scoped_id
from outrider.actors.round.request import EXTRA_ARGS_KEY
from outrider.actors.vllm_seam.structured_outputs import GuardedStructuredOutputs
from outrider.cluster import cores as machine
from outrider.cluster.cores import cores, cores_of_quota
from tests.clock import Clock
from tests.security_vocabulary import EOS, serialised, vocabulary

HANG_GUARD_S = 400.0
WORDS = (len(vocabulary()) + 31) // 32
BOMB = 'root ::= (x|y|z)*\nx ::= "a"\ny ::= "b"\nz ::= root [a-z ]\n'
"""80 bytes, each text of which can be read in ever more ways."""

CORNER = 'root ::= "#" bomb | [0-9]+\nbomb ::= (x|y|z)*\nx ::= "a"\ny ::= "b"\nz ::= bomb [a-z ]\n'
"""The same, behind a text that a walk of the grammar's own finds seldom, and a prompt gets to at once."""

OPTIONAL = json.dumps({"type": "object", "properties": {f"property {i}": {"enum": ["a", "b"]} for i in range(6000)}})
UNFOLDS = "((a{1,200}){1,200}){1,200}"

ATTACKER, OTHER, NEIGHBOUR = 1, 2, 3
BOUNDS = Bounds(compile_s=1.0, mask_burst_s=0.1)


@pytest.fixture(scope="module")
def host() -> Iterator[GrammarHost]:
    host = GrammarHost(serialised, WORDS, 5, BOUNDS)
    yield host
    host.close()


def ending(future: Future[Room]) -> Ending:
    with pytest.raises(ConstraintEnded) as ended:
        future.result(HANG_GUARD_S)
    assert ended.value.ending.is_clients
    return ended.value.ending


def room(host: GrammarHost, kind: str, spec: str) -> Room:
    return host.compile(Constraint(kind, spec)).result(HANG_GUARD_S)


def allowed(matcher: Matcher, *drafts: int) -> list[set[int]]:
    matcher.ask_masks(drafts)
    assert matcher in gather([matcher], HANG_GUARD_S), matcher.ending
    masks = np.unpackbits(matcher.masks(1 + len(drafts)).view(np.uint8), axis=1, bitorder="little")
    return [set(np.flatnonzero(mask).tolist()) for mask in masks]


def answers(matcher: Matcher) -> None:
    """Whatever else this machine has to do first."""
    assert select.select([matcher], [], [], HANG_GUARD_S)[0]


def until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + HANG_GUARD_S
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.05)


def rooms_of(host: GrammarHost) -> set[str]:
    """Processes of the constraints that the host's keeper has forked and not ended."""
    assert host._keeper is not None
    pid = host._keeper._process.pid
    return set(Path(f"/proc/{pid}/task/{pid}/children").read_text().split())


def test_masks_are_those_of_the_grammar_behind_each_draft(host: GrammarHost) -> None:
    matcher = room(host, "ebnf", 'root ::= "a" [0-9] "b"').matcher([EOS])
    a, one, b = ord("a"), ord("1"), ord("b")
    digits = set(range(ord("0"), ord("9") + 1))
    assert allowed(matcher, a, one, b) == [{a}, digits, {b}, {EOS}]
    matcher.accept([a])
    assert allowed(matcher, b) == [digits, digits], "behind a draft that is refused the mask is that draft's own"
    matcher.ask_valid([one, b, b])
    assert gather([matcher], HANG_GUARD_S)[matcher]["valid"] == 2
    matcher.accept([one, b])
    assert allowed(matcher) == [{EOS}]
    matcher.close()


def test_tokens_before_the_grammar_begins_are_none_of_its(host: GrammarHost) -> None:
    matcher = room(host, "ebnf", 'root ::= "a"').matcher([EOS])
    matcher.ask_masks([7, ord("a")], 1, 1)
    assert matcher in gather([matcher], HANG_GUARD_S)
    assert (matcher.masks(3)[0] == -1).all()
    assert matcher.masks(3)[1].any()
    assert not (matcher.masks(3)[1] == -1).all()
    matcher.close()


@pytest.mark.parametrize(
    ("kind", "spec", "why", "reason"),
    [
        ("ebnf", BOMB, "leaves too much to try at each token", "mask_time"),
        ("json", OPTIONAL, "takes more than 1 s of processor time to compile", "compile_time"),
        ("regex", UNFOLDS, "leaves too much to try at each token", "mask_time"),
        ("ebnf", 'root ::= "x', "does not compile: EBNF lexer error at line 1, column 12", "invalid"),
        ("regex", "(", "does not compile: Regex parsing error", "invalid"),
    ],
    ids=["bomb", "optional properties", "regex", "no grammar", "no regex"],
)
def test_a_bomb_is_refused_with_its_reason(host: GrammarHost, kind: str, spec: str, why: str, reason: str) -> None:
    refused = ending(host.compile(Constraint(kind, spec)))
    assert why in refused.problem
    assert "\n" not in refused.problem
    assert refused.reason == reason
    assert Ending.of(refused.stop_reason()) == refused


def test_memory_is_another_reason_than_time() -> None:
    host = GrammarHost(serialised, WORDS, 1, Bounds(compile_s=3000.0, compile_bytes=4 << 20))
    try:
        refused = ending(host.compile(Constraint("json", OPTIONAL)))
    finally:
        host.close()
    assert refused == Ending("takes more than 4 MiB to compile", "compile_memory")


def test_a_refusal_is_remembered(host: GrammarHost) -> None:
    constraint = Constraint("ebnf", 'root ::= "unclosed')
    ending(host.compile(constraint))
    assert host.compile(constraint).done(), "nothing is compiled a second time"


def test_a_bomb_that_shows_only_where_a_prompt_leads_ends_its_own_request_alone(host: GrammarHost) -> None:
    hostile = room(host, "ebnf", CORNER).matcher([EOS], ATTACKER)
    neighbour = room(host, "json", '{"type": "object"}').matcher([EOS], NEIGHBOUR)
    token = ord("#")
    for _ in range(200):
        hostile.accept([token])
        token = ord("a")
        hostile.ask_masks([])
        neighbour.ask_masks([])
        assert neighbour in gather([hostile, neighbour], HANG_GUARD_S)
        if hostile.ending is not None:
            break
    assert hostile.ending is not None, "nothing ended it"
    assert hostile.ending.reason == "step"
    assert allowed(neighbour)[0] == {ord("{")}
    until(lambda: is_refused(host, "ebnf", CORNER))
    assert ending(host.compile(Constraint("ebnf", CORNER))) == hostile.ending, "it costs no other step anything"
    hostile.close()
    assert host._turns.is_suspect(ATTACKER)
    assert not host._turns.is_suspect(NEIGHBOUR)


def is_refused(host: GrammarHost, kind: str, spec: str) -> bool:
    compiling = host.compile(Constraint(kind, spec))
    if compiling.exception(HANG_GUARD_S) is not None:
        return True
    compiling.result().leave()
    return False


def test_a_matcher_that_was_killed_makes_its_constraint_no_bomb(host: GrammarHost) -> None:
    room(host, "json", '{"type": "object"}').leave()
    before = rooms_of(host)
    matcher = room(host, "ebnf", 'root ::= "killed"').matcher([EOS], ATTACKER)
    assert allowed(matcher)
    (process,) = rooms_of(host) - before
    (forked,) = children_of(process)
    os.kill(int(forked), signal.SIGKILL)
    until(lambda: not children_of(process))
    matcher.ask_masks([])
    gather([matcher], HANG_GUARD_S)
    assert matcher.ending is not None
    assert not is_refused(host, "ebnf", 'root ::= "killed"')
    matcher.close()


@pytest.fixture
def stopped(host: GrammarHost, request: pytest.FixtureRequest) -> Iterator[tuple[Matcher, Matcher, int]]:
    """Two matchers that have been asked, and the first one's process, which gets no core."""
    other = room(host, "json", '{"type": "object"}').matcher([EOS], OTHER)
    before = rooms_of(host)
    one = room(host, "ebnf", f'root ::= "{request.node.name}"').matcher([EOS], NEIGHBOUR)
    assert allowed(one)
    (process,) = rooms_of(host) - before
    (forked,) = children_of(process)
    os.kill(int(forked), signal.SIGSTOP)
    one.ask_masks([])
    other.ask_masks([])
    yield one, other, int(forked)
    os.kill(int(forked), signal.SIGKILL)
    one.close()
    other.close()


def test_a_matcher_that_gets_no_core_for_a_while_is_waited_for(stopped: tuple[Matcher, Matcher, int]) -> None:
    """Its neighbour has answered long since."""
    one, other, process = stopped
    goes_on = threading.Timer(2.0, os.kill, (process, signal.SIGCONT))
    goes_on.start()
    assert gather([one, other], BOUNDS.step_wait_s).keys() == {one, other}
    goes_on.join()


def test_a_matcher_that_never_answers_ends_its_own_request(stopped: tuple[Matcher, Matcher, int]) -> None:
    one, other, _ = stopped
    answers(other)
    assert other in gather([one, other], 1.0)
    assert one.ending == Ending("took too long on a busy server; retry", "server")


def test_ever_fresh_bombs_do_not_keep_anothers_constraint_waiting(host: GrammarHost) -> None:
    room(host, "ebnf", 'root ::= "kept"').leave()
    sender, bystander = 11, 12
    came: list[str] = []
    specs = {f"bomb {number}": BOMB + f"# {number}\n" for number in range(12)}
    compiling = {name: host.compile(Constraint("ebnf", spec), sender) for name, spec in specs.items()}
    large = json.dumps({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(200)}})
    compiling["large"] = host.compile(Constraint("json", large), bystander)
    for name, future in compiling.items():
        future.add_done_callback(lambda _, name=name: came.append(name))
    assert compiling["large"].result(HANG_GUARD_S).alive
    until(lambda: len(came) == len(compiling))
    assert came.index("large") <= 4, came


def test_who_has_had_too_much_refused_waits_and_nobody_else() -> None:
    host = GrammarHost(serialised, WORDS, 1, Bounds(compile_s=0.5, refused_s=0.2))
    try:
        kept = host.compile(Constraint("ebnf", 'root ::= "kept"'), ATTACKER).result(HANG_GUARD_S)
        assert ending(host.compile(Constraint("json", OPTIONAL), ATTACKER)).reason == "compile_time"
        refused = ending(host.compile(Constraint("ebnf", 'root ::= "fresh"'), ATTACKER))
        assert refused.reason == "budget"
        assert refused.retry_after_s is not None
        assert 0 < refused.retry_after_s < 600
        assert "retry in" in refused.problem
        assert Ending.of(refused.stop_reason()) == refused
        assert host.compile(Constraint("ebnf", 'root ::= "kept"'), ATTACKER).result(0) is kept, (
            "what is known is served"
        )
        assert host.compile(Constraint("ebnf", 'root ::= "fresh"'), OTHER).result(HANG_GUARD_S).alive
    finally:
        host.close()


def test_compiling_gives_way_and_a_step_waits_for_nothing_that_does() -> None:
    host = GrammarHost(serialised, WORDS, 1, Bounds(compile_s=3000.0, refused_s=0.05))
    own = os.getpriority(os.PRIO_PROCESS, 0)
    try:
        matcher = room(host, "ebnf", 'root ::= "a"').matcher([EOS])
        assert allowed(matcher)
        (ready,) = rooms_of(host)
        assert niceness_of(ready) == [own]
        assert [niceness_of(process) for process in children_of(ready)] == [[own]]
        host._turns.waste(ATTACKER, 0.01)
        for caller, niceness in ((ATTACKER, SUSPECTS_NICENESS), (OTHER, NICENESS)):
            endless = host.compile(Constraint("json", OPTIONAL.replace("property", f"of {caller}")), caller)
            wanted = [own, max(own, niceness)]
            until(lambda wanted=wanted: wanted in map(niceness_of, rooms_of(host) - {ready}))
            until(lambda: any(used_s(process) > 0.2 for process in rooms_of(host) - {ready}))
            endless.cancel()
            until(lambda: rooms_of(host) == {ready})
            until(lambda caller=caller: host._turns.retry_after_s(caller) > 0)  # what nobody waited for counts as well
    finally:
        host.close()


def test_what_nobody_has_used_for_a_minute_is_ended_with_all_that_it_held() -> None:
    clock = Clock()
    host = GrammarHost(serialised, WORDS, 1, BOUNDS, clock)
    try:
        host._running_keeper()
        gc.collect()
        files = len(os.listdir("/proc/self/fd"))
        used = room(host, "ebnf", 'root ::= "used"')
        kept = []  # as a request that has ended is, until the collector comes
        for number in range(3):
            kept.append(room(host, "ebnf", f'root ::= "idle {number}"').matcher([EOS]))
            assert allowed(kept[-1])
            kept[-1].close()
        assert len(rooms_of(host)) == 4
        clock.now = IDLE_S - 1
        host.tidy()
        assert len(rooms_of(host)) == 4, "they are kept for the next request"
        clock.now = IDLE_S + 1
        host.tidy()
        until(lambda: len(rooms_of(host)) == 1)
        used.leave()
        clock.now = 2 * IDLE_S
        host.tidy()
        assert used.alive, "its minute began when it was left"
        clock.now = 3 * IDLE_S
        host.tidy()
        until(lambda: not rooms_of(host))
        gc.collect()
        until(lambda: len(os.listdir("/proc/self/fd")) <= files)
    finally:
        host.close()


def children_of(pid: str) -> set[str]:
    return set(Path(f"/proc/{pid}/task/{pid}/children").read_text().split())


def niceness_of(pid: str) -> list[int]:
    """Of its threads, the first one first."""
    with suppress(OSError):
        threads = sorted(map(int, os.listdir(f"/proc/{pid}/task")), key=lambda thread: thread != int(pid))
        return [os.getpriority(os.PRIO_PROCESS, thread) for thread in threads]
    return []


def used_s(pid: str) -> float:
    with suppress(OSError):
        user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return 0.0


def test_what_a_room_compiled_is_kept_for_the_next_request(host: GrammarHost) -> None:
    first = room(host, "ebnf", 'root ::= "kept"')
    first.leave()
    assert host.compile(Constraint("ebnf", 'root ::= "kept"')).result(0) is first


def test_compiling_ends_when_nobody_waits_for_it_any_more() -> None:
    host = GrammarHost(serialised, WORDS, 1, Bounds(compile_s=3000.0))
    try:
        room(host, "ebnf", 'root ::= "kept"')
        kept = rooms_of(host)
        endless = host.compile(Constraint("json", OPTIONAL))
        until(lambda: len(rooms_of(host)) > len(kept))
        endless.cancel()
        until(lambda: rooms_of(host) == kept)
        assert room(host, "ebnf", 'root ::= "next"').alive
        keeper = host._keeper
    finally:
        host.close()
    assert keeper is not None
    assert not keeper.alive


def test_a_lost_keeper_is_replaced_and_nobody_is_blamed() -> None:
    host = GrammarHost(serialised, WORDS, 1, BOUNDS)
    try:
        lost = room(host, "ebnf", 'root ::= "a"').matcher([EOS])
        keeper = host._keeper
        assert keeper is not None
        keeper._process.kill()
        keeper._process.wait()
        assert room(host, "ebnf", 'root ::= "b"').alive
        assert allowed(lost), "a room outlives its keeper"
    finally:
        host.close()


def test_an_answer_that_takes_too_much_ends_its_siblings_before_they_are_asked(host: GrammarHost) -> None:
    corner, siblings = room(host, "ebnf", CORNER + "# of several\n"), Siblings(BOUNDS)
    first, second = corner.matcher([EOS], ATTACKER, siblings), corner.matcher([EOS], ATTACKER, siblings)
    token = ord("#")
    for _ in range(200):
        first.accept([token])
        token = ord("a")
        first.ask_masks([])
        gather([first], HANG_GUARD_S)
        if first.ending is not None:
            break
    assert first.ending is not None, "nothing ended it"
    assert second.ending == first.ending
    second.ask_masks([])
    assert not gather([second], HANG_GUARD_S)
    assert second._number is None, "it has no process"
    late = corner.matcher([EOS], ATTACKER, siblings)
    assert late.ending == first.ending
    for matcher in (first, second, late):
        matcher.close()


def test_answers_of_one_request_have_one_allowance_for_each_core() -> None:
    """None of them has used up its own when they have used up that."""
    host = GrammarHost(serialised, WORDS, 1, Bounds(mask_burst_s=0.02, mask_refill_s=0.0))
    try:
        text, siblings = room(host, "ebnf", "root ::= [a-z]*"), Siblings(host.bounds, at_once=1)
        several = [text.matcher([EOS], ATTACKER, siblings) for _ in range(4)]
        while not any(matcher.ending for matcher in several):
            for matcher in several:
                matcher.accept([ord("a")])
                matcher.ask_masks([])
            gather(several, HANG_GUARD_S)
        endings = {matcher.ending for matcher in several}
        (ending_,) = endings
        assert ending_ is not None
        assert ending_.reason == "step"
        assert "too costly for several answers" in ending_.problem
        assert not is_refused(host, "ebnf", "root ::= [a-z]*"), "it may do for one"
        assert host._turns.is_suspect(ATTACKER)
    finally:
        host.close()


@pytest.mark.parametrize(("at_once", "answered"), [(1, False), (2, True)])
def test_as_many_answers_of_a_request_are_asked_at_a_time_as_there_are_cores(
    host: GrammarHost, at_once: int, answered: bool
) -> None:
    siblings = Siblings(BOUNDS, at_once)
    room(host, "json", '{"type": "object"}').leave()
    before = rooms_of(host)
    text = room(host, "ebnf", f'root ::= "{at_once} at once"')
    first, second = text.matcher([EOS], OTHER, siblings), text.matcher([EOS], OTHER, siblings)
    assert allowed(first)
    (process,) = rooms_of(host) - before
    (forked,) = children_of(process)
    os.kill(int(forked), signal.SIGSTOP)
    first.ask_masks([])
    second.ask_masks([])
    assert (second in gather([first, second], 5.0)) is answered
    assert (second.ending is None) is answered, "without an answer it would allow everything"
    os.kill(int(forked), signal.SIGKILL)
    first.close()
    second.close()


@pytest.mark.parametrize("engine_id", ["{}_{}-ab", "{}-{}-ab"], ids=["answers", "prompts"])
def test_the_engine_knows_answers_of_one_request_by_what_they_bring(host: GrammarHost, engine_id: str) -> None:
    """Whatever vLLM calls them."""
    outputs = object.__new__(GuardedStructuredOutputs)
    outputs._host, outputs._requests, outputs._siblings = host, {}, WeakValueDictionary()

    def matcher(number: int, siblings: str | None) -> Matcher:
        asked = SimpleNamespace(params=StructuredOutputsParams(regex="siblings"), grammar=None)
        params = SamplingParams(extra_args={EXTRA_ARGS_KEY: {"siblings": siblings}} if siblings else None)
        name = engine_id.format(number, scoped_id(7, "r"))
        request: Any = SimpleNamespace(request_id=name, structured_output_request=asked, sampling_params=params)
        outputs.grammar_init(request)
        return asked.grammar.result(HANG_GUARD_S).matcher

    one, other, elsewhere, alone = matcher(0, "s"), matcher(63, "s"), matcher(1, "t"), matcher(2, None)
    assert one.siblings is other.siblings is not None
    assert elsewhere.siblings is not one.siblings
    assert alone.siblings is None
    for each in (one, other, elsewhere, alone):
        each.close()


def test_a_constraint_that_overdrew_for_several_answers_serves_one(host: GrammarHost) -> None:
    constraint = Constraint("ebnf", 'root ::= "for one" [a-z]*')
    kept = host.compile(constraint, ATTACKER).result(HANG_GUARD_S)
    siblings = Siblings(Bounds(mask_burst_s=1e-9, mask_refill_s=0.0), at_once=1)
    first, second = (kept.matcher([EOS], ATTACKER, siblings) for _ in range(2))
    while first.ending is None:
        first.ask_masks([])
        gather([first], HANG_GUARD_S)
    assert second.ending == first.ending
    assert ending(host.compile(constraint, NEIGHBOUR, several=True)) == first.ending
    alone = host.compile(constraint, NEIGHBOUR).result(HANG_GUARD_S)
    assert alone is kept, "it is not compiled once more"
    assert ord("f") in allowed(alone.matcher([EOS], NEIGHBOUR))[0]


def test_asking_many_takes_no_look_at_all_of_them_for_each_answer() -> None:
    class Asked:
        """Answers when the one before has been read, so that each is a wake-up of its own."""

        siblings, looks = None, 0

        def __init__(self, before: Asked | None) -> None:
            self.read, self.write = os.pipe()
            self.behind: Asked | None = None
            if before is not None:
                before.behind = self

        @property
        def ending(self) -> None:
            Asked.looks += 1

        def fileno(self) -> int:
            return self.read

        def answer(self) -> None:
            os.write(self.write, b"!")

        def take(self) -> dict[str, Any]:
            if self.behind is not None:
                self.behind.answer()
            return {}

    many: list[Any] = []
    for _ in range(50):
        many.append(Asked(many[-1] if many else None))
    many[0].answer()
    assert len(gather(many, HANG_GUARD_S)) == len(many)
    assert Asked.looks <= 3 * len(many)
    for each in many:
        os.close(each.read)
        os.close(each.write)


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("max 100000\n", None),
        ("150000 100000\n", 2),
        ("50000 100000\n", 1),
        ("-1\n 100000\n", None),
        ("400000\n 100000\n", 4),
        ("", None),
    ],
)
def test_a_containers_cpu_quota_in_cores(text: str, cores: int | None) -> None:
    assert cores_of_quota(text) == cores


@pytest.mark.parametrize("quota", [["100000 100000"], ["100000", "100000"]])
def test_cores_are_no_more_than_the_quota(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quota: list[str]) -> None:
    files = [tmp_path / str(number) for number in range(len(quota))]
    for file, text in zip(files, quota, strict=True):
        file.write_text(text)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8))
    monkeypatch.setattr(machine, "CPU_QUOTAS", (("/nowhere",), files))
    assert cores() == 1
    monkeypatch.setattr(machine, "CPU_QUOTAS", (("/nowhere",),))
    assert cores() == 8
