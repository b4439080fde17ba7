"""Filling in the page's form, starting it, and reading what it shows."""

from __future__ import annotations

from typing import Any

from tests.support.browser import Browser
from tests.support.cluster.serving import HANG_GUARD_S

PROMPT = "Once upon a time there was a page that showed where every token came from. "
LONG, SHORT = 240, 80
SPECULATED, PLAIN = "#pane-speculated", "#pane-plain"

SHOWN = """
const pane = document.querySelector(arguments[0]);
return {
  text: [...pane.querySelectorAll(".token")].map((token) => token.textContent).join(""),
  rounds: [...pane.querySelectorAll(".round")].map((round) => [...round.children].map((token) => token.classList[1])),
  titles: [...pane.querySelectorAll(".token")].filter((token) => !token.title).length,
  columns: [...pane.querySelectorAll(".column")].map((column) => column.children.length),
  figures: Object.fromEntries(
    [...pane.querySelectorAll("[data-figure]")].map((figure) => [figure.dataset.figure, figure.textContent])),
};
"""


def set_form(browser: Browser, *, chat: bool | None = None, mode: str | None = None, **fields: str) -> None:
    for name, value in fields.items():
        browser.fill(f"#{name.replace('_', '-')}", value)
    box = browser.driver.find_element("id", "chat-template")
    if chat is not None and box.is_selected() != chat:
        box.click()
    if mode is not None:
        browser.click(f"input[name=mode][value={mode}]")


def is_running(browser: Browser) -> bool:
    return not browser.driver.find_element("id", "run").is_enabled()


def generate(browser: Browser) -> None:
    browser.click("#run")
    browser.wait_for(lambda: not is_running(browser), "the answer ends", HANG_GUARD_S)


def shown(browser: Browser, pane: str) -> dict[str, Any]:
    found: dict[str, Any] = browser.script(SHOWN, pane)
    return found
