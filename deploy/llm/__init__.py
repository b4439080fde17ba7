"""vLLM's ``LLM`` and ``AsyncLLM`` with a drafter on its own accelerators, without a server."""
