"""HTTP on the ingress deployment: OpenAI's endpoints, health, metrics and the page, on one FastAPI app."""
