"""Who drafts for whom, under which epoch, and when a replica counts as gone."""

import asyncio

import pytest

from outrider.cluster import registry as actor
from outrider.cluster.config import parse_config
from outrider.cluster.drafter_registry import SETTLE_S, DrafterRegistry, LinkReport, Member, Verifier, Work, fingerprint
from outrider.cluster.registry import Registry


def grant(members, verifier, unreachable=(), last_epoch=0, now=0.0):
    return members.grant(Verifier(verifier), set(unreachable), last_epoch, now)


def assigned(members, verifier, now=0.0):
    return members.assigned_to(verifier if isinstance(verifier, Verifier) else Verifier(verifier), now).drafter


@pytest.fixture
def two():
    """Return two replicas with a drafter each."""
    members = DrafterRegistry()
    members.renew(Member("r1", "D1"), 10, now=0)
    members.renew(Member("r2", "D2"), 10, now=0)
    return members


def test_a_verifier_gets_its_own_drafter_which_is_nobody_else_s_by_assignment(two):
    for verifier, drafter in (("r1", "D1"), ("r2", "D2")):
        assert (grant(two, verifier).drafter, assigned(two, verifier)) == (drafter, drafter)
    two.leave("r1")
    assert assigned(two, "r1") is None


def test_every_grant_has_a_higher_epoch_than_all_before_whatever_registry_granted_them(two):
    epochs = [grant(two, verifier).epoch for verifier in ("r1", "r2", "r1", "r1")]
    assert epochs == sorted(set(epochs))
    assert epochs[0] >= 1
    assert grant(two, "r1", last_epoch=7).epoch == 8
    assert grant(two, "r2", last_epoch=3).epoch == 9
    anew = DrafterRegistry()
    anew.renew(Member("r1"), 10, now=0)
    assert grant(anew, "r1", last_epoch=41) is None, "no drafter has come back yet"
    assert anew.epoch == 0
    anew.renew(Member("r1", "D1"), 10, now=0)
    assert grant(anew, "r1", last_epoch=41).epoch == 42


def test_another_s_drafter_steps_in_for_an_unreachable_one_while_there_is_another(two):
    assert grant(two, "r1", {"D1"}).drafter == "D2"
    assert assigned(two, "r1") == "D1", "its own it is to go back to"
    assert grant(two, "r1", {"D1", "D2"}).drafter == "D1"
    two.renew(Member("r1"), 10, now=0)
    assert grant(two, "r1", {"D2"}).drafter == "D2", "the only one is tried again"


def test_a_replica_that_does_not_renew_is_gone_with_drafter_and_link(two):
    two.links["r1"] = LinkReport("up", 1, "D1")
    grant(two, "r1")
    two.renew(Member("r2", "D2"), 10, now=9)
    two.expire(now=10)
    assert two.ends.keys() == two.members.keys() == {"r2"}
    assert (two.links, two.verifiers, two.assigned) == ({}, {}, {})
    two.expire(now=18.9)
    assert two.ends.keys() == {"r2"}


def test_whose_replica_is_gone_when_it_tells_of_its_link_is_gone_too(two):
    two.leave("r1")
    two.report("r1", LinkReport("up", 1, "D2"))
    assert two.users("D2") == ["r1"]
    two.expire(now=1)
    assert two.users("D2") == []


def test_a_replica_whose_drafter_does_not_load_drafts_for_nobody():
    members = pool("D1")
    members.renew(Member("p-D2", pooled=True, trouble="OSError: no such file"), 1000, now=0)
    assert [assigned(members, f"v{n}") for n in range(3)] == ["D1"] * 3
    members.renew(Member("p-D2", "D2", pooled=True), 1000, now=0)
    assert assigned(members, "v3") == "D2"


def pool(*drafters, nodes=None, **changes):
    members = DrafterRegistry()
    for name in drafters:
        node = (nodes or {}).get(name, "")
        members.renew(Member(f"p-{name}", name, pooled=True, node=node, **changes), 1000, now=0)
    return members


def shares(members, verifiers, now=0.0):
    found = [assigned(members, verifier, now) for verifier in verifiers]
    return sorted(found.count(name) for name in set(found))


@pytest.mark.parametrize(
    ("num_verifiers", "num_drafters", "expected"),
    [(1, 1, [1]), (4, 1, [4]), (4, 2, [2, 2]), (5, 2, [2, 3]), (3, 4, [1, 1, 1]), (8, 3, [2, 3, 3])],
)
def test_a_pool_is_shared_evenly_and_then_nobody_moves(num_verifiers, num_drafters, expected):
    members = pool(*(f"D{n}" for n in range(num_drafters)))
    verifiers = [f"r{n}" for n in range(num_verifiers)]
    assert shares(members, verifiers) == expected
    before = dict(members.assigned)
    for now in range(100):
        shares(members, verifiers, now * SETTLE_S)
    assert members.assigned == before


