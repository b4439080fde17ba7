"""Waits for results of Ray actors on an event loop."""

from __future__ import annotations

import asyncio
from typing import Any


async def result_within(ref: Any, seconds: float) -> Any:
    """Returns the value of an ObjectRef. Raises RayError or TimeoutError."""
    return await asyncio.wait_for(asyncio.wrap_future(ref.future()), seconds)
