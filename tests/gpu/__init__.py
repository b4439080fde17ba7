"""What only a GPU can show. ``python -m tests.gpu`` needs no more than one GPU, PyTorch, Triton, NumPy and pytest.

Neither vLLM nor Ray is imported, but in ``engines``, its last part, which needs both. Without a GPU the tests that can
run on the CPU do, so that they stay right, and the others are skipped. Training needs transformers too.
"""
