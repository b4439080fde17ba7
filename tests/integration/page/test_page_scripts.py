"""The page's own modules, run in Chromium: texts of tokens, figures of an answer, shares of a replica."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.browser import Browser

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


ALIGNED: list[tuple[str, list[str], list[str], list[str]]] = [
    ("as they are", ["ab", "c", "d"], ["abc", "d"], ["ab", "c", "d"]),
    ("one character in two tokens", ["\ufffd", "\ufffd", "!"], ["", "é!"], ["", "é", "!"]),
    ("and nothing after it", ["a", "\ufffd", "\ufffd"], ["a", "", "🙂"], ["a", "", "🙂"]),
    ("a space that single tokens lose", ["Hello", "world"], ["Hello world"], ["Hello", " world"]),
    ("a special token that the text leaves out", ["a", "<|end|>"], ["a", ""], ["a", ""]),
    ("one in front", ["<|a|>", "b"], ["", "b"], ["", "b"]),
    ("a stop string that is held back and cut", ["a", "b", "STOP"], ["a", "", "b"], ["a", "b", ""]),
    ("a token cut in the middle", ["ab", "STOP!"], ["ab", "ST"], ["ab", "ST"]),
    ("texts that do not fit at all", ["x", "y"], ["something else"], ["", "something else"]),
]


def test_token_texts_are_cut_out_of_the_answer(page: Browser) -> None:
    """Tokens come spread over the messages; the last message has the rest of them. Opened once for all cases."""
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
    for case, own, deltas, expected in ALIGNED:
        taken, pending = page.module(script, own, deltas)
        assert taken == [[i, text] for i, text in enumerate(expected)], case
        assert pending == "", case


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


def test_reasons_of_rounds_without_drafts(page: Browser) -> None:
    up = {"state": "LINK_STATE_UP", "drafter": "D:1"}
    before = {"methods": ["ngram"], "link": up, "rounds": {"late_rounds": "2"}}
    rounds = {"late_rounds": "3", "refused_proposals": "2", "lengths": {"chosen_lengths": {"0": "4"}}}
    after = [
        {**before, "rounds": rounds},
        before,
        {**before, "link": {**up, "state": "LINK_STATE_DOWN"}},
        {"methods": [], "rounds": {}},
    ]
    script = """
        const { plainReasons } = await import("/outrider/page/server_status.js");
        return arguments[1].map((after) => plainReasons(arguments[0], after).join("; "));
    """
    counted, nothing, down, none = page.module(script, before, after)
    assert counted.startswith("4 not expected to pay off; 1 whose drafts came too late; 2 for which the drafter had no")
    assert (nothing, down, none) == ("", "no drafter is linked", "no drafter is configured")


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
