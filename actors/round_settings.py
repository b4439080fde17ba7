"""What our requests carry through vLLM to the scheduler and the ranks."""

EXTRA_ARGS_KEY = "outrider"
"""In SamplingParams.extra_args. A dict with any of

- ``num_speculative_tokens``: fewer drafts than the deployment's, 0 for none;
- ``verification``: ``rejection``, ``block`` or ``coupled``, the request's own choice;
- ``trace_headers``: W3C headers of the request's span in the target, where it is traced;
- ``timeout_s``: seconds after its arrival in the scheduler from which on that drops the request;
- ``deadline``: its form on the way through vLLM's serving classes, within one process (see actors.openai.engine).
"""
