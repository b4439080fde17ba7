"""Runs rounds in the Verifier: takes drafts, has a step verify them, and commits what it chose."""
