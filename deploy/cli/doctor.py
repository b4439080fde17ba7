"""``outrider doctor``: a configuration against this machine, before anything is loaded.

One line for each check, OK, WARN or FAIL with what to do about it. Nothing is started, fetched or changed; with
``--gpu`` the draft model is loaded by itself, and parts of a round are measured.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from outrider.cluster.backends import DEVICE_BACKENDS
from outrider.cluster.config import ConfigError, OutriderConfig
from outrider.cluster.device_defaults import choices
from outrider.cluster.drafter_config import check_build_drafts
from outrider.deploy.app import describe, engine_on_gpu
from outrider.deploy.doctor import (
    Finding,
    Level,
    check_checkpoints,
    check_machine,
    check_packages,
    fail,
    judged,
    ok,
    warn,
    worst,
)
from outrider.deploy.doctor_gpu import check_gpu
from outrider.deploy.doctor_vllm import check_vllm
from outrider.deploy.models.check import read_model_json, text_model
from outrider.deploy.preset import Overrides, preset_names, resolve_config

DEFAULT_PRESET = "smollm2"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config",
        metavar="CONFIG_OR_PRESET",
        nargs="?",
        default=DEFAULT_PRESET,
        help=f"a YAML file, or a preset: {', '.join(preset_names())} (default: %(default)s)",
    )
    parser.add_argument("--target", metavar="PATH", help="checkpoint directory (or hub id) in place of target.model")
    parser.add_argument("--drafter", metavar="PATH", help="likewise for drafter.model")
    parser.add_argument(
        "--gpu",
        action="store_true",
        help="also measure on this machine's GPUs: how they are joined, draft steps, sampling, a link's round trip",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")


def run(args: argparse.Namespace) -> int:
    """Returns the exit code: 1 when something fails, else 0."""
    overrides = Overrides(target=args.target, drafter=args.drafter)
    findings = examine(args.config, overrides)
    numbers: dict[str, Any] = {}
    if args.gpu:
        found, numbers = examine_gpu(args.config, overrides)
        findings += found
    verdict = worst(findings)
    if args.json:
        document = {"verdict": verdict, "findings": [asdict(finding) for finding in findings]}
        print(json.dumps({**document, **({"gpu": numbers} if numbers else {})}, indent=2))
    else:
        print(render(findings, colour=sys.stdout.isatty() and "NO_COLOR" not in os.environ))
    return 1 if verdict is Level.FAIL else 0


def examine(config_or_preset: str, overrides: Overrides) -> list[Finding]:
    """Every check there is; those that need what another one found wanting are left out."""
    findings = check_packages()
    try:
        config = resolve_config(config_or_preset, overrides)
    except ConfigError as error:
        problem, _, fix = str(error).partition("; ")
        return [*findings, fail("configuration", problem, fix or "see docs/configuration.md")]
    findings.append(ok("configuration", describe(config)))
    try:
        gpu = engine_on_gpu()
    except ConfigError:
        return findings  # said above: there is no vLLM
    found = check_checkpoints(config)
    findings += check_vllm(config, parsers=worst(found) is not Level.FAIL and Path(config.target.model).is_dir())
    findings += found
    findings += check_method(config, gpu)
    findings += shown_choices(config, gpu)
    findings += check_machine(config, gpu)
    if (address := os.environ.get("RAY_ADDRESS")) is not None:
        findings.append(
            warn(
                "Ray cluster",
                f"RAY_ADDRESS is {address}: it will be served there, and this machine's memory and cores say little",
                "run this on the cluster's nodes too, or unset RAY_ADDRESS to serve here",
            )
        )
    return findings


def examine_gpu(config_or_preset: str, overrides: Overrides) -> tuple[list[Finding], dict[str, Any]]:
    """What is found and measured on GPUs, and the numbers behind it. Nothing where `examine` says why: a configuration
    or a config.json that cannot be read, no vLLM."""
    try:
        config = resolve_config(config_or_preset, overrides)
        gpu = engine_on_gpu()
        vocab_size = None
        if gpu and Path(config.target.model).is_dir():
            vocab_size = text_model(read_model_json(config.target, "target")).get("vocab_size")
    except ConfigError:
        return [], {}
    return check_gpu(config, gpu, vocab_size)


def check_method(config: OutriderConfig, gpu: bool) -> list[Finding]:
    """What the installed build can draft with, and over which link."""
    findings: list[Finding] = []
    if (co_located := config.co_located) is not None:
        text = f"{co_located.method}, co-located: vLLM's own, unchanged"
        findings.append(judged("method", text, lambda: check_build_drafts(co_located, gpu)))
    elif config.remote_drafter is not None:
        findings.append(ok("method", f"{config.remote_drafter.method}, in a drafter actor"))
    else:
        findings.append(
            warn("method", "no drafter section: served without speculation", "see docs/methods.md for what fits")
        )
    if (backend := config.link.backend) in DEVICE_BACKENDS and not gpu:
        text = f"{backend} needs a device at both ends, and this vLLM runs on CPU"
        findings.append(fail("link.backend", text, "set link.backend: auto, or leave it out"))
    return findings


def shown_choices(config: OutriderConfig, gpu: bool) -> list[Finding]:
    """What the device decides where the configuration says nothing: which value, and why."""
    found = []
    for choice in choices(config, gpu):
        value = "not set" if choice.value is None else f"{choice.value:g}"
        found.append(ok(choice.field, f"{value} ({choice.why})"))
    return found


def render(findings: Sequence[Finding], colour: bool) -> str:
    """The lines, and a last one that sums them up."""
    colours = {Level.OK: "32", Level.WARN: "33", Level.FAIL: "31"}
    width = max(len(finding.subject) for finding in findings)
    lines = []
    for finding in findings:
        level = finding.level.ljust(4)
        if colour:
            level = f"\x1b[{colours[finding.level]}m{level}\x1b[0m"
        lines.append(f"{level}  {finding.subject.ljust(width)}  {finding.text}")
        if finding.fix:
            lines.append(f"{'':6}{'':{width}}  fix: {finding.fix}")
    counts = {level: sum(finding.level is level for finding in findings) for level in Level}
    lines.append(f"{counts[Level.OK]} OK, {counts[Level.WARN]} WARN, {counts[Level.FAIL]} FAIL")
    return "\n".join(lines)
