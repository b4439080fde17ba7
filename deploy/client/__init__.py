"""Provides the Python clients, synchronous and for asyncio."""
