"""Version 1 of the public API. ``generation.proto`` is the source; ``make protos`` regenerates the stubs beside it."""
