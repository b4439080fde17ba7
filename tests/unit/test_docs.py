"""Names in the docs exist: files, tests, commands, configuration keys."""

import re
import typing
from pathlib import Path

import pytest
from pydantic import BaseModel

from outrider.cluster.config import OutriderConfig
from outrider.deploy.cli import COMMANDS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OF_BENCH = {"serving.way_ms", "serving.added_share"}  # in the JSON of `outrider bench`
TESTS = {path.name for path in (ROOT / "tests").rglob("test_*.py")}


def is_key(kind: typing.Any, path: list[str]) -> bool:
    """Return whether path leads to a field from a model, from one of a union, or into a plain mapping or list."""
    if not path or kind in (dict, list, tuple) or typing.get_origin(kind) in (dict, list, tuple):
        return True
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return path[0] in kind.model_fields and is_key(kind.model_fields[path[0]].annotation, path[1:])
    return any(is_key(each, path) for each in typing.get_args(kind))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_exist(page: Path) -> None:
    text = page.read_text()
    paths = {ROOT / name for name in re.findall(r"`((?:actors|cluster|deploy|protos|tests|docs)/[\w./-]+)`", text)}
    paths |= {page.parent / name for name in re.findall(r"\]\((?!https?:|#)([^)#]+)", text)}
    keys = re.findall(r"`((?:serving|limits|openai|target|drafter)\.(?!json|safetensors)[a-z_.]*[a-z])`", text)
    assert [path for path in paths if not path.exists()] == []
    assert set(re.findall(r"\btest_\w+\.py", text)) - TESTS == set()
    assert set(re.findall(r"(?:^|`)outrider ([a-z][a-z-]*)", text, re.MULTILINE)) - set(COMMANDS) == set()
    assert [key for key in set(keys) - OF_BENCH if not is_key(OutriderConfig, key.split("."))] == []
