"""Start servers, clusters and hosts for tests, and observe their processes."""
