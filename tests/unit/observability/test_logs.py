"""JSON lines: one object a record, the request's id on every line about a request."""

import asyncio
import io
import json
import logging
import logging.config

import pytest

from outrider.actors.observability import logs
from outrider.actors.observability.environment import process_environment
from outrider.cluster.config import ServingConfig


@pytest.fixture
def stream():
    """Yield a logger of JSON lines, and what it wrote."""
    written, logger = io.StringIO(), logging.getLogger("test.json_lines")
    handler = logging.StreamHandler(written)
    handler.setFormatter(logs.JsonLines())
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(logging.INFO)
    factory = logging.getLogRecordFactory()
    yield logger, lambda: [json.loads(line) for line in written.getvalue().splitlines()]
    logger.removeHandler(handler)
    logging.setLogRecordFactory(factory)


def test_a_line_is_one_object_with_ray_s_keys(stream):
    logger, lines = stream
    logger.warning("two\nlines of %s", "text", extra={"epoch": 3, "odd": object})
    try:
        raise ValueError("broken")
    except ValueError:
        logger.exception("failed")
    first, second = lines()
    assert first["message"] == "two\nlines of text"
    assert (first["levelname"], first["name"], first["epoch"]) == ("WARNING", "test.json_lines", 3)
    assert {"asctime", "filename", "lineno", "process"} <= set(first)
    assert "ValueError: broken" in second["exc_text"]
    assert logs.REQUEST_ID_KEY not in first


async def test_a_task_s_lines_carry_its_request_s_id_and_no_other_s(stream):
    logger, lines = stream

    async def handle(request_id):
        logs.note_request(request_id)
        await asyncio.sleep(0)
        logger.warning("about %s", request_id)

    await asyncio.gather(handle("a"), handle("b"))
    logger.warning("about nobody")
    found = [(line["message"], line.get(logs.REQUEST_ID_KEY)) for line in lines()]
    assert found == [("about a", "a"), ("about b", "b"), ("about nobody", None)]


def test_the_file_that_vllm_s_processes_read_configures_their_loggers_and_ours():
    with open(process_environment(ServingConfig(log_format="json"))["VLLM_LOGGING_CONFIG_PATH"]) as file:
        config = json.load(file)
    assert {"vllm", "outrider"} == set(config["loggers"])
    made = logging.config.DictConfigurator(config).configure_formatter(config["formatters"]["json"])
    assert isinstance(made, logs.JsonLines)
