"""The ``outrider`` command's subcommands, a module each."""
