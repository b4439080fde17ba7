"""What needs engines on GPUs: tests that other suites run on CPU, and what only GPUs have.

`make test-gpu` runs it in an installed environment. Without vLLM's GPU build, without Ray or with fewer GPUs than its
mark `gpus` says each is skipped, and says why. None of it has been run on a GPU yet.
"""
