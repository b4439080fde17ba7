"""Verifies drafts exactly, by pure functions on tensors that know neither Ray nor vLLM.

p is the target's distribution and q the drafter's, everywhere.
"""
