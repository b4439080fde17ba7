"""Serves HTTP on the ingress: OpenAI's endpoints, health, metrics and the page, on one FastAPI app."""
