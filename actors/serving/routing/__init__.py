"""Chooses target replicas for requests."""
