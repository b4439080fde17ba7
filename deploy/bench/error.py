"""What ends a benchmark."""

from __future__ import annotations


class BenchError(Exception):
    """The benchmark cannot go on. The message says which side failed, and why."""