def test_one_target_moves_to_a_drafter_that_nobody_uses_from_the_fullest():
    members = pool("D1", "D2")
    verifiers = [Verifier(f"r{n}", linked_to="D1" if n < 2 else "D2") for n in range(5)]
    for verifier in verifiers:
        members.assigned_to(verifier, 0.0)
    members.renew(Member("p-D3", "D3", pooled=True), 1000, now=0)
    early = [assigned(members, verifier, SETTLE_S / 2) for verifier in verifiers]
    assert early == ["D1", "D1", "D2", "D2", "D2"], "others may have the third one: they have not asked yet"
    for now in range(1, 9):
        found = [assigned(members, verifier, now * SETTLE_S) for verifier in verifiers]
    assert found == ["D1", "D1", "D3", "D2", "D2"]


def test_a_drafter_that_comes_later_takes_one_of_two_targets():
    members = pool("D1")
    assert shares(members, ["r0", "r1"]) == [2]
    members.renew(Member("p-D2", "D2", pooled=True), 1000, now=0)
    assert shares(members, ["r0", "r1"], SETTLE_S) == [1, 1]


def test_of_two_drafters_with_the_same_load_the_one_on_the_targets_node_is_used():
    members = pool("D1", "D2", nodes={"D1": "far", "D2": "near"})
    here = [Verifier(f"r{n}", node="near") for n in range(4)]
    assert assigned(members, here[0]) == "D2"
    assert shares(members, here) == [2, 2], "it gets no more than the other for that"
    assert assigned(pool("D1", "D2"), Verifier("r0")) == "D1", "a node that is not known is nobody's"


def test_those_who_have_lost_their_drafter_for_a_while_part_among_the_others():
    """They all ask at once, and it stays the one that they are assigned."""
    members = pool("D1", "D2", "D3")
    verifiers = [Verifier(f"r{n}") for n in range(12)]
    for verifier in verifiers:
        members.assigned_to(verifier, 0.0)
    orphans = [verifier for verifier in verifiers if members.assigned[verifier.name] == "D1"]
    assert len(orphans) == 4
    lent = [grant(members, orphan.name, {"D1"}).drafter for orphan in orphans]
    assert sorted(lent) == ["D2", "D2", "D3", "D3"]
    assert [grant(members, orphan.name).drafter for orphan in orphans] == ["D1"] * 4, "it is back"
    assert grant(members, orphans[0].name, {"D1"}).drafter == lent[0], "and nothing is lent any more"
    members.leave("p-D1")
    assert {assigned(members, orphan) for orphan in orphans} == {"D2", "D3"}, "at once, for good"


def test_a_drafter_that_drains_is_left_by_all_at_once():
    members = pool("D1", "D2")
    assert shares(members, ["r1", "r2", "r3", "r4"]) == [2, 2]
    assert members.drain("p-D2") == []
    members.renew(Member("p-D2", "D2", pooled=True), 1000, now=0)  # was on its way, and does not bring it back
    assert [assigned(members, f"r{n}", now=0.1) for n in range(1, 5)] == ["D1"] * 4
    assert members.drain("p-D1") == []
    assert assigned(members, "r1", now=0.2) is None
    assert grant(members, "r1", now=0.2) is None, "none is better than one that goes"


def test_who_must_move_is_told_so_and_who_waits_for_it_knows_for_whom():
    members = pool("D1", "D2")
    linked = [Verifier("r1", linked_to="D1"), Verifier("r2", linked_to="D2")]
    for each in linked:
        assert not members.assigned_to(each, 0.0).at_once
        members.links[each.name] = LinkReport("up", 1, each.linked_to)
    assert members.drain("p-D1") == ["r1"]
    assert members.assigned_to(linked[0], 1.1).at_once
    assert not members.assigned_to(linked[1], 1.1).at_once
    members.links["r1"] = LinkReport("up", 2, "D2")
    assert members.drain("p-D1") == [], "it has gone"
    assert members.drain("p-D2") == [], "both are still here, and have nowhere to go"
    assert members.drain("nobody") == []


def test_only_drafters_of_the_same_models_and_protocol():
    members = pool("D1", fingerprint="old")
    assert assigned(members, Verifier("r1", "new")) is None
    assert grant(members, "r1") is None
    members.renew(Member("p-D2", "D2", pooled=True, fingerprint="new"), 1000, now=0)
    assert assigned(members, Verifier("r1", "new")) == "D2"
    assert assigned(members, Verifier("r2", "old")) == "D1"


