"""Writes docs/configuration.md from the configuration's own fields: ``python -m tests.config_page``."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from outrider.cluster import config
from outrider.cluster.engine_args import REFUSED, REFUSED_ON_CPU

PATH = Path(__file__).parent.parent / "docs" / "configuration.md"

_HEAD = """# Configuration

For operators who write a configuration file. The page lists every key and its default.

```yaml
target:
  model: /models/qwen2.5-coder-1.5b-instruct
  max_model_len: 2048
  engine_args: {kv_cache_dtype: fp8}
drafter:
  method: draft_model
  model: /models/qwen2.5-coder-0.5b-instruct
  max_model_len: 2048
speculation:
  num_speculative_tokens: 4
```

One YAML file has the sections `target`, `drafter`, `speculation`, `link`, `serving` and `openai`. Only `target.model`
is required. Keys are vLLM's where vLLM has one. An unknown key, or a value that cannot work, stops the start with the
field's name and the fix. `outrider doctor FILE` tells the same without starting anything, but for
what vLLM checks.

Some defaults depend on the device. The table has the CPU's. "Default on GPU" gives the GPU's, none of which has been
measured yet. A value that you set is never changed. `outrider doctor` shows each chosen value and its reason.

**vLLM's engine arguments** go into `target.engine_args` and `drafter.engine_args`, under their names in Python
(`vllm serve --help`, with `_` for `-`). They reach vLLM as written, and vLLM refuses what it does not take when the
engine is made. Outrider refuses these by name:

@REFUSED

Pictures need `target.engine_args: {limit_mm_per_prompt: {image: 2}}` ([apis.md](apis.md#pictures)). vLLM's
`speculative_config` becomes the `drafter` section ([methods.md](methods.md#keys)). Arguments of `vllm serve`
for its OpenAI server go into the `openai` section.

A section leaves out keys that an earlier section explains, and names them above its table.

This page is written from the code (`python -m tests.config_page`).
"""

_SECTIONS: dict[str, type[BaseModel]] = {
    "target": config.TargetConfig,
    "drafter, `method: draft_model`": config.DraftModelConfig,
    "drafter, `method: ngram`": config.NgramConfig,
    "drafter, `method: suffix`": config.SuffixConfig,
    "drafter, `method: mlp_speculator`": config.MLPSpeculatorConfig,
    "drafter, `placement: co_located`": config.CoLocatedConfig,
    "drafter.learn": config.LearningConfig,
    "drafter.autoscaling": config.PoolScalingConfig,
    "speculation": config.SpeculationConfig,
    "link": config.LinkConfig,
    "serving": config.ServingConfig,
    "serving.gateway": config.GatewayConfig,
    "serving.gateway.tls": config.GatewayTls,
    "serving.autoscaling": config.AutoscalingConfig,
    "openai": config.OpenAIConfig,
}
"""The class whose fields a section has, and whose docstring says what it is."""


def render() -> str:
    parts = [_HEAD.replace("@REFUSED", _refused())]
    explained: dict[str, str] = {}
    for name, model in _SECTIONS.items():
        about = _in_a_line(model.__doc__)
        rows = [(key, _row(key, field)) for key, field in model.model_fields.items()]
        repeated: dict[str, list[str]] = {}
        for key, row in rows:
            if row in explained:
                repeated.setdefault(explained[row], []).append(f"`{key}`")
        for section, keys in repeated.items():
            about += f"\n\nKeys as under [{section}](#{_anchor(section)}): {', '.join(keys)}."
        new = [row for _, row in rows if row not in explained]
        explained |= dict.fromkeys(new, name)
        parts.append(f"## {name}\n\n{about}\n\n| key | default | |\n|---|---|---|\n" + "".join(new))
    return "\n".join(parts)


def _refused() -> str:
    target, drafter = REFUSED["target"], REFUSED["drafter"]
    rows = [f"| `{name}` | {reason} |" for name, reason in target.items() if drafter.get(name) == reason]
    for side, own in (("target", target.items() - drafter.items()), ("drafter", drafter.items() - target.items())):
        rows += [f"| `{name}` ({side}) | {reason} |" for name, reason in sorted(own)]
    rows += [f"| `{name}` | {reason} |" for name, reason in REFUSED_ON_CPU.items()]
    return "\n".join(["| argument | |", "|---|---|", *rows])


def _row(name: str, field: FieldInfo) -> str:
    return f"| `{name}` | {_default(field)} | {_in_a_line(field.description)} |\n"


def _anchor(section: str) -> str:
    """Returns the fragment by which GitHub links to a heading."""
    return re.sub(r"[^\w -]", "", section.lower()).replace(" ", "-")


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
    if isinstance(value, BaseModel):
        return "on"
    return f"`{value}`"


if __name__ == "__main__":
    PATH.write_text(render())
    sys.stdout.write(f"{PATH}\n")
