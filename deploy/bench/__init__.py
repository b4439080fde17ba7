"""Two servers under the same load in turns: vLLM's benchmark client asks, and ratios come with their intervals."""
