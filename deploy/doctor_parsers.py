"""What ``outrider doctor`` says of the parsers that would read the target's tool calls and reasoning."""

from __future__ import annotations

from pathlib import Path

from outrider.cluster.config import OutriderConfig
from outrider.deploy.doctor import Finding, ask_vllm, fail, ok

_ASK_PARSERS = """
import json, sys
from outrider.actors.vllm_seam.answer_parsers import reasons
from outrider.actors.vllm_seam.engine_args import parsers_of_checkpoint
from outrider.cluster.config import ConfigError, OutriderConfig
config = OutriderConfig.model_validate_json(sys.argv[1])
try:
    print(json.dumps(reasons(config, parsers_of_checkpoint(config))))
except ConfigError as error:
    print(json.dumps(str(error)))
"""


def check_parsers(config: OutriderConfig) -> list[Finding]:
    """Which parsers would read the target's tool calls and reasoning, and why. In a process of its own, which imports
    vLLM and reads config.json and the tokenizer: seconds. Nothing for a checkpoint that is not on this machine."""
    if not Path(config.target.model).is_dir():
        return []
    subject = "openai parsers"
    answer = ask_vllm(subject, _ASK_PARSERS, config.model_dump_json())
    if isinstance(answer, Finding):
        return [answer]
    if isinstance(answer, str):
        problem, _, fix = answer.partition("; ")
        return [fail(subject, problem, fix or "change the configuration")]
    return [ok(field, why) for field, why in answer]
