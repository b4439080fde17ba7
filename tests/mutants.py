"""Applies small faults to the product and reports which of them the unit tests see.

    python -m tests.mutants [--seed N] [--number 80] [--area AREA ...]

Each mutant changes one place: a comparison swapped, a check dropped, a number off by one, a call skipped, ``and`` for
``or``, ``min`` for ``max``. A process collects the unit tests of an area, in a scratch copy of the repository. For each
mutant a fork of it takes over the changed function and runs the tests that call it until one fails. A mutant that no
test calls, or in a file with Triton's kernels, is written to the copy, where all tests of the area run. It is killed
when a test fails or does not end. A survivor lacks a test, or has no effect.

The same seed, number and areas choose the same mutants of the same source. The exit status is 1 below 95% killed.
"""

from __future__ import annotations

import argparse
import ast
import gc
import importlib.util
import inspect
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]

AREAS = {
    "round": (
        "actors/round",
        "round length serving/routing/test_fair_order.py test_deadlines.py test_round_origins.py",
    ),
    "verification": ("actors/verification", "verification"),
    "drafter": ("actors/drafter", "drafter"),
    "link": (
        "cluster/link",
        "link messages test_link_keeper.py "
        "../integration/test_link_rendezvous.py ../integration/test_link_processes.py",
    ),
    "routing": ("actors/serving/routing", "serving/routing"),
    "registry": (
        "cluster/drafter_registry.py cluster/registry.py",
        "test_drafter_registry.py serving/test_registry_client.py serving/test_pool_scaling.py",
    ),
    "learning": ("actors/learning", "learning drafter/test_training_samples.py drafter/test_learning_member.py"),
}
"""Product files or folders, and by their places from tests/unit the tests that should see a fault in them."""

SWAPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip

LEAST_S, MOST_TIMES = 20.0, 10.0
"""A test fails when it takes this and so many times what it takes without a mutant."""

SLOW_S = 0.5
"""Tests that take longer run after the others."""

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.conftest", "torch", "transformers", "ray", "grpc", "hypothesis", "zmq", "msgspec"])


@dataclass(frozen=True)
class Mutant:
    """Names one change. start and end: places in the file, in bytes."""

    area: str
    path: str
    line: int
    kind: str
    start: int
    end: int
    was: str
    text: str

    def of(self, source: bytes) -> bytes:
        """Returns the source with the change, which moves no other line."""
        lines = "\n" * (self.was.count("\n") - self.text.count("\n"))
        text = self.text if not lines else f"({lines}{self.text})" if self.kind != "call skipped" else self.text + lines
        return source[: self.start] + text.encode() + source[self.end :]


class Finder(ast.NodeVisitor):
    """Collects the mutants of one file: changes inside functions, but not of logging or messages."""

    def __init__(self, area: str, path: str, source: bytes) -> None:
        self._area, self._path, self._source, self._depth = area, path, source, 0
        lengths = [len(line) for line in source.splitlines(keepends=True)]
        self._starts = [sum(lengths[:number]) for number in range(len(lengths))]
        self.found: list[Mutant] = []
        self.visit(ast.parse(source))

    def _add(self, node: ast.expr | ast.stmt, kind: str, text: str) -> None:
        if self._depth:
            start = self._starts[node.lineno - 1] + node.col_offset
            end = self._starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
            was = self._source[start:end].decode()
            self.found.append(Mutant(self._area, self._path, node.lineno, kind, start, end, was, text))

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if node.name in ("__repr__", "__str__"):
            return
        self._depth += 1
        for statement in node.body:
            self.visit(statement)
        self._depth -= 1

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

    def visit_Raise(self, node: ast.Raise) -> None:
        """Leaves out errors, whose words are no behaviour."""

    visit_JoinedStr = visit_Assert = visit_Raise  # type: ignore[assignment]

    def visit_If(self, node: ast.If) -> None:
        if isinstance(node.body[0], ast.Raise | ast.Return | ast.Continue | ast.Break) and not node.orelse:
            self._add(node.test, "check dropped", "False")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        call = node.value.value if isinstance(node.value, ast.Await) else node.value
        if not isinstance(call, ast.Call) or ast.unparse(call.func).startswith(("logger.", "super(")):
            return
        self._add(node, "call skipped", "pass")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1 and type(node.ops[0]) in SWAPPED:
            swapped = ast.Compare(node.left, [SWAPPED[type(node.ops[0])]()], node.comparators)
            self._add(node, "comparison swapped", f"({ast.unparse(swapped)})")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        other = ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
        self._add(node, "and for or", f"({ast.unparse(other)})")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._add(node, "not dropped", f"({ast.unparse(node.operand)})")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in ("min", "max"):
            self._add(node.func, "min for max", "max" if node.func.id == "min" else "min")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if type(node.value) is int:
            self._add(node, "off by one", str(node.value + 1))


