"""Contains the actors, ingress, target, verifier and drafter, and the types of calls between them."""
