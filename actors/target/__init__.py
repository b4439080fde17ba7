"""A target replica: vLLM's engine, its ranks, and the rounds in which proposals are verified."""
