"""``outrider methods``: which speculation methods fit a target model, and why. No weights are read."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from outrider.cluster.config import ConfigError, OutriderConfig, TargetConfig
from outrider.cluster.vocabulary import read_vocabulary
from outrider.deploy.app import engine_on_gpu
from outrider.deploy.models.check import read_model_json
from outrider.deploy.models.method_guide import LOAD_ADVICE, Advice, Build, Candidate, CheckpointKind, advise, kind_of
from outrider.deploy.models.store import find_model, models_dir
from outrider.deploy.preset import is_preset, resolve_config

_MOST_CANDIDATES = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="checkpoint directory or hub id of the target")
    parser.add_argument("--config", metavar="FILE_OR_PRESET", help="take the target from here, and judge its drafter")
    parser.add_argument(
        "--among", metavar="DIR", action="append", default=[], help="look for draft models and heads here too"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    """Returns the exit code: 0, 1 when the configured drafter does not fit, 2 when there is nothing to judge."""
    try:
        config = resolve_config(args.config) if args.config else None
        target = _target(args.model, config)
        known = kind_of(read_model_json(target, "target"))
        advice = advise(known, candidates(target.model, _places(target, config, args.among)), _build())
    except ConfigError as error:
        print(f"outrider: {error}", file=sys.stderr)
        return 2
    configured = _configured(config, target, known)
    if args.json:
        print(json.dumps(_document(target.model, advice, configured), indent=2))
    else:
        print(render(target.model, advice, configured, shutil.get_terminal_size((120, 24)).columns))
    return 0 if configured is None or configured.verdict == "fits" else 1


def candidates(target: str, places: Sequence[Path]) -> list[Candidate]:
    """Every readable checkpoint that is one of places or lies directly in one, but the target."""
    found: dict[Path, Candidate] = {}
    vocabulary = read_vocabulary(target)
    for place in places:
        itself = (place / "config.json").is_file()
        nearby = [] if itself else sorted(path.parent for path in place.glob("*/config.json"))[:_MOST_CANDIDATES]
        for path in [place] if itself else nearby:
            path = path.resolve()
            if path in found or path == Path(target).resolve():
                continue
            try:
                document = json.loads((path / "config.json").read_text())
            except (OSError, ValueError):
                continue  # somebody else's file
            if not isinstance(document, dict):
                continue
            tokens = read_vocabulary(str(path))
            same = None if vocabulary is None or tokens is None else tokens == vocabulary
            found[path] = Candidate(str(path), kind_of(document), same)
    return list(found.values())


def render(target: str, advice: Sequence[Advice], configured: Advice | None, width: int) -> str:
    """The table, and what holds for all of them. width: of the terminal, in columns."""
    rows = [("METHOD", "WHERE", "VERDICT", "WHY"), *((a.method, a.placement, a.verdict, a.reason) for a in advice)]
    sizes = [max(len(row[column]) for row in rows) + 2 for column in range(3)]
    room = max(width - sum(sizes), 40)
    lines = [f"speculation for {target}", ""]
    models = {(a.method, a.placement): a.model for a in advice}
    for row in rows:
        why = textwrap.wrap(row[3], room)
        if (model := models.get((row[0], row[1]))) is not None:
            why.append(f"drafter.model: {model}")
        lines.append("".join(cell.ljust(size) for cell, size in zip(row, sizes, strict=False)) + why[0])
        lines += [" " * sum(sizes) + line for line in why[1:]]
    lines.append("")
    for text in LOAD_ADVICE:
        lines += textwrap.wrap(text, max(width, 60))
    if configured is not None:
        said = f"configured: {configured.method}, {configured.placement}: {configured.verdict}; {configured.reason}"
        lines += ["", *textwrap.wrap(said, max(width, 60))]
    return "\n".join(lines)


def _target(model: str | None, config: OutriderConfig | None) -> TargetConfig:
    if model is not None and config is not None:
        raise ConfigError("methods: MODEL and --config name two targets; give one of them")
    if config is not None:
        return config.target
    if model is None:
        raise ConfigError("methods: no target; give a checkpoint directory, a hub id, or --config FILE")
    if is_preset(model):
        return resolve_config(model).target
    fetched = find_model(Path(model).name)
    return TargetConfig(model=str(fetched) if fetched is not None and not Path(model).exists() else model)


def _places(target: TargetConfig, config: OutriderConfig | None, among: Sequence[str]) -> list[Path]:
    """Where drafters may lie: where asked, what the configuration names, beside the target, among what was fetched."""
    places = [Path(place).expanduser() for place in among]
    if missing := [str(place) for place in places if not place.is_dir()]:
        raise ConfigError(f"--among: {missing[0]} is no directory")
    if config is not None and (model := config.drafter_model) and Path(model).is_dir():
        places.append(Path(model))
    if Path(target.model).is_dir():
        places.append(Path(target.model).resolve().parent)
    return [*places, models_dir()]


def _build() -> Build:
    return Build(gpu=engine_on_gpu(), arctic_inference=find_spec("arctic_inference") is not None)


def _configured(config: OutriderConfig | None, target: TargetConfig, known: CheckpointKind) -> Advice | None:
    """What is to be said of the configured method with the configured checkpoint, and no other."""
    if config is None or config.drafter is None:
        return None
    model = config.drafter_model
    own = candidates(target.model, [Path(model)]) if model and Path(model).is_dir() else []
    # A pool's drafter is judged as one beside its target: the same actor, with the same needs.
    key = (config.drafter.method, "co_located" if config.co_located is not None else "with_target")
    return next(each for each in advise(known, own, _build()) if (each.method, each.placement) == key)


def _document(target: str, advice: Sequence[Advice], configured: Advice | None) -> dict[str, object]:
    return {
        "target": target,
        "methods": [asdict(each) for each in advice],
        "advice": list(LOAD_ADVICE),
        "configured": None if configured is None else asdict(configured),
    }
