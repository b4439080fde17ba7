"""``outrider versions``: what it lists, which version it goes back to, how it fails; ``outrider top`` shows them."""

from __future__ import annotations

import json

import grpc
import pytest

from outrider.actors.observability.exposition import Families, render
from outrider.actors.observability.metrics import add_drafter
from outrider.actors.serving.failures import CallFailure
from outrider.deploy.cli import main
from outrider.deploy.cli.top import picture
from outrider.deploy.top import View, learning_of_status, parse, view
from outrider.v1 import generation_pb2 as pb
from tests.unit.observability.test_replica_metrics import DRAFTER_STATUS
from tests.unit.observability.test_top import render as drawn
from tests.unit.scripted_service import ScriptedService

GAIN = pb.GateVerdict(
    reason="gain",
    recent=pb.GateDifference(mean=0.022, margin=0.008, texts=61),
    past=pb.GateDifference(mean=-0.002, texts=1),
)


def version(number: int, state: str, **more: object) -> pb.DrafterVersion:
    value = pb.DrafterVersionState.Value(f"DRAFTER_VERSION_STATE_{state}")
    return pb.DrafterVersion(number=number, state=value, **{"kept": True, **more})  # type: ignore[arg-type]


VERSIONS = [
    version(0, "REPLACED"),
    version(2, "REPLACED", verdict=GAIN, kept=False),
    version(3, "REPLACED", verdict=GAIN, step=400),
    version(4, "WITHDRAWN", verdict=GAIN, since=pb.GateDifference(mean=-0.04, margin=0.01, texts=20)),
    version(5, "SERVES", again=3),
]


@pytest.fixture
def learning(service: ScriptedService) -> pb.DrafterLearning:
    service.status.learning.CopyFrom(
        pb.DrafterLearning(serving=5, steps=900, tokens=12345, refused={"no_gain": 7, "forgets": 1}, versions=VERSIONS)
    )
    return service.status.learning


def test_versions_are_listed_with_what_let_them_in_and_what_became_of_them(address, learning, capsys):
    learning.last_comparison.CopyFrom(pb.GateVerdict(reason="no_gain", recent=pb.GateDifference(mean=0.004)))
    assert main(["versions", address]) == 0
    heading, serves, withdrawn, replaced, gone, _, last = capsys.readouterr().out.splitlines()
    assert heading == (
        "learning · version 5 serves · kept out: forgets 1, no_gain 7 · 900 steps, 12345 tokens of answers"
    )
    assert serves.startswith("  5      serves     3 again  [")
    assert withdrawn.startswith("  4      withdrawn  +0.022 ± 0.008 recent, -0.002 past; -0.040 ± 0.010 since  [")
    assert replaced.endswith(", step 400]")
    assert gone.endswith(" (not kept)")
    assert last == "last comparison: no_gain, +0.004 recent"


def test_the_same_as_json(address, learning, capsys):
    assert main(["versions", address, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["versions"][3]["gains"]["since"] == {"mean": -0.04, "margin": 0.01}
    assert told["refused"] == {"no_gain": 7, "forgets": 1}
    assert told["last_comparison"] is None


@pytest.mark.parametrize(
    ("arguments", "versions", "asked"),
    [
        (["--back", "0"], VERSIONS, 0),
        (["--back"], VERSIONS[:-1] + [version(5, "SERVES", verdict=GAIN)], 3),
        # What serves is 3 again, 4 was withdrawn, 2 is not kept.
        (["--back"], VERSIONS, 0),
        (["--back"], [version(0, "REPLACED"), version(1, "REVERTED"), version(2, "SERVES", again=0)], None),
    ],
    ids=["named", "the one before", "not the same again", "none"],
)
def test_going_back(address, service, learning, capsys, arguments, versions, asked):
    del learning.versions[:]
    learning.versions.extend(versions)
    status = main(["versions", address, *arguments])
    out, err = capsys.readouterr()
    reverted = [request.version for request in service.requests if isinstance(request, pb.RevertDrafterRequest)]
    if asked is None:
        assert (status, reverted) == (1, [])
        assert "--back: no version before" in err
        return
    assert (status, reverted) == (0, [asked])
    assert out == f"version {asked} serves again, as version 9\n"


def test_what_the_server_refuses_and_a_drafter_that_does_not_learn_are_one_line(address, service, capsys):
    assert main(["versions", address]) == 1
    assert "no drafter of this server learns" in capsys.readouterr().err
    service.status.learning.versions.extend(VERSIONS)
    service.failing.append(
        CallFailure(grpc.StatusCode.INVALID_ARGUMENT, "version: 7 is not kept; send one of 0, 3", "INVALID_REQUEST")
    )
    assert main(["versions", address, "--back", "7"]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "7 is not kept; send one of 0, 3" in err
    with pytest.raises(SystemExit):
        main(["versions", address, "--back", "x"])


def test_top_shows_the_latest_ones_from_metrics():
    families = Families()
    for replica in ("a", "b"):
        families.add("outrider:replica_up", 1.0, replica=replica)
    text = render(families)
    of_replica = Families()
    add_drafter(of_replica, DRAFTER_STATUS)
    with_name = render(of_replica).replace("{", '{replica="b",')
    found = view(None, parse(text + with_name, 0.0)).learning
    assert found is not None
    assert found.refused == {"no_gain": 2}
    lines = drawn(View(0.0, learning=found))
    assert lines[-3] == "learning · kept out: no_gain 2"
    assert lines[-2].strip() == "3      withdrawn  +0.050 ± 0.020 recent, -0.010 past; -0.250 ± 0.125 since"
    assert lines[-1].split() == ["0", "replaced"]


def test_top_shows_the_latest_ones_from_the_status_too(learning):
    found = learning_of_status(pb.GetServerStatusResponse(learning=learning))
    assert found is not None
    lines = drawn(View(0.0, learning=found))
    assert lines[-5].startswith("learning · version 5 serves")
    assert [line.split()[0] for line in lines[-4:]] == ["5", "4", "3", "2"]
    assert picture(View(0.0)) is not None
