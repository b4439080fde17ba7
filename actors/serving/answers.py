"""What an actor answers, waited for on an event loop."""

from __future__ import annotations

import asyncio
from typing import Any


async def answer_within(answer: Any, seconds: float) -> Any:
    """answer: an ObjectRef. Raises RayError or TimeoutError."""
    return await asyncio.wait_for(asyncio.wrap_future(answer.future()), seconds)
