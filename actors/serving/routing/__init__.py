"""Which replica serves a request, and in which order a replica serves what it holds."""
