"""The page, as someone sees it who opens it in Chromium: a real browser, a real deployment.

Screenshots stay in build/artifacts.
"""

from __future__ import annotations

import io
from contextlib import redirect_stdout

import pytest

from tests.integration.page.page_controls import (
    LONG,
    PLAIN,
    PROMPT,
    SHORT,
    SPECULATED,
    generate,
    is_running,
    set_form,
    shown,
)
from tests.support.browser import Browser
from tests.support.cluster.serving import HANG_GUARD_S, Deployment, K, wait_until_idle

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

RECORD_TOKENS = """
window.counted = [];
const figure = document.querySelector("#pane-speculated [data-figure=tokens]");
new MutationObserver(() => window.counted.push(Number(figure.textContent))).observe(figure, { childList: true });
"""


def test_tokens_stream_in_marked_by_origin(page: Browser, pair: Deployment) -> None:
    set_form(page, max_tokens=str(LONG), mode="speculated")
    page.script(RECORD_TOKENS)
    generate(page)
    counted = [count for count in page.script("return window.counted") if count is not None]
    assert counted[-1] == LONG
    assert counted == sorted(counted)
    assert len(set(counted)) > 5, "the counter moved while the answer came"

    answer = shown(page, SPECULATED)
    assert answer["text"] == pair.client.generate(PROMPT, temperature=0.0, seed=7, max_tokens=LONG).text
    assert answer["titles"] == 0, "every token has a title"
    kinds = [kind for members in answer["rounds"] for kind in members]
    assert len(kinds) == LONG
    assert {"accepted", "recovered"} <= set(kinds) <= {"accepted", "recovered", "bonus", "plain"}
    for members in answer["rounds"][:-1]:
        assert set(members[:-1]) <= {"accepted"}
        assert members[-1] in {1: ("recovered", "plain"), K + 1: ("bonus",)}.get(len(members), ("recovered", "bonus"))
    assert answer["columns"] == [len(members) for members in answer["rounds"]]

    figures = answer["figures"]
    assert int(figures["rounds"]) == len(answer["rounds"]) < LONG
    assert float(figures["length"]) > 1
    assert figures["rate-accepted"].endswith(" %")
    assert figures["hits"].endswith(" %")
    assert float(figures["rate"]) > 0
    assert f"{LONG} tokens in {figures['rounds']} rounds" in page.text("#state")
    assert page.text("#server-model") == pair.config.served_model_name
    assert page.text("#server-method") == f"draft_model, K = {K}"
    assert page.text("#server-link") == "up"
    assert page.text("#server-drafter").startswith("attached")
    plain = kinds.count("plain")
    assert page.text(f"{SPECULATED} .why").startswith(f"{plain} round{'s' * (plain > 1)} without drafts: the first, ")


def test_side_by_side_with_plain_decoding(page: Browser) -> None:
    """A seed gives the same tokens with speculation and without."""
    set_form(page, temperature="1")
    page.click("#order option[value=in-turn]")
    generate(page)
    speculated, plain = shown(page, SPECULATED), shown(page, PLAIN)
    assert speculated["text"] == plain["text"]
    assert {kind for members in plain["rounds"] for kind in members} == {"plain"}
    assert len(plain["rounds"]) == SHORT > len(speculated["rounds"])
    assert page.text(f"{PLAIN} .why") == "", "nothing else was asked for"
    verdict = page.text("#verdict")
    assert "Speed ratio" in verdict
    assert f"identical: all {SHORT} tokens are the same" in verdict
    page.click(f"{SPECULATED} summary")
    rows = "return document.querySelectorAll('#pane-speculated tbody tr').length"
    assert page.wait_for(lambda: page.script(rows), "the table") == len(speculated["rounds"])
    page.click(f"{SPECULATED} summary")
    page.script("scrollTo(0, 0)")
    page.keep_screenshot("page.png")
    page.show_as(390)
    page.keep_screenshot("page-narrow.png")
    assert page.script("return document.documentElement.scrollWidth") <= 390


