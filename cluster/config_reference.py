"""Writes ``docs/configuration.md`` and ``docs/engine-args.md`` from the configuration's own fields and tables:
``python -m outrider.cluster.config_reference``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from outrider.cluster.config import (
    AutoscalingConfig,
    CoLocatedConfig,
    DraftModelConfig,
    LimitsConfig,
    LinkConfig,
    LoraConfig,
    MultimodalConfig,
    NgramConfig,
    NodeType,
    OpenAIConfig,
    ServingConfig,
    SpeculationConfig,
    SuffixConfig,
    TargetConfig,
)
from outrider.cluster.config_section import EngineConfig
from outrider.cluster.drafter_config import AlsoConfig
from outrider.cluster.engine_args import NOT_ON_CPU, OWNED, REFUSED, RUN_HERE, reason_against, schema
from outrider.cluster.gateway_config import GatewayConfig, GatewayTls
from outrider.cluster.learning_config import LearningConfig
from outrider.cluster.lora_config import DraftLoraConfig
from outrider.cluster.scaling_config import PoolScalingConfig

PATH = Path(__file__).parent.parent / "docs" / "configuration.md"
ENGINE_ARGS_PATH = PATH.with_name("engine-args.md")

_HEAD = """# Configuration

One YAML file: `target`, and as needed `drafter`, `speculation`, `link`, `serving`, `limits`, `openai`. Keys are vLLM's
where vLLM has one. An unknown key, or a value that cannot work, stops the start with the field's name and the fix;
`outrider doctor FILE` finds it, and what else could go wrong on this machine, without starting anything. Some defaults
depend on the device: the table has the CPU's, the text under «Left out on GPU» the GPU's, which no run has measured
yet. What is written is never overridden; `outrider doctor` shows what is chosen, and why. This page is written from the
code (`python -m outrider.cluster.config_reference`).

```yaml
target:
  model: /models/qwen2.5-coder-1.5b-instruct
  max_model_len: 2048
drafter:
  method: draft_model
  model: /models/qwen2.5-coder-0.5b-instruct
  max_model_len: 2048
speculation:
  num_speculative_tokens: 4
```

A `speculative_config` of vLLM's becomes the `drafter` section as it is: `placement: co_located` runs it inside the
target's engine, without that key it runs in a drafter actor (methods `draft_model`, `ngram`, `suffix`). Two names of
vLLM's are taken in both places: `num_speculative_tokens` in the `drafter` section is `speculation`'s, and
`draft_tensor_parallel_size` is a remote draft model's `tensor_parallel_size`. Which method fits which model, and what
differs between the two places: [methods.md](methods.md).

What vLLM has an engine argument for and this page has no key, `target.engine_args` and `drafter.engine_args` take:
[engine-args.md](engine-args.md).
"""

_SECTIONS: dict[str, type[BaseModel]] = {
    "target": TargetConfig,
    "target.lora": LoraConfig,
    "target.multimodal": MultimodalConfig,
    "drafter, `method: draft_model`": DraftModelConfig,
    "drafter.also": AlsoConfig,
    "drafter.lora": DraftLoraConfig,
    "drafter, `method: ngram`": NgramConfig,
    "drafter, `method: suffix`": SuffixConfig,
    "drafter, `placement: co_located`": CoLocatedConfig,
    "drafter.learn": LearningConfig,
    "drafter.autoscaling": PoolScalingConfig,
    "speculation": SpeculationConfig,
    "link": LinkConfig,
    "serving": ServingConfig,
    "serving.gateway": GatewayConfig,
    "serving.gateway.tls": GatewayTls,
    "serving.node_types": NodeType,
    "serving.autoscaling": AutoscalingConfig,
    "limits": LimitsConfig,
    "openai": OpenAIConfig,
}
"""Each with the class whose docstring says what it is."""


def render() -> str:
    parts = [_HEAD]
    for name, model in _SECTIONS.items():
        about = _in_a_line(model.__doc__)
        parts.append(f"## {name}\n\n{about}\n\n| key | default | |\n|---|---|---|\n" + "".join(_rows(model)))
    return "\n".join(parts)


def _rows(model: type[BaseModel]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield f"| `{name}` | {_default(field)} | {_in_a_line(field.description)} |\n"


def _in_a_line(text: str | None) -> str:
    return " ".join((text or "").replace("``", "`").split())


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.exclude:
        return ""  # a secret, from the environment
    value: Any = field.get_default(call_default_factory=True)
    if value is None:
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if value in ((), []):
        return "`[]`"
    return f"`{value}`"


_ENGINE_ARGS_HEAD = """# vLLM's engine arguments

