"""Exact verification of drafts: pure functions on tensors. Ray and vLLM are not known here.

p is the target's distribution, q the drafter's, everywhere.
"""
