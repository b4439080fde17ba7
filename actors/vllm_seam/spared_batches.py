"""On CPU a batch in which nobody names an adapter costs what it costs without any.

vLLM's CPU wrapper then still allocates for every layer, and multiplies the output head's rows by an empty slot's zeros:
a fifth of a small model's step. Its GPU kernels leave at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_KERNELS = ("add_lora_linear", "add_lora_logits")
"""Of vLLM's wrapper around the kernels for adapters. What they change, they change in place."""


def spare_batches(lora_manager: Any) -> None:
    """lora_manager: of vLLM's model runner on CPU, its model loaded."""
    for wrapper in lora_manager._adapter_manager.punica_wrapper_mapping.values():
        for name in _KERNELS:
            setattr(wrapper, name, _spared(wrapper, getattr(wrapper, name)))


def _spared(wrapper: Any, kernel: Callable[..., None]) -> Callable[..., None]:
    def run(*args: Any, **kwargs: Any) -> None:
        if not wrapper.no_lora:  # no token of the batch has an adapter
            kernel(*args, **kwargs)

    return run