`target.engine_args` and `drafter.engine_args` are mappings of vLLM's engine arguments (`vllm serve --help`, with `_`
for `-`). What Outrider has no key of its own for reaches vLLM's engine as it is written:

```yaml
target:
  model: /models/qwen2.5-coder-1.5b-instruct
  engine_args:
    kv_cache_dtype: fp8
    attention_config: {flash_attn_version: 3}
    hf_overrides: {rope_scaling: {rope_type: yarn, factor: 4.0, original_max_position_embeddings: 32768}}
drafter:
  method: draft_model
  model: /models/qwen2.5-coder-0.5b-instruct
  engine_args:
    kv_cache_dtype: fp8
```

A name that vLLM does not have, a value of another type and an argument that is not passed on stop the start with the
field's name, as `outrider doctor` does; vLLM's own types are in `cluster/engine_args.json`, written from the vLLM that
this was made for. What fits the types and still cannot work (a backend without its kernels, two arguments that exclude
each other) vLLM itself refuses when the engine is made. An n-gram or suffix drafter has no engine, and one with
`placement: co_located` has the target's: neither takes `engine_args`.

«Never run» means that no test of Outrider's has run an engine with it: it goes to vLLM like the others, and whether
vLLM and Outrider's worker, scheduler and executor agree on it is not known. Compare answers before you rely on it.
What an argument makes vLLM do, such as the ports that a connector of `kv_transfer_config` opens or code that
`model_class_overrides` names, no limit, key or check of Outrider's stands before ([security.md](security.md)).

On CPU `kv_cache_dtype: fp8` takes an x86 with AVX-512 or AMX, and heads whose size 32 divides; elsewhere vLLM's
attention ends the engine as it starts, and says so. Answers are those of plain vLLM with it, drafts or not, and others
than with keys and values as they were.

This page is written from the code (`python -m outrider.cluster.config_reference`), and tests hold it, and the types,
against the installed vLLM.
"""


def render_engine_args() -> str:
    parts = [_ENGINE_ARGS_HEAD]
    for model, text in (
        (TargetConfig, "The engine that answers."),
        (DraftModelConfig, "Of `method: draft_model` in a drafter actor. Its model is vLLM's; its steps, its KV blocks "
         "and its sampling are the drafter's own."),
    ):  # fmt: skip
        table = "".join(_engine_args_rows(model))
        parts.append(f"## {model.side}\n\n{text}\n\n| | arguments | |\n|---|---|---|\n{table}")
    return "\n".join(parts)


def _engine_args_rows(model: type[EngineConfig]) -> Iterator[str]:
    side, names = model.side, list(schema()["properties"])
    own = [name for name in names if name in model.model_fields]
    passed = [name for name in names if name not in own and reason_against(side, name) is None]
    run = [name for name in passed if name in RUN_HERE[side]]
    yield _row("passed on", run, "engines under test run with it")
    yield _row("passed on", [name for name in passed if name not in run and name not in NOT_ON_CPU], "never run")
    for name in passed:
        if name in NOT_ON_CPU:
            yield _row("passed on, refused on CPU", [name], f"never run; {NOT_ON_CPU[name]}")
    yield _row("own key", own, f"write it into `{side}` itself")
    shown = set(own)
    for outcome, table in (("Outrider's", OWNED), ("refused", REFUSED)):
        for withheld in table[side]:
            here = [name for name in withheld.names if name not in shown]
            shown.update(here)
            if here:
                yield _row(outcome, here, reason_against(side, here[0]) or "")


def _row(outcome: str, names: list[str], text: str) -> str:
    text = re.sub(r"\b(?:target|drafter|serving|openai)\.[a-z_]+|\b[A-Z]+_[A-Z_]+\b", r"`\g<0>`", text)
    return f"| {outcome} | {', '.join(f'`{name}`' for name in names)} | {text} |\n"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(f"usage: python -m outrider.cluster.config_reference, which writes {PATH} and {ENGINE_ARGS_PATH}")
    for path, text in ((PATH, render()), (ENGINE_ARGS_PATH, render_engine_args())):
        path.write_text(text)
        sys.stdout.write(f"{path}\n")
