"""What our requests carry through vLLM to the scheduler and the ranks."""

EXTRA_ARGS_KEY = "outrider"
"""In SamplingParams.extra_args. A dict with any of

- ``num_speculative_tokens``: fewer drafts than the deployment's, 0 for none;
- ``verification``: ``rejection``, ``block`` or ``coupled``, the request's own choice;
- ``trace_headers``: W3C headers of the request's span in the target, where it is traced;
- ``deadline_unix_s``: wall-clock time from which on the scheduler drops the request.
"""
