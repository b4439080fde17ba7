"""The configuration page says what the code says."""

from tests.config_page import PATH, render


def test_the_page_is_fresh() -> None:
    assert PATH.read_text() == render(), "run: python -m tests.config_page"


def test_every_key_is_explained() -> None:
    unexplained = [line for line in render().splitlines() if line.startswith("| `") and line.endswith("|  |")]
    assert unexplained == []
