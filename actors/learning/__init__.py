"""Trains a draft model on its target's answers, before it serves (``deploy/distill``) and while it serves."""
