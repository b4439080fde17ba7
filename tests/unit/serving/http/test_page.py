"""The page's files as a browser asks for them."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from outrider.actors.serving.http.app import ASSETS_PATH, add_page_routes
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


def test_every_file_is_served_and_revalidated(client: TestClient) -> None:
    for name, content in FILES.items():
        path = "/" if name == "index.html" else f"{ASSETS_PATH}/{name}"
        first = client.get(path)
        assert first.status_code == 200, path
        assert first.content == content
        assert first.headers["cache-control"] == "no-cache"
        again = client.get(path, headers={"if-none-match": f'"other", W/{first.headers["etag"]}'})
        assert (again.status_code, again.content) == (304, b"")
        assert client.get(path, headers={"if-none-match": '"other"'}).status_code == 200


def test_what_the_page_asks_for_is_there_and_here(client: TestClient, page: Page) -> None:
    urls = [attrs[name] for _, attrs in page.elements for name in ("href", "src") if name in attrs]
    assert len(urls) == 3
    for content in FILES.values():
        urls += [f"outrider/page/{name}" for name in re.findall(r'from "\./([\w.]+)"', content.decode())]
    for url in urls:
        assert url is not None
        assert client.get(f"/{url}").status_code == 200, url
    for name, content in FILES.items():
        text = content.decode().replace("http://www.w3.org/2000/svg", "")
        assert "//" not in re.sub(r"(^|\s)//.*", "", text), f"{name} has an address of its own"


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
