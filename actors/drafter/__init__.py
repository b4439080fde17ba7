"""How a drafter drafts: the loop, and one strategy per method."""