def mutants(area: str) -> list[Mutant]:
    """Returns every mutant of an area, in the order of its files."""
    found: list[Mutant] = []
    for at in (ROOT / place for place in AREAS[area][0].split()):
        for path in sorted(at.rglob("*.py")) if at.is_dir() else [at]:
            found += Finder(area, str(path.relative_to(ROOT)), path.read_bytes()).found
    return found


def sample(areas: list[str], number: int, seed: int) -> list[Mutant]:
    """Draws as many mutants of each area, so that a large one does not crowd out the others."""
    dice, drawn = random.Random(seed), []
    for place, area in enumerate(areas):
        every = mutants(area)
        share = number // len(areas) + (place < number % len(areas))
        drawn += dice.sample(every, min(share, len(every)))
    return drawn


@contextmanager
def scratch_copy() -> Iterator[Path]:
    """Makes a copy of the repository in which ``outrider`` is the copy's own."""
    with tempfile.TemporaryDirectory(prefix="outrider-mutants-") as name:
        copy = Path(name) / "repository"
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        for file in subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0"):
            if file and (ROOT / file).is_file():
                (copy / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / file, copy / file)
        package = Path(name) / "path/outrider"
        package.mkdir(parents=True)
        for inner in ("actors", "cluster", "deploy", "protos/outrider/v1", "protos/outrider/__init__.py"):
            (package / Path(inner).name).symlink_to(copy / inner)
        yield copy


