"""Runs rounds on the target's rank 0: drafts in, a verified step, commits out."""