@pytest.mark.parametrize("chat", [True, False])
def test_the_request_as_a_program_gives_the_same_answer(page: Browser, chat: bool) -> None:
    set_form(page, mode="speculated", chat=chat, system="one two", top_p="0.9", temperature="1", stop="\\n")
    generate(page)
    page.click("#code summary")
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(page.text("#code-python"), {})
    assert printed.getvalue() == shown(page, SPECULATED)["text"] + "\n"
    assert ('"content": "one two"' in page.text("#code-curl")) == chat
    page.click("#pane-speculated [data-copies]")
    page.wait_for(lambda: page.text("#pane-speculated [data-copies]") == "Copied", "the button says so")


def test_cancelling(page: Browser, pair: Deployment) -> None:
    wait_until_idle(pair, HANG_GUARD_S)
    set_form(page, max_tokens="900", mode="speculated")
    page.click("#run")
    page.wait_for(lambda: shown(page, SPECULATED)["rounds"], "tokens")
    page.click("#cancel")
    page.wait_for(lambda: not is_running(page), "the end", HANG_GUARD_S)
    assert page.text("#state") == "Cancelled."
    answer = shown(page, SPECULATED)
    assert answer["figures"]["state"] == "cancelled"
    assert 0 < int(answer["figures"]["tokens"]) < 900
    assert answer["text"], "what came stays"
    wait_until_idle(pair, HANG_GUARD_S)


@pytest.mark.parametrize(
    ("fields", "control", "message"),
    [
        ({"temperature": "-1"}, "temperature", "Temperature: temperature must be non-negative"),
        ({"seed": "seven"}, "seed", "not a whole number"),
    ],
)
def test_bad_input_is_told_at_its_field(page: Browser, fields: dict[str, str], control: str, message: str) -> None:
    set_form(page, **fields)
    generate(page)
    assert page.driver.find_element("id", "error").is_displayed()
    assert message in page.text("#error")
    assert page.script("return document.activeElement.id") == control
    marked = "return [...document.querySelectorAll('[aria-invalid=true]')].map((element) => element.id)"
    assert page.script(marked) == [control]
    refused = [line for line in page.complaints() if "400" not in line]  # the browser logs every refusal
    assert refused == []
    set_form(page, prompt=PROMPT, temperature="0", drafts="", seed="7", max_tokens="8")
    generate(page)
    assert not page.driver.find_element("id", "error").is_displayed()
    assert page.script(marked) == []


def test_every_control_has_a_name_and_the_keyboard_reaches_it(page: Browser) -> None:
    from selenium.webdriver.common.keys import Keys

    nodes = page.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    named: dict[str, list[str]] = {}
    for node in nodes:
        if not node.get("ignored"):
            role = str(node.get("role", {}).get("value"))
            named.setdefault(role, []).append(str(node.get("name", {}).get("value", "")))
    for role in ("button", "textbox", "spinbutton", "combobox", "radio", "checkbox", "region", "image"):
        assert named.get(role), f"no {role} on the page"
        assert all(named[role]), f"a {role} without a name: {named[role]}"
    assert len(set(named["region"])) == len(named["region"]), "names of regions tell them apart"

    enabled = "return [...form.elements].filter((e) => e.id && !e.disabled).map((e) => e.id)"
    expected = set(page.script(enabled)) | {"INPUT"}  # radio buttons have no ids
    page.script("document.activeElement.blur()")
    reached = set()
    for _ in range(30):
        page.press("body", Keys.TAB) if not reached else page.driver.switch_to.active_element.send_keys(Keys.TAB)
        reached.add(page.script("const e = document.activeElement; return e.id || e.tagName"))
    assert expected <= reached

    assert page.script("return document.querySelector('#state').getAttribute('role')") == "status"
    assert page.script("return document.querySelector('.text').getAttribute('aria-live')") == "off", "not per token"
