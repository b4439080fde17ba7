"""What only a GPU can show, on a machine that needs no more than one GPU, PyTorch, Triton, NumPy and pytest.

``make test-gpu``; or, in a checkout where nothing of ours is installed,
``python -m pytest -c /dev/null --confcutdir tests/gpu --rootdir . tests/gpu``. Neither vLLM nor Ray is imported.
Without a GPU the tests that can run on the CPU do, so that they stay right, and the others are skipped. Training needs
transformers too.
"""
