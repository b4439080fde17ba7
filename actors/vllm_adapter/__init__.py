"""Extensions of vLLM beyond its public API: configuration, executor, workers, runners, schedulers, engines."""
