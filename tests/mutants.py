"""Applies small faults to the product and reports which of them the unit tests see.

    python -m tests.mutants [--seed N] [--number 80] [--area AREA ...]

Each mutant changes one place: a comparison swapped, a check dropped, a number off by one, a call skipped, ``and`` for
``or``, ``min`` for ``max``. In a scratch copy of the repository the unit tests of its area run, first those that import
its module, then the others. It is killed when a test fails or does not end. A survivor lacks a test, or has no effect.

The same seed, number and areas choose the same mutants of the same source. The exit status is 1 below 95% killed.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import os
import queue
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]

AREAS = {
    "round": ("actors/round", "round length serving/routing/test_fair_order.py test_deadlines.py"),
    "verification": ("actors/verification", "verification"),
    "drafter": ("actors/drafter", "drafter"),
    "link": ("cluster/link", "link messages test_link_keeper.py"),
    "routing": ("actors/serving/routing", "serving/routing"),
    "registry": (
        "cluster/drafter_registry.py cluster/registry.py",
        "test_drafter_registry.py serving/test_registry_client.py serving/test_pool_scaling.py",
    ),
    "learning": ("actors/learning", "learning"),
}
"""Product files or folders, and below tests/unit the tests that should see a fault in them."""

SWAPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip

TESTS_WITHIN_S = 900.0  # a mutant that makes its tests hang is killed

PASSED, FAILED, BROKEN, NO_TESTS = 0, 1, 2, 5  # pytest's exit statuses; BROKEN: a module could not be imported


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


def test_files(mutant: Mutant) -> list[list[str]]:
    """Returns the test files of the mutant's area: those that import its module, then the others."""
    places = [ROOT / "tests/unit" / place for place in AREAS[mutant.area][1].split()]
    files = [file for at in places for file in (sorted(at.rglob("test_*.py")) if at.is_dir() else [at] * at.exists())]
    module = mutant.path.removesuffix(".py").replace("/", ".")
    near = [file for file in files if f"outrider.{module} " in file.read_text()]
    groups = filter(None, (near, [file for file in files if file not in near]))
    return [[str(file.relative_to(ROOT)) for file in group] for group in groups]


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


def run_tests(copy: Path, files: list[str]) -> int:
    """Returns pytest's exit status, FAILED where it did not end in time."""
    environment = {**os.environ, "PYTHONPATH": str(copy.parent / "path"), "UNIT_ORDER_SEED": "0"}
    options = ["-q", "-x", "-p", "no:cacheprovider", "-m", "not exhaustive"]
    try:
        command = [sys.executable, "-m", "pytest", *options, *files]
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, timeout=TESTS_WITHIN_S)
    except subprocess.TimeoutExpired:
        return FAILED
    if done.returncode not in (PASSED, FAILED, BROKEN, NO_TESTS) and done.returncode >= 0:
        raise RuntimeError(f"pytest: {done.stdout.decode()[-2000:]}{done.stderr.decode()[-2000:]}")
    return done.returncode


def is_killed(copy: Path, mutant: Mutant) -> bool:
    file = copy / mutant.path
    source = file.read_bytes()
    cached = Path(importlib.util.cache_from_source(str(file)))
    try:
        file.write_bytes(source[: mutant.start] + mutant.text.encode() + source[mutant.end :])
        cached.unlink(missing_ok=True)
        return any(run_tests(copy, files) not in (PASSED, NO_TESTS) for files in test_files(mutant))
    finally:
        file.write_bytes(source)
        cached.unlink(missing_ok=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1, 1_000_000))
    parser.add_argument("--number", type=int, default=80)
    parser.add_argument("--area", nargs="+", choices=list(AREAS), default=list(AREAS))
    parser.add_argument("--jobs", type=int, default=1, help="copies of the repository that are tested at once")
    options = parser.parse_args()
    drawn = sample(options.area, options.number, options.seed)
    print(f"--seed {options.seed} --number {options.number} --area {' '.join(options.area)}")
    copies: queue.Queue[Path] = queue.Queue()

    def judge(mutant: Mutant) -> bool:
        copy = copies.get()
        killed = is_killed(copy, mutant)
        copies.put(copy)
        change = f"{mutant.kind}: {mutant.was} -> {mutant.text}"
        print(f"{'killed  ' if killed else 'SURVIVED'} {mutant.path}:{mutant.line} {change}", flush=True)
        return killed

    with ExitStack() as stack:
        every = [stack.enter_context(scratch_copy()) for _ in range(options.jobs)]
        for files in {tuple(files) for mutant in drawn for files in test_files(mutant)}:
            if run_tests(every[0], list(files)) not in (PASSED, NO_TESTS):
                print(f"tests fail without any mutant: {' '.join(files)}", file=sys.stderr)
                return 2
        for copy in every:
            copies.put(copy)
        with ThreadPoolExecutor(options.jobs) as pool:
            results = list(pool.map(judge, drawn))
    for area in options.area:
        killed = [result for mutant, result in zip(drawn, results, strict=True) if mutant.area == area]
        print(f"{area:13} {sum(killed)} of {len(killed)} killed")
    print(f"{'all':13} {sum(results)} of {len(results)} killed")
    return int(sum(results) < 0.95 * len(results))


if __name__ == "__main__":
    sys.exit(main())
