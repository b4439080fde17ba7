"""vLLM's own OpenAI server: its engine wrapper and app in a target replica, and the forwarding in the ingress."""
