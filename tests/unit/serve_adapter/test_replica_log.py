"""Serve's log of a replica goes on when vLLM is imported, which configures logging anew."""

import logging
import logging.config
from logging.handlers import MemoryHandler, RotatingFileHandler

import pytest

from outrider.actors.serve_adapter.replica_log import SERVE_LOGGER, serve_log_kept


@pytest.fixture
def log(tmp_path):
    """Serve's logger with a handler such as Serve gives a replica, and the handler and the file."""
    logger, path = logging.getLogger(SERVE_LOGGER), tmp_path / "replica.log"
    before, level = logger.handlers[:], logger.level
    file = RotatingFileHandler(path)
    handler = MemoryHandler(1, target=file)
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    yield logger, handler, path
    logger.handlers[:] = before
    logger.setLevel(level)
    file.close()


def configure_as_vllm_does():
    logging.config.dictConfig({"version": 1, "disable_existing_loggers": False})


@pytest.mark.parametrize("kept", [True, False])
def test_lines_reach_the_file_and_not_only_memory(log, kept):
    logger, handler, path = log
    logger.info("before")
    if kept:
        with serve_log_kept():
            configure_as_vllm_does()
            logger.info("meanwhile")
    else:
        configure_as_vllm_does()
        logger.info("meanwhile")
    logger.info("after")
    lines = path.read_text().split()
    if kept:
        assert (lines, handler.buffer) == (["before", "meanwhile", "after"], [])
    else:  # what it is there for
        assert lines == ["before"]
        assert len(handler.buffer) == 2
