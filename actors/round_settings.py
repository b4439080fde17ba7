"""What our requests carry through vLLM to the ranks."""

EXTRA_ARGS_KEY = "outrider"
"""In SamplingParams.extra_args. A dict with any of

- ``num_speculative_tokens``: fewer drafts than the deployment's, 0 for none;
- ``verification``: ``rejection``, ``block`` or ``coupled``, the request's own choice.
"""
