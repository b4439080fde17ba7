"""The page's files as a browser asks for them."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from outrider.actors.serving.http.app import add_page_routes
from tests.unit.serving.http.page_files import FILES


@pytest.fixture(scope="module")
def client() -> TestClient:
    app = FastAPI(openapi_url=None)
    add_page_routes(app)
    return TestClient(app)


class Page(HTMLParser):
    """Every element's attributes by tag, and the text outside of tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))


@pytest.fixture(scope="module")
def page(client: TestClient) -> Page:
    return Page(client.get("/").text)


def test_the_page_allows_nothing_from_elsewhere(client: TestClient) -> None:
    response = client.get("/")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'self'" in response.headers["content-security-policy"]
    assert response.headers["x-content-type-options"] == "nosniff"


def test_no_inline_script_or_style(page: Page) -> None:
    """The policy would block them."""
    for tag, attrs in page.elements:
        assert "style" not in attrs
        assert not any(name.startswith("on") for name in attrs)
        assert tag != "style"
        assert tag != "script" or attrs.get("src")


def test_scripts_make_text_never_markup() -> None:
    for name, content in FILES.items():
        if name.endswith(".js"):
            assert not re.search(rb"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", content), name
