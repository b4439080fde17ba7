"""Per-request settings of the round, as they ride in vLLM's SamplingParams.extra_args from replica to rank 0."""

EXTRA_ARGS_KEY = "outrider"
"""Holds ``{"num_speculative_tokens": n}`` when a request wants fewer drafts than the deployment, 0 for none."""
