"""Finding, fetching and judging the models that a deployment names."""
