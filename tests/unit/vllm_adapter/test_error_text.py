"""Clients' text is removed from vLLM's logs, and its errors are shortened."""

from __future__ import annotations

import logging

import pytest

from outrider.actors.vllm_adapter.error_text import keep_client_text_out_of_logs, shorten

SECRET = "root ::= my secret"


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(self.format(record))

    monkeypatch.setattr(logging.getLogger("vllm"), "handlers", [Handler()])
    keep_client_text_out_of_logs()
    return lines


def test_a_warning_about_a_request_has_no_values_and_its_exception_no_message(written: list[str]) -> None:
    log = logging.getLogger("vllm.v1.structured_output.backend_guidance")
    log.warning("LLMatcher error: %s", SECRET)
    try:
        raise ValueError(SECRET)
    except ValueError:
        log.exception("Failed to compile grammar for request %s", "r")
    assert len(written) == 2
    assert not any(SECRET in line for line in written)
    assert "Failed to compile grammar" in written[1]
    assert "ValueError" in written[1]
    assert "test_error_text.py" in written[1], "where it was raised"


def test_the_rest_is_logged_as_it_is(written: list[str]) -> None:
    logging.getLogger("vllm.v1.engine.core").error("rank %s died", 3)
    assert written == ["rank 3 died"]


def test_an_error_is_one_short_line() -> None:
    assert shorten(" a\n b. ") == "a b"
    assert len(shorten("x" * 1000)) == 301
