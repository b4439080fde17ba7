"""Writes ``docs/configuration.md`` from the configuration's own fields:
``python -m outrider.cluster.config_reference``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from outrider.cluster.config import (
    CoLocatedConfig,
    DraftModelConfig,
    LimitsConfig,
    LinkConfig,
    NgramConfig,
    OpenAIConfig,
    ServingConfig,
    SpeculationConfig,
    SuffixConfig,
    TargetConfig,
)

PATH = Path(__file__).parent.parent / "docs" / "configuration.md"

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
"""

_SECTIONS: list[tuple[str, str, type[BaseModel]]] = [
    ("target", "The model whose distribution is served.", TargetConfig),
    (
        "drafter, `method: draft_model`",
        "A smaller model with the same tokenizer. Vocabularies may be padded to different sizes.",
        DraftModelConfig,
    ),
    ("drafter, `method: ngram`", "Prompt lookup, no model.", NgramConfig),
    ("drafter, `method: suffix`", "Suffix decoding, no model.", SuffixConfig),
    (
        "drafter, `placement: co_located`",
        "Inside the target's engine. Keys are those of vLLM's `speculative_config`; left out, vLLM's default holds.",
        CoLocatedConfig,
    ),
    ("speculation", "How much is drafted.", SpeculationConfig),
    ("link", "The wire between one verifier and one drafter.", LinkConfig),
    ("serving", "Serve, ports and queues.", ServingConfig),
    ("limits", "What callers may take, each and together. All of it is checked at the door.", LimitsConfig),
    ("openai", "OpenAI's HTTP endpoints. Keys are vLLM's.", OpenAIConfig),
]


def render() -> str:
    parts = [_HEAD]
    for name, summary, model in _SECTIONS:
        parts.append(f"## {name}\n\n{summary}\n\n| key | default | |\n|---|---|---|\n" + "".join(_rows(model)))
    return "\n".join(parts)


def _rows(model: type[BaseModel]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        text = " ".join((field.description or "").replace("``", "`").split())
        yield f"| `{name}` | {_default(field)} | {text} |\n"


def _default(field: FieldInfo) -> str:
    value: Any = field.default
    if field.is_required():
        return "required"
    if value is None:
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if value == ():
        return "`[]`"
    return f"`{value}`"


if __name__ == "__main__":
    PATH.write_text(render())
    sys.stdout.write(f"{PATH}\n")
