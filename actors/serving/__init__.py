"""The front of a deployment: what clients call, what a replica answers, which replica is asked."""
