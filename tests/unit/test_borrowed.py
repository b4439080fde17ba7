"""What is looked for in another project, on a project of this file's own."""

from __future__ import annotations

import functools
import sys
import types
from dataclasses import dataclass

import pytest
import torch

from outrider.cluster.borrowed import Borrowed, Project, Table, rows
from outrider.cluster.config import ConfigError
from outrider.cluster.link.leans_on import LEANS_ON

LIMIT = 3


def decorated(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        return function(*args, **kwargs)

    return call


class Parent:
    declared: int

    def __init__(self) -> None:
        self.inherited, self.other = 1, 2


class Queue(Parent):
    @decorated
    def push(self, item, *, wait=False):
        self.late = lambda: LIMIT
        return self.room()

    def room(self):
        return self.inherited

    def anything(self, **options): ...

    @staticmethod
    def fixed(a): ...


@dataclass
class Batch:
    rows: list
    width: int = 1


@pytest.fixture(autouse=True)
def named(monkeypatch):
    here = types.ModuleType("borrowed_from")
    for name in ("LIMIT", "Queue", "Batch", "Parent"):
        setattr(here, name, globals()[name])
    monkeypatch.setitem(sys.modules, "borrowed_from", here)


def problems(name: str, **wanted) -> list[str]:
    return Table(Project("It", ("pytest",), "1"), "us", (Borrowed(f"borrowed_from:{name}", "", **wanted),)).problems()


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("LIMIT", {"read_by": ("borrowed_from:Queue.push",)}),  # in a function inside it
        ("Queue", {"also": ("declared", "inherited", "other", "late", "push")}),
        ("Queue.inherited", {"read_by": ("borrowed_from:Queue.room",)}),
        ("Queue.push", {"takes": ("wait",)}),
        ("Queue.push", {"exactly": ("item", "wait")}),
        ("Queue.room", {"exactly": (), "read_by": ("borrowed_from:Queue.push",)}),
        ("Queue.anything", {"takes": ("whatever",)}),
        ("Queue.fixed", {"exactly": ("a",)}),
        ("Batch", {"exactly": ("rows", "width"), "also": ("rows",)}),
        ("LIMIT", {"value": 3}),
    ],
)
def test_what_is_there_is_found(name, wanted):
    assert problems(name, **wanted) == []


@pytest.mark.parametrize(
    ("name", "wanted", "problem"),
    [
        ("LIMITS", {}, "borrowed_from.LIMITS does not exist"),
        ("Queue.peek", {}, "borrowed_from.Queue.peek does not exist"),
        ("Queue", {"also": ("late", "early")}, "borrowed_from.Queue.early does not exist"),
        ("Queue.push.item", {}, "borrowed_from.Queue.push.item does not exist"),
        ("Queue.push", {"takes": ("item", "patience")}, "borrowed_from.Queue.push takes no patience"),
        ("Queue.push", {"exactly": ("item",)}, "borrowed_from.Queue.push takes (item, wait) in place of (item)"),
        ("Batch", {"takes": ("height",)}, "borrowed_from.Batch takes no height"),
        (
            "LIMIT",
            {"read_by": ("borrowed_from:Queue.room",)},
            "borrowed_from.Queue.room no longer looks up borrowed_from.LIMIT",
        ),
        ("LIMIT", {"read_by": ("borrowed_from:Queue.gone",)}, "borrowed_from.Queue.gone does not exist"),
        ("LIMIT", {"value": 4}, "borrowed_from.LIMIT is 3 in place of 4"),
    ],
)
def test_what_is_not_is_named(name, wanted, problem):
    assert problems(name, **wanted) == [problem]


def test_a_module_that_is_gone_is_named_and_one_that_breaks_is_not_taken_for_it(tmp_path, monkeypatch):
    (tmp_path / "breaks_inside.py").write_text("import no_such_module_anywhere")
    monkeypatch.syspath_prepend(str(tmp_path))
    table = Table(Project("It", (), "1"), "us", (Borrowed("no_such_package.part:name", ""),))
    assert table.problems() == ["no_such_package.part does not exist"]
    with pytest.raises(ModuleNotFoundError, match="no_such_module_anywhere"):
        Table(Project("It", (), "1"), "us", (Borrowed("breaks_inside:name", ""),)).problems()


def test_the_refusal_says_which_versions_it_is_about():
    table = Table(Project("PyTest", ("pytest",), "0.1"), "ours.py", (Borrowed("borrowed_from:gone", ""),))
    with pytest.raises(ConfigError) as refused:
        table.check()
    assert str(refused.value) == (
        f"pytest: borrowed_from.gone does not exist (PyTest {pytest.__version__} is installed, ours.py was written for "
        "0.1); install PyTest 0.1"
    )


def test_a_table_is_written_as_text():
    text = """
m:A.f(a, b, ...) [g, h] < m:A.run, m:B.run: why: it takes more
m:A.g(a): exactly this
m:A.h(): exactly nothing
m:X: goes
    on < here
"""
    assert rows(text) == (
        Borrowed("m:A.f", "why: it takes more", takes=("a", "b"), read_by=("m:A.run", "m:B.run"), also=("g", "h")),
        Borrowed("m:A.g", "exactly this", exactly=("a",)),
        Borrowed("m:A.h", "exactly nothing", exactly=()),
        Borrowed("m:X", "goes on < here"),
    )


@pytest.mark.parametrize("line", ["m:A.f", "m:A.f(a: why", "m:A.f [g: why", "m:A.f <: why", "m:A.f(a) g: why", ": w"])
def test_what_is_no_row_is_refused(line):
    with pytest.raises(ValueError, match="no row of a table"):
        rows(f"m:A.g: there\n{line}\nm:A.h: there")


def test_torch_has_what_links_lean_on(monkeypatch):
    assert LEANS_ON.problems() == []
    c10d = torch.distributed.distributed_c10d
    monkeypatch.delattr(c10d, "_DistributedBackendOptions")
    monkeypatch.setattr(c10d, "_new_process_group_helper", lambda: None)
    assert LEANS_ON.problems() == [
        "torch.distributed.distributed_c10d._new_process_group_helper no longer looks up "
        "torch.distributed.Backend._plugins",
        "torch.distributed.distributed_c10d._DistributedBackendOptions does not exist",
    ]
