"""Attacks on a served pair through its gateway."""
