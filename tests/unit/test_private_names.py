"""Only the seams use vLLM's and Serve's internals: which of them is in test_overrides.py and test_serve_names.py."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
USES_VLLM = ("actors/vllm_adapter/", "actors/serving/openai/", "deploy/bench/", "deploy/llm/")
"""Its internals; its own serving classes and its engine by their public names."""

USES_SERVE_PRIVATES = ("actors/serve_adapter/",)


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
