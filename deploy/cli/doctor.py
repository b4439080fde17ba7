"""Implements ``outrider doctor``: checks a configuration against this machine, before anything is loaded.

It prints one line for each check: OK, WARN or FAIL. Exit status 1 if a check fails, else 0.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from outrider.deploy.cli.arguments import add_config_arguments
from outrider.deploy.doctor import Finding, Level, examine
from outrider.deploy.preset import Overrides


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Prints all findings. Returns the exit status."""
    findings = examine(args.config, Overrides(target=args.target, drafter=args.drafter))
    print(render(findings))
    return int(any(finding.level is Level.FAIL for finding in findings))


def render(findings: Sequence[Finding]) -> str:
    """Returns one line for each finding, and a summary."""
    width = max(len(finding.subject) for finding in findings)
    lines = [f"{each.level.ljust(4)}  {each.subject.ljust(width)}  {each.text}" for each in findings]
    counts = (f"{sum(finding.level is level for finding in findings)} {level}" for level in Level)
    return "\n".join([*lines, ", ".join(counts)])
