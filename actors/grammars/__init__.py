"""Grammars and schemas of strangers, in processes that can be killed: what an engine knows of them is `GrammarHost`."""
