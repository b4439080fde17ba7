"""The docs name tests and files; they must exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TESTS = {path.name: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tests_named_in_the_docs_exist(page):
    text = page.read_text()
    for name in re.findall(r"\b(test_\w+\.py)", text):
        assert name in TESTS, f"{page.name}: no file {name}"
    for name in re.findall(r"\b(test_\w+)`", text):
        assert any(f"def {name}(" in source for source in TESTS.values()), f"{page.name}: no test {name}"
    for name, test in re.findall(r"\b(test_\w+\.py)::(test_\w+)", text):
        assert f"def {test}(" in TESTS[name], f"{page.name}: no {test} in {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_named_in_the_docs_exist(page):
    for name in re.findall(r"`((?:actors|cluster|deploy|protos|tests|docs)/[\w./-]+)`", page.read_text()):
        assert (ROOT / name).exists(), f"{page.name}: no {name}"
    for name in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
        assert (page.parent / name).exists(), f"{page.name}: no {name}"
