"""Clients that load a server, and checks of what they received."""
