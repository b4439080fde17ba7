"""Finds vLLM's request for a LoRA adapter by its name."""

from __future__ import annotations

from vllm.lora.request import LoRARequest

from outrider.actors.replica_calls import RequestError


class Adapters:
    """The target's adapters. requests: by name; vLLM's OpenAI server loads them and keeps this dict."""

    def __init__(self) -> None:
        self.requests: dict[str, LoRARequest] = {}

    def find(self, name: str | None) -> LoRARequest | None:
        """Returns None for None. Raises RequestError for a name that is not known."""
        if name is None or (found := self.requests.get(name)) is not None:
            return None if name is None else found
        raise RequestError("adapter", "is not known here", f"send one of {sorted(self.requests)}, or leave it out")


def last_line(error: Exception) -> str:
    """Returns the line that says what is wrong: a rank's error comes with its traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
