"""OpenAI's HTTP API by vLLM's own serving classes, over the target's engine."""
