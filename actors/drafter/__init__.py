"""How a drafter drafts: the loop, and one proposer per method."""
