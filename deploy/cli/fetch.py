"""Implements ``outrider fetch``: puts a model, or the models of a preset (below OUTRIDER_HOME), onto this machine."""

from __future__ import annotations

import argparse

from outrider.deploy.cli.arguments import exit_status
from outrider.deploy.models.fetch import fetch, fetch_from_hub
from outrider.deploy.models.store import MODELS, PRESET_MODELS
from outrider.deploy.progress import Progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="PRESET_OR_HUB_ID", help=f"{', '.join(sorted(PRESET_MODELS))}, or a hub id")
    parser.add_argument("--revision", help="branch, tag or commit of a hub id")


def run(args: argparse.Namespace) -> int:
    """Fetches missing models and prints their directories on stdout. Returns the exit code."""
    interrupted = "interrupted; the same command goes on where it stopped"
    return exit_status("fetch", lambda: _fetch(args), interrupted=interrupted, verbose=False)


def _fetch(args: argparse.Namespace) -> None:
    if args.model not in PRESET_MODELS:
        print(fetch_from_hub(args.model, args.revision), flush=True)
        return
    progress = Progress()
    for name in PRESET_MODELS[args.model]:
        print(fetch(MODELS[name], progress), flush=True)
