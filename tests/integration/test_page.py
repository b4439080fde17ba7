"""The page, as someone sees it who opens it in Chromium: a real browser, a real deployment.

Screenshots stay in build/artifacts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.browser import Browser, require_chromium
from tests.serving import HANG_GUARD_S, Deployment, K, wait_until_idle

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

PROMPT = "Once upon a time there was a page that showed where every token came from. "
LONG, SHORT = 600, 160
SPECULATED, PLAIN = "#pane-speculated", "#pane-plain"

RECORD_TOKENS = """
window.counted = [];
const figure = document.querySelector("#pane-speculated [data-figure=tokens]");
new MutationObserver(() => window.counted.push(Number(figure.textContent))).observe(figure, { childList: true });
"""

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


@pytest.fixture(scope="module")
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
    assert page.text("#server-drafter").startswith("Drafter:")


@pytest.mark.parametrize("order", ["in-turn", "at-once"])
def test_side_by_side_with_plain_decoding(page: Browser, order: str) -> None:
    """A seed gives the same tokens with speculation and without."""
    set_form(page, temperature="1")
    page.click(f"#order option[value={order}]")
    generate(page)
    speculated, plain = shown(page, SPECULATED), shown(page, PLAIN)
    assert speculated["text"] == plain["text"]
    assert {kind for members in plain["rounds"] for kind in members} == {"plain"}
    assert len(plain["rounds"]) == SHORT > len(speculated["rounds"])
    verdict = page.text("#verdict")
    assert "Speed ratio" in verdict
    assert f"identical: all {SHORT} tokens are the same" in verdict
    if order == "in-turn":
        page.click(f"{SPECULATED} summary")
        rows = "return document.querySelectorAll('#pane-speculated tbody tr').length"
        assert page.wait_for(lambda: page.script(rows), "the table") == len(speculated["rounds"])
        page.click(f"{SPECULATED} summary")
        page.script("scrollTo(0, 0)")
        page.keep_screenshot("page.png")
        page.show_as(1280, dark=True)
        page.keep_screenshot("page-dark.png")
        page.show_as(390)
        page.keep_screenshot("page-narrow.png")
        assert page.script("return document.documentElement.scrollWidth") <= 390


def test_different_answers_are_told(page: Browser) -> None:
    set_form(page, temperature="1", seed="")
    generate(page)
    assert "different from token" in page.text("#verdict")
    assert "without a seed" in page.text("#verdict")


@pytest.mark.parametrize("way", ["button", "keys"])
def test_cancelling(page: Browser, pair: Deployment, way: str) -> None:
    from selenium.webdriver.common.keys import Keys

    wait_until_idle(pair, HANG_GUARD_S)
    set_form(page, max_tokens="900", mode="speculated")
    if way == "button":
        page.click("#run")
    else:
        page.press("#prompt", Keys.CONTROL, Keys.ENTER)
    page.wait_for(lambda: shown(page, SPECULATED)["rounds"], "tokens")
    if way == "button":
        page.click("#cancel")
    else:
        page.press("body", Keys.ESCAPE)
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
        ({"temperature": "9"}, "temperature", "sampling.temperature: 9.0 is out of range"),
        ({"prompt": ""}, "prompt", "text: the prompt is empty"),
        ({"drafts": str(K + 1)}, "drafts", "speculation.num_speculative_tokens"),
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


ALIGNED = [
    pytest.param(["ab", "c", "d"], ["abc", "d"], ["ab", "c", "d"], id="as they are"),
    pytest.param(["\ufffd", "\ufffd", "!"], ["", "é!"], ["", "é", "!"], id="one character in two tokens"),
    pytest.param(["a", "\ufffd", "\ufffd"], ["a", "", "🙂"], ["a", "", "🙂"], id="and nothing after it"),
    pytest.param(["Hello", "world"], ["Hello world"], ["Hello", " world"], id="a space that single tokens lose"),
    pytest.param(["a", "<|end|>"], ["a", ""], ["a", ""], id="a special token that the text leaves out"),
    pytest.param(["<|a|>", "b"], ["", "b"], ["", "b"], id="one in front"),
    pytest.param(["a", "b", "STOP"], ["a", "", "b"], ["a", "b", ""], id="a stop string that is held back and cut"),
    pytest.param(["ab", "STOP!"], ["ab", "ST"], ["ab", "ST"], id="a token cut in the middle"),
    pytest.param(["x", "y"], ["something else"], ["", "something else"], id="texts that do not fit at all"),
]


@pytest.mark.parametrize(("own", "deltas", "expected"), ALIGNED)
def test_token_texts_are_cut_out_of_the_answer(page: Browser, own: list[str], deltas: list[str], expected: Any) -> None:
    """Tokens come spread over the messages; the last message has the rest of them."""
    script = """
        const { TokenAligner } = await import("/outrider/page/token_text.js");
        const [own, deltas] = [arguments[0], arguments[1]];
        const aligner = new TokenAligner((id) => own[id]);
        const taken = [];
        deltas.forEach((delta, i) => {
          const ids = own.map((_, id) => id);
          const here = i === deltas.length - 1 ? ids.slice(i) : ids.slice(i, i + 1);
          aligner.push(here.map((id) => ({ id })), delta);
          if (i === deltas.length - 1) aligner.end();
          taken.push(...aligner.take());
        });
        return [taken.map(([token, text]) => [token.id, text]), aligner.pending];
    """
    taken, pending = page.module(script, own, deltas)
    assert taken == [[i, text] for i, text in enumerate(expected)]
    assert pending == ""


def test_texts_that_cannot_be_learned_lose_no_character(page: Browser) -> None:
    script = """
        const { TokenAligner, TokenTexts } = await import("/outrider/page/token_text.js");
        let failing = true;
        const asked = [];
        const texts = new TokenTexts(async (ids) => {
          asked.push(ids);
          if (failing) throw new Error("no answer");
          return ids.map(String);
        });
        const aligner = new TokenAligner((id) => texts.get(id));
        aligner.push([{ id: 1 }, { id: 2 }], "12");
        const error = await texts.learn([1, 2, 1]).catch((error) => error.message);
        const patient = aligner.take();
        aligner.end();
        const impatient = aligner.take(false).map(([token, text]) => [token.id, text]);
        failing = false;
        await texts.learn([2, 3]);
        await texts.learn([2, 3]);
        return { error, patient, impatient, asked, known: [texts.get(1), texts.get(2), texts.get(3)] };
    """
    assert page.module(script) == {
        "error": "no answer",
        "patient": [],
        "impatient": [[1, ""], [2, "12"]],
        "asked": [[1, 2], [2, 3]],
        "known": [None, "2", "3"],
    }


def test_figures(page: Browser) -> None:
    """Times in milliseconds; three rounds in two messages, then one that says it all."""
    accepted, recovered, bonus, plain = (f"TOKEN_ORIGIN_{name}" for name in ("ACCEPTED", "RECOVERED", "BONUS", "PLAIN"))
    came = [
        [{"token_ids": [1], "origins": [plain]}, 1100],
        [{"token_ids": [2, 3, 4, 5], "origins": [accepted, recovered, accepted, bonus]}, 1600],
        [{"token_ids": [6, 7]}, 2100],
        [{"token_ids": [8], "origins": [recovered]}, 2600],
    ]
    last = [{"token_ids": [], "finish_reason": "FINISH_REASON_STOP"}, 9000]
    counted = {
        "num_spec_steps": 4,
        "num_draft_tokens": 12,
        "num_accepted_draft_tokens": 3,
        "mean_acceptance_length": 1.75,
    }
    script = """
        const { RunStatistics, firstDifference } = await import("/outrider/page/run_statistics.js");
        const statistics = new RunStatistics(1000);
        for (const [message, nowMs] of arguments[0]) statistics.add(message, nowMs);
        const live = statistics.figures();
        const [last, nowMs] = arguments[1];
        statistics.add(last, nowMs);
        const ids = (...ids) => ids.map((id) => ({ id }));
        return {
          live, ended: statistics.figures(),
          rounds: statistics.rounds.map(({ number, atMs, tokens }) =>
            [number, atMs, tokens.map((token) => token.number)]),
          differences: [[ids(1, 2), ids(1, 2)], [ids(1, 2), ids(1, 3)], [ids(1), ids(1, 2)]].map(([a, b]) =>
            firstDifference(a, b)),
        };
    """
    found = page.module(script, came, last)
    live = {"tokens": 8, "rounds": 5, "firstMs": 100, "acceptanceLength": 5 / 3}
    assert {name: found["live"][name] for name in live} == pytest.approx(live)
    assert found["live"]["tokensPerSecond"] == pytest.approx(7 / 1.5)
    assert found["ended"] == found["live"], "an end without counts changes nothing, nor does its time"
    assert found["rounds"] == [[1, 100, [1]], [2, 600, [2, 3]], [3, 600, [4, 5]], [4, 1100, [6, 7]], [5, 1600, [8]]]
    assert found["differences"] == [None, 1, 1]
    ended = page.module(script, came, [{**last[0], "metrics": {"speculative_decoding": counted}}, 9000])["ended"]
    assert (ended["acceptanceLength"], ended["acceptanceRate"]) == (1.75, 0.25)


def test_shares_of_what_a_replica_counted(page: Browser) -> None:
    def status(drafter: str, **rounds: int) -> dict[str, Any]:
        """64-bit counts are texts in protobuf's JSON."""
        return {"link": {"drafter": drafter}, "rounds": {name: str(count) for name, count in rounds.items()}}

    first = status("D:1", main_line_hits=5, side_branch_hits=1, misses=1, drafted=10, accepted=5)
    later = status("D:1", main_line_hits=10, side_branch_hits=3, misses=4, drafted=30, accepted=10)
    script = """
        const { sharesBetween } = await import("/outrider/page/server_status.js");
        return JSON.stringify(arguments[0].map(([before, after]) => sharesBetween(before, after)));
    """
    pairs = [[first, later], [first, first], [first, {**later, "link": {"drafter": "D:2"}}], [None, later]]
    assert json.loads(page.module(script, pairs)) == [{"hits": 0.7, "accepted": 0.25}, {}, {}, {}]
