"""All that leans on vLLM beyond its public API: configuration, executor, workers, runners, schedulers, engines. Which
names: ``leans_on.py``."""
