"""Warnings are errors wherever messages are packed and unpacked."""

import warnings

import pytest


@pytest.fixture(autouse=True)
def _warnings_are_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
