"""Exports metrics, traces and logs of a deployment."""
