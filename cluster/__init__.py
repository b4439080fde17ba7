"""Machines and wires: configuration, placement, the vLLM executor on Ray, links, membership."""
