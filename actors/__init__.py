"""Who does the work: ingress, target, verifier, drafter, and the messages between them."""
