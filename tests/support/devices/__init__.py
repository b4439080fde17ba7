"""Devices that run on a CPU and show what a CPU hides."""
