"""What an operator runs: the Serve app builder, the command line, the client, model fetching, presets."""
