"""How many tokens to draft: for each request and round, from what was measured. Pure."""
