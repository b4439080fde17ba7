"""Tests with Ray, servers and engines; a package, so that folders in it can share what is costly to start."""
