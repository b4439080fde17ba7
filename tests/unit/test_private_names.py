"""Only the seams use vLLM's and Serve's internals: which of them is in test_overrides.py and test_serve_names.py."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
USES_VLLM = ("actors/vllm_adapter/", "actors/serving/openai/", "deploy/bench/")
"""Its internals; its own serving classes and its engine by their public names."""

USES_SERVE_PRIVATES = ("actors/serve_adapter/",)
NEITHER_S = ("_replace", "_exit", "_Options", "_plugins", "_ArgumentGroup", "_MutuallyExclusiveGroup")
"""Public in spite of their names, of named tuples and os; torch's ProcessGroupGloo, and its table of backends;
argparse's types."""


@cache
def modules() -> dict[str, ast.Module]:
    """By path."""
    files = [file for folder in ("actors", "cluster", "deploy") for file in sorted((ROOT / folder).rglob("*.py"))]
    return {str(file.relative_to(ROOT)): ast.parse(file.read_text()) for file in files}


def imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def dotted(node: ast.expr) -> str:
    """``a.b.c`` of such an expression; empty for another."""
    if isinstance(node, ast.Attribute):
        return f"{inner}.{node.attr}" if (inner := dotted(node.value)) else ""
    return node.id if isinstance(node, ast.Name) else ""


def test_vllm_is_imported_where_it_is_extended_and_by_its_own_serving_classes():
    wrong = [
        f"{path}: {name}"
        for path, tree in modules().items()
        for name in imported(tree)
        if name.split(".")[0] == "vllm" and not path.startswith(USES_VLLM)
    ]
    assert wrong == []


def test_ray_and_serve_privates_are_used_in_one_package():
    wrong = []
    for path, tree in modules().items():
        used = [*imported(tree), *(dotted(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute))]
        private = [name for name in used if name.startswith(("ray.", "serve.")) and "._" in name]
        if private and not path.startswith(USES_SERVE_PRIVATES):
            wrong.append(f"{path}: {private}")
    assert wrong == []


def own_names(tree: ast.Module) -> Iterator[str]:
    """Private names that the module gives to something: methods, attributes, globals."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.attr if isinstance(node, ast.Attribute) else node.id


def foreign_privates(path: str, tree: ast.Module, ours: set[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if node.attr.startswith("_") and not node.attr.endswith("__") and node.attr not in ours:
                yield node.attr
        elif (
            isinstance(node, ast.Call)
            and dotted(node.func) in ("getattr", "setattr", "hasattr")
            and isinstance(node.args[1], ast.Constant)
            and (name := str(node.args[1].value)).startswith("_")
            and not name.endswith("__")
            and name not in ours
        ):
            yield name


def test_private_attributes_of_others_are_touched_by_the_seams_alone():
    trees = modules()
    ours = {name for tree in trees.values() for name in own_names(tree)}
    for path, tree in trees.items():
        if not path.startswith(("actors/vllm_adapter/", *USES_SERVE_PRIVATES)):
            found = set(foreign_privates(path, tree, ours)) - set(NEITHER_S)
            assert found == set(), f"{path}: {found} belong to a seam"


def test_classes_are_rewritten_in_the_seams_alone():
    wrong = [
        path
        for path, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "__class__" and isinstance(node.ctx, ast.Store)
        if not path.startswith(("actors/vllm_adapter/", "actors/serve_adapter/"))
    ]
    assert wrong == []
