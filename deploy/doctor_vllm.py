"""What ``outrider doctor`` asks of the installed vLLM: the names we extend, engine arguments, parsers.

All of it is asked in one process of its own, which imports vLLM: seconds.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from outrider.actors.vllm_seam import leans_on as vllm_names
from outrider.cluster.config import ConfigError, EngineConfig, OutriderConfig
from outrider.cluster.engine_args import RUN_HERE
from outrider.deploy.doctor import Finding, fail, ok, warn

ASKING_TIMEOUT_S = 300.0
_ASK = """
import json, sys
from outrider.cluster.config import OutriderConfig
from outrider.deploy.doctor_vllm import answers
print(json.dumps(answers(OutriderConfig.model_validate_json(sys.argv[1]), *json.loads(sys.argv[2]))))
"""
_SEAMS = "internals"


def check_vllm(config: OutriderConfig, parsers: bool) -> list[Finding]:
    """Whether vLLM has the names that Outrider extends it by; what it says of ``engine_args``.

    parsers: also which would read the target's tool calls and reasoning, and why. The target's config.json and
    tokenizer, which are read for it, have to be on this machine.
    """
    found = ask_vllm(config, parsers)
    if isinstance(found, Finding):
        return [found]
    version = f"vLLM {vllm_names.PROJECT.written_for}"
    if found["seams"]:
        return [fail(_SEAMS, problem, f"install {version}") for problem in found["seams"]]
    names = sum(len(table.names) for table in vllm_names.TABLES)
    findings = [ok(_SEAMS, f"{names} entries of what Outrider extends in {version} are there")]
    for engine in _engines(config):
        findings += _engine_args(engine, found["engine_args"][engine.side])
    if parsers:
        findings += _parsers(found["parsers"])
    return findings


def ask_vllm(config: OutriderConfig, parsers: bool) -> Any:
    """`answers`, of a process of its own; a Finding where there are none."""
    command = [sys.executable, "-c", _ASK, config.model_dump_json(), json.dumps([parsers])]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=ASKING_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return fail(_SEAMS, f"importing vLLM takes over {ASKING_TIMEOUT_S:g} s", "make setup")
    if asked.returncode != 0:
        said = asked.stderr.strip().splitlines()
        return fail(_SEAMS, said[-1] if said else f"importing vLLM ended with {asked.returncode}", "make setup")
    return json.loads(asked.stdout.splitlines()[-1])


def answers(config: OutriderConfig, parsers: bool) -> dict[str, Any]:
    """What is wrong with the names; with each engine's arguments; the parsers and why, or what is wrong with them.

    Imports vLLM. Without the names nothing else is asked: the modules that would answer extend them.
    """
    seams = [problem for table in vllm_names.TABLES for problem in table.problems()]
    if seams:
        return {"seams": seams}
    from outrider.actors.vllm_seam.answer_parsers import reasons
    from outrider.actors.vllm_seam.engine_args import parsers_of_checkpoint
    from outrider.actors.vllm_seam.engine_args_schema import checked

    refused: dict[str, str | None] = {}
    for engine in _engines(config):
        try:
            checked(engine.side, engine.engine_args)
        except ConfigError as error:
            refused[engine.side] = str(error)
        else:
            refused[engine.side] = None
    chosen: list[tuple[str, str]] | str = []
    if parsers:
        try:
            chosen = reasons(config, parsers_of_checkpoint(config))
        except ConfigError as error:
            chosen = str(error)
        except Exception as error:  # noqa: BLE001 - of vLLM, at this checkpoint: the other answers stand
            chosen = f"{type(error).__name__}: {error}"
    return {"seams": [], "engine_args": refused, "parsers": chosen}


def _engines(config: OutriderConfig) -> list[EngineConfig]:
    """Those with arguments."""
    sides = (config.target, config.drafter)
    return [engine for engine in sides if isinstance(engine, EngineConfig) and engine.engine_args]


def _engine_args(engine: EngineConfig, problem: str | None) -> list[Finding]:
    """Whether the installed vLLM takes them, by its own types, and what of them has never been run."""
    given, subject = engine.engine_args, f"{engine.side}.engine_args"
    if problem is not None:
        problem, _, fix = problem.partition("; ")
        return [fail(subject, problem, fix)]
    findings = [ok(subject, ", ".join(f"{name}: {value}" for name, value in given.items()))]
    if never := [name for name in given if name not in RUN_HERE[engine.side]]:
        findings.append(
            warn(
                subject,
                f"{', '.join(never)}: passed on to vLLM, and never run under Outrider's tests",
                "compare answers with and without it before you rely on it (docs/engine-args.md)",
            )
        )
    return findings


def _parsers(answer: list[tuple[str, str]] | str) -> list[Finding]:
    if isinstance(answer, str):
        problem, _, fix = answer.partition("; ")
        return [fail("openai parsers", problem, fix or "change the configuration")]
    return [ok(field, why) for field, why in answer]
