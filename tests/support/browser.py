"""Headless Chromium for tests: one window, driven through ChromeDriver, and what it asked for and complained about."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.install_chromium import BY_HAND, REQUIRED, missing

ARTEFACTS = Path(__file__).resolve().parents[2] / "build" / "artifacts"
"""Kept after a test run: continuous integration publishes it."""

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--no-default-browser-check",
    "--no-proxy-server",
)
TIMEOUT_S = 60.0
LOOKS_EVERY_S = 0.1
"""A look through ChromeDriver takes the processor from the server that is waited for."""

NETWORK = ("http", "https", "ws", "wss")
"""The browser's own first page has other schemes."""


def require_chromium() -> None:
    """Skip the test without Chromium, or fail it where it must run."""
    if not (lacking := missing()):
        return
    reason = f"{' and '.join(lacking)} not installed; run `make test` as root, or {BY_HAND}"
    if os.environ.get(REQUIRED):
        pytest.fail(reason)
    pytest.skip(reason)


class Browser:
    """Close it after use. profile: an empty directory."""

    def __init__(self, profile: Path) -> None:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service

        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium")
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
        self.driver.set_page_load_timeout(TIMEOUT_S)
        self.driver.set_script_timeout(TIMEOUT_S)
        self._urls: list[str] = []

    def close(self) -> None:
        self.driver.quit()

    def open(self, url: str) -> None:
        self.driver.get(url)

    def script(self, body: str, *arguments: Any) -> Any:
        """Run the body of a function of these arguments."""
        return self.driver.execute_script(body, *arguments)

    def module(self, body: str, *arguments: Any) -> Any:
        """Run the body of an async function, which may import() and await. Raises RuntimeError for what it throws."""
        wrapped = (
            "const done = arguments[arguments.length - 1]; const given = [...arguments].slice(0, -1);"
            f"(async function () {{ {body} }})(...given)"
            ".then((value) => done({ value }), (error) => done({ error: String(error.stack ?? error) }));"
        )
        answer = self.driver.execute_async_script(wrapped, *arguments)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer.get("value")

    def text(self, selector: str) -> str:
        """Return the text of the first element that matches, as the document has it."""
        found: str = self.script("return document.querySelector(arguments[0]).textContent", selector)
        return found

    def click(self, selector: str) -> None:
        self.driver.find_element("css selector", selector).click()

    def fill(self, selector: str, text: str) -> None:
        element = self.driver.find_element("css selector", selector)
        element.clear()
        element.send_keys(text)

    def press(self, selector: str, *keys: str) -> None:
        self.driver.find_element("css selector", selector).send_keys(*keys)

    def wait_for(self, condition: Callable[[], Any], what: str, within_s: float = TIMEOUT_S) -> Any:
        """The first true value of condition. Fails when there is none in time."""
        give_up = time.monotonic() + within_s
        while not (value := condition()):
            assert time.monotonic() < give_up, f"{what}: not within {within_s:g} s"
            time.sleep(LOOKS_EVERY_S)
        return value

    def show_as(self, width_px: int) -> None:
        size = {"width": width_px, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def keep_screenshot(self, name: str) -> Path:
        """The whole page, under ARTEFACTS."""
        ARTEFACTS.mkdir(parents=True, exist_ok=True)
        width, height = self.script("const d = document.documentElement; return [innerWidth, d.scrollHeight]")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        path = ARTEFACTS / name
        assert self.driver.save_screenshot(str(path))
        return path

    def complaints(self) -> list[str]:
        """Return what the console has shown since the last call: errors, blocked content, uncaught exceptions."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]

    def hosts(self) -> set[str]:
        """Hosts, with ports, that anything was asked of over the network since the start."""
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                self._urls.append(message["params"]["request"]["url"])
        return {split.netloc for url in self._urls if (split := urlsplit(url)).scheme in NETWORK}
