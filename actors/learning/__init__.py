"""How a draft model is trained on what its target says: before it serves (``deploy/distill``) and while it serves."""
