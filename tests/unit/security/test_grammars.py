"""Constraints of strangers, in real processes: refused by what they cost, ended alone, and nobody else waits.

Nothing here is measured on a clock: bounds are of processor time, which the kernel keeps."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

from outrider.actors.grammars.bounds import Bounds, Ending
from outrider.actors.grammars.host import Constraint, ConstraintEnded, GrammarHost, Matcher, Room, gather
from tests.security_vocabulary import EOS, serialised, vocabulary

HANG_GUARD_S = 400.0
WORDS = (len(vocabulary()) + 31) // 32
BOMB = 'root ::= (x|y|z)*\nx ::= "a"\ny ::= "b"\nz ::= root [a-z ]\n'
"""80 bytes, each text of which can be read in ever more ways."""

CORNER = 'root ::= "#" bomb | [0-9]+\nbomb ::= (x|y|z)*\nx ::= "a"\ny ::= "b"\nz ::= bomb [a-z ]\n'
"""The same, behind a text that a walk of the grammar's own finds seldom, and a prompt gets to at once."""

OPTIONAL = json.dumps({"type": "object", "properties": {f"property {i}": {"enum": ["a", "b"]} for i in range(6000)}})
UNFOLDS = "((a{1,200}){1,200}){1,200}"

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
    hostile = room(host, "ebnf", CORNER).matcher([EOS])
    neighbour = room(host, "json", '{"type": "object"}').matcher([EOS])
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
    assert allowed(room(host, "ebnf", CORNER).matcher([EOS])), "others may still send the same"


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