def _changed(old: CodeType, new: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    """Yields the functions that a mutant changes, before and after, each before those that are defined in it."""
    if old.co_flags & inspect.CO_OPTIMIZED:  # a function, else a module's or a class's code
        if old == new:
            return
        yield old, new
    both = [[const for const in code.co_consts if isinstance(const, CodeType)] for code in (old, new)]
    for inner in zip(*both, strict=False):
        yield from _changed(*inner)


def changed(mutant: Mutant) -> list[tuple[CodeType, CodeType]]:
    source = (ROOT / mutant.path).read_bytes()
    return list(
        _changed(*(compile(text, mutant.path, "exec", dont_inherit=True) for text in (source, mutant.of(source))))
    )


def put_in(mutant: Mutant) -> bool:
    """Puts a mutant into the functions of this process. Returns whether there were any."""
    functions = [each for each in gc.get_objects() if type(each) is FunctionType]
    found = False
    for old, new in changed(mutant):
        for function in functions:
            code, place = function.__code__, (old.co_qualname, old.co_firstlineno)
            if code.co_filename.endswith(mutant.path) and (code.co_qualname, code.co_firstlineno) == place:
                function.__code__ = new.replace(co_filename=code.co_filename)
                found = True
    return found


def in_fork(run: Callable[[], Any]) -> Any:
    """Returns what `run` returns in a fork of this process, ``"a crash"`` if it does not return."""
    results, sender = multiprocessing.Pipe(duplex=False)
    if (pid := os.fork()) == 0:
        os.setsid()
        try:
            sender.send(run())
        finally:
            os._exit(0)
    sender.close()
    try:
        return results.recv()
    except EOFError:
        return "a crash"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


class Session:
    """Runs the tests of one area once for each mutant, in forks of a process that has collected them.

    The first run is without a mutant, and notes how long each test takes and which functions it calls.
    """

    def __init__(self, mutants: Sequence[Mutant], results: Connection) -> None:
        self._mutants, self._results = mutants, results

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Sends what fails without a mutant, ``""`` if nothing does, and then what fails with each: see `_killer`."""
        notes = in_fork(lambda: _note(session))
        if isinstance(notes, str):
            self._results.send(notes)
            return True
        for item in session.items:
            item.add_marker(pytest.mark.timeout(LEAST_S + MOST_TIMES * notes[item.nodeid][0]), append=False)
        self._results.send("")
        for mutant in self._mutants:
            self._results.send(self._killer(mutant, session, notes))
        return True

    def _killer(self, mutant: Mutant, session: pytest.Session, notes: Notes) -> str | None:
        """Returns the test that fails, ``""`` if none does; None if no test calls the function, or Triton compiles
        it from its source."""
        called = {(mutant.path, old.co_firstlineno) for old, _ in changed(mutant)}
        reached = [item for item in session.items if not called.isdisjoint(notes[item.nodeid][1])]
        if not reached or "triton" in (ROOT / mutant.path).read_text():
            return None
        reached.sort(key=lambda item: notes[item.nodeid][0] > SLOW_S)
        return in_fork(lambda: _run(session, reached) if put_in(mutant) else None)


Notes = dict[str, tuple[float, set[tuple[str, int]]]]
"""Of each test the seconds that it takes, and files and first lines of the product's functions that it calls."""


def _run(session: pytest.Session, items: Sequence[pytest.Item]) -> str:
    """Returns the first test that fails."""
    for item, following in zip(items, [*items[1:], None], strict=True):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.testsfailed:
            return item.nodeid
    return ""


def _note(session: pytest.Session) -> Notes | str:
    """Returns the notes, or the first test that fails."""
    notes: Notes = {}
    seen: set[CodeType] = set()
    product = f"{session.config.rootpath.parent}/path/outrider/"

    def called(frame: FrameType, event: str, _: Any) -> None:
        seen.add(frame.f_code)

    threading.settrace(called)
    for item in session.items:
        item.add_marker(pytest.mark.timeout(0), append=False)
        seen.clear()
        start = time.monotonic()
        sys.settrace(called)
        failed = _run(session, [item])  # by itself, so that it makes its fixtures itself
        sys.settrace(None)
        if failed:
            return failed
        ours = [code for code in tuple(seen) if code.co_filename.startswith(product)]
        places = {(code.co_filename.removeprefix(product), code.co_firstlineno) for code in ours}
        notes[item.nodeid] = time.monotonic() - start, places
    return notes


def _pytest(copy: Path, files: list[str], mutants: Sequence[Mutant] | None, results: Connection) -> None:
    """Runs pytest in this process, with a Session where there are mutants, and ends it."""
    os.setsid()
    os.chdir(copy)
    os.environ.update(PYTHONPATH=str(copy.parent / "path"), UNIT_ORDER_SEED="0", OMP_NUM_THREADS="1")
    sys.path[:] = [str(copy.parent / "path"), str(copy), *(path for path in sys.path if path != str(ROOT))]
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    torch.set_num_threads(1)  # torch's other threads would be missing in the forks, which would wait for them
    output = os.open(copy.parent / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    plugins = [] if mutants is None else [Session(mutants, results)]
    status = pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-m", "not exhaustive", *files], plugins)
    results.send("" if status == pytest.ExitCode.OK else f"pytest: {status}")
    os._exit(0)


@contextmanager
def started(copy: Path, files: list[str], mutants: Sequence[Mutant] | None = None) -> Iterator[Connection]:
    """Starts pytest in a process forked from one that has imported the libraries. Yields where its results come."""
    results, sender = FORKS.Pipe(duplex=False)
    process = FORKS.Process(target=_pytest, args=(copy, files, mutants, sender))
    process.start()
    sender.close()
    try:
        yield results
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()


def killer_on_disk(copy: Path, mutant: Mutant, files: list[str]) -> str:
    """Runs all tests of the area in a new process with the mutant in the file."""
    file = copy / mutant.path
    source = file.read_bytes()
    file.write_bytes(mutant.of(source))
    Path(importlib.util.cache_from_source(str(file))).unlink(missing_ok=True)
    try:
        with started(copy, files) as results:
            return results.recv()
    except EOFError:
        return "a crash"
    finally:
        file.write_bytes(source)


def judge(drawn: Sequence[Mutant]) -> Iterator[tuple[Mutant, str]]:
    """Yields each mutant of one area with the test that fails, or ``""``."""
    with scratch_copy() as copy:
        places = [ROOT / "tests/unit" / place for place in AREAS[drawn[0].area][1].split()]
        files = [str(place.relative_to(ROOT)) for place in places if place.exists()]
        with started(copy, files, drawn) as results:
            failed = results.recv()
            if failed:
                output = (copy.parent / "output").read_text(errors="replace")
                raise RuntimeError(f"{failed} fails without any mutant:\n{output[-20000:]}")
            on_disk = []
            for mutant in drawn:
                killer = results.recv()
                if killer is None:
                    on_disk.append(mutant)
                else:
                    yield mutant, killer
        for mutant in on_disk:
            yield mutant, killer_on_disk(copy, mutant, files)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1, 1_000_000))
    parser.add_argument("--number", type=int, default=80)
    parser.add_argument("--area", nargs="+", choices=list(AREAS), default=list(AREAS))
    options = parser.parse_args()
    drawn = sample(options.area, options.number, options.seed)
    print(f"--seed {options.seed} --number {options.number} --area {' '.join(options.area)}")
    killed: Counter[str] = Counter()
    for area in options.area:
        of_area = [mutant for mutant in drawn if mutant.area == area]
        print(f"{area:13} its tests run once without a mutant", flush=True)
        for mutant, killer in judge(of_area):
            change = f"{mutant.path}:{mutant.line} {mutant.kind}: {mutant.was} -> {mutant.text}"
            print(f"killed   {change} by {killer}" if killer else f"SURVIVED {change}", flush=True)
            killed[area] += bool(killer)
        print(f"{area:13} {killed[area]} of {len(of_area)} killed")
    print(f"{'all':13} {killed.total()} of {len(drawn)} killed")
    return int(killed.total() < 0.95 * len(drawn))


if __name__ == "__main__":
    sys.exit(main())
