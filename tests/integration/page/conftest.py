"""The page, opened in one Chromium for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from tests.integration.page.page_controls import PROMPT, SHORT, set_form
from tests.support.browser import Browser, require_chromium
from tests.support.cluster.serving import Deployment, K


@pytest.fixture(scope="package")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    require_chromium()
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


@pytest.fixture
def page(browser: Browser, pair: Deployment) -> Iterator[Browser]:
    """Just opened and filled in. Afterwards the console is clean and nobody but this server was asked."""
    browser.show_as(1280)
    browser.open(f"{pair.http_url}/")
    ready = "return document.querySelector('#drafts').max === arguments[0]"
    browser.wait_for(lambda: browser.script(ready, str(K)), "the form fits the model")
    browser.complaints()
    set_form(browser, prompt=PROMPT, temperature="0", max_tokens=str(SHORT), seed="7", chat=False, mode="both")
    yield browser
    assert browser.complaints() == []
    assert browser.hosts() == {urlsplit(pair.http_url).netloc}
