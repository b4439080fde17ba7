"""pytest plugin that writes the outcome of each test to a file as it comes, for tests/gpu/parts.py.

A JUnit file is written at the end of a session, and a crash in CUDA ends the process before.
"""

import json
from pathlib import Path


def pytest_addoption(parser):
    parser.addoption("--results", type=Path, required=True, help="file to which outcomes are written, a JSON line each")


def pytest_configure(config):
    config.pluginmanager.register(Results(config.getoption("--results")))


class Results:
    def __init__(self, path):
        self._file = path.open("w", buffering=1)

    def _write(self, test, outcome, text=""):
        self._file.write(json.dumps({"test": test, "outcome": outcome, "text": text}) + "\n")

    def pytest_runtest_logstart(self, nodeid):
        self._write(nodeid, "started")

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or not report.passed:
            self._write_report(report)

    def pytest_runtest_logfinish(self, nodeid):
        self._write(nodeid, "ended")

    def pytest_collectreport(self, report):
        if not report.passed:
            self._write_report(report)

    def _write_report(self, report):
        if report.skipped and isinstance(report.longrepr, tuple):
            text = report.longrepr[2].removeprefix("Skipped: ")
        else:
            printed = [f"{title}\n{text}" for title, text in report.sections]
            text = "" if report.passed else "\n".join([report.longreprtext, *printed])
        self._write(report.nodeid, report.outcome, text)
