"""Runs vLLM's own OpenAI server: engine wrapper and app in a target replica, forwarding in the ingress."""
