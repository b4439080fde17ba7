"""Serves a deployment: the ingress that clients call, the replicas that answer, and the choice among them."""