def test_what_the_fingerprint_holds():
    def of(drafter, target="t", **sections):
        return fingerprint(parse_config({"target": {"model": target}, "drafter": drafter, **sections}))

    model = {"method": "draft_model", "model": "d"}
    elsewhere = [{"placement": "pool", "num_drafters": 3}, {"cores": [[0]]}, {"node_labels": {"zone": "a"}}]
    same = [of(model), *(of({**model, **each}) for each in elsewhere)]
    assert len(set(same)) == 1, "where it runs is no part of it"
    others = [
        of({**model, "model": "e"}),
        of(model, target="u"),
        of({**model, "engine_args": {"revision": "r"}}),
        of({"method": "ngram"}),
        of(model, speculation={"num_speculative_tokens": 7}),
    ]
    assert len({*same, *others}) == 1 + len(others)


def test_a_registry_that_was_made_anew_moves_nobody_before_all_have_asked():
    members = pool("D1", "D2")
    linked = [Verifier(f"r{n}", linked_to="D1" if n < 2 else "D2") for n in range(4)]
    for now in range(20):
        found = [assigned(members, each, now + n / 4) for n, each in enumerate(linked)]
        assert found == ["D1", "D1", "D2", "D2"]


def test_a_registry_that_was_made_anew_waits_for_a_drafter_that_is_slow_to_tell():
    members = pool("D2")
    linked = [Verifier("r0", linked_to="D1"), Verifier("r1", linked_to="D2")]
    assert [assigned(members, each) for each in linked] == ["D1", "D2"]
    members.renew(Member("p-D1", "D1", pooled=True), 1000, now=1)
    for now in range(10):
        assert [assigned(members, each, 2 + now * SETTLE_S) for each in linked] == ["D1", "D2"]


def test_a_registry_that_was_made_anew_knows_who_has_to_move():
    members = pool("D1", "D2")
    assigned(members, Verifier("r0", linked_to="D1"))
    assert members.users("D1") == ["r0"]
    assert members.drain("p-D1") == ["r0"]


def test_a_report_that_was_lost_is_made_good_by_what_is_asked_next():
    members = pool("D1", "D2")
    assigned(members, "r0")
    members.report("r0", LinkReport("up", 1, "D1"))
    members.report("r0", LinkReport("up", 1, "D1", rtt_us=5.0))
    assigned(members, Verifier("r0", linked_to="D1"))
    assert members.links["r0"].rtt_us == 5.0, "what is known of a link stays"
    assigned(members, Verifier("r0", linked_to="D2"))
    assert (members.users("D1"), members.users("D2")) == ([], ["r0"])
    grant(members, "r0")
    assert members.users("D2") == []
    assert members.links["r0"].state == "down"


def test_what_targets_do_is_known_though_their_drafter_is_not():
    """A registry was made anew, and the lease of a pool's replica is over: its drafter drafts on."""
    members = pool("D1")
    members.renew(Member("r0"), 10, now=0)
    busy = Work(3, 60.0, 40.0)
    assert assigned(members, Verifier("r0", linked_to="D9", work=busy)) == "D9"
    assert members.verifiers["r0"].work == busy
    members.expire(now=10)
    assert members.verifiers == {}


async def test_the_actor_forgets_who_does_not_renew(monkeypatch):
    monkeypatch.setattr(actor, "HEARTBEAT_S", 0.001)
    registry = Registry()
    await registry.renew(Member("p", "D1", pooled=True), 0.0)
    await registry.renew(Member("q", "D2", pooled=True))
    for _ in range(5):
        await asyncio.sleep(0.001)
    assert (await registry.drafters()).keys() == {"D2"}


async def test_the_actor_answers_from_what_replicas_and_verifiers_tell_it():
    registry, up = Registry(), LinkReport("up", 1, "D1")
    await registry.renew(Member("p", "D1", pooled=True))
    await registry.renew(Member("q", pooled=True, trouble="no such file"))
    assert (await registry.grant(Verifier("r1"), set(), 4)).epoch == 5
    assert (await registry.assigned_to(Verifier("r1"))).drafter == "D1"
    await registry.report("r1", up)
    assert await registry.links() == {"r1": up}
    assert await registry.drafters() == {"D1": ["r1"]}
    assert await registry.troubles() == {"q": "no such file"}
    assert await registry.drain("p") == [], "there is no other drafter"
    await registry.leave("p")
    assert await registry.drafters() == {}
