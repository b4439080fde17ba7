"""The Python clients, synchronous and for asyncio."""
