"""Models that take a data centre's time instead of computing, for measuring orchestration on a small machine.

See docs/performance.md for what is real here and what is not.
"""
