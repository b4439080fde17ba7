"""Runs vLLM's AsyncLLM so that the target's weights can change while requests run."""

from __future__ import annotations

from vllm.platforms import current_platform
from vllm.v1.engine import PauseMode
from vllm.v1.engine.async_llm import AsyncLLM


def check_sleep(level: int) -> None:
    """Raises NotImplementedError for a level of ``sleep`` above 0 on CPU, where vLLM's worker only warns."""
    if level > 0 and current_platform.is_cpu():
        raise NotImplementedError("sleep: on CPU no memory is given back; use level=0, which pauses scheduling")


class UpdatableLLM(AsyncLLM):
    """Pauses generation around an update of the weights, and drops all KV that the former weights have made."""

    is_held = False
    """Whether generation is paused, so that no step is expected."""

    _is_updating = False
    """Whether the model has no weights to compute with, from the start of an update to its end."""

    _resumes_after_update = False

    async def pause_generation(self, *, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        """Pauses generation, see ``AsyncLLM.pause_generation``."""
        self.is_held = True
        try:
            await super().pause_generation(mode=mode, clear_cache=clear_cache)
        except BaseException:
            self.is_held = False
            raise

    async def resume_generation(self) -> None:
        """Resumes generation after a pause. Raises RuntimeError during an update of the weights."""
        self._check_weights()
        await super().resume_generation()
        self.is_held = self._resumes_after_update = False

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Puts the engine to sleep, see ``AsyncLLM.sleep``. Raises NotImplementedError as ``check_sleep`` does."""
        check_sleep(level)
        self.is_held = True
        await super().sleep(level, mode)

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        """Wakes the engine, see ``AsyncLLM.wake_up``. Raises RuntimeError during an update of the weights."""
        self._check_weights()
        is_awake = await super().wake_up(tags)
        self.is_held = not is_awake
        return is_awake

    async def start_weight_update(self) -> None:
        """Starts an update of the target's weights. Pauses generation for it, unless the caller has."""
        if not await self.is_paused():
            await self.pause_generation(mode="keep")
            self._resumes_after_update = True
        try:
            await super().start_weight_update()
        except BaseException:
            await self._resume_after_update()
            raise
        self._is_updating = True

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Puts the new weights into service, and drops the prefix cache.

        Requests that run are computed anew up to their last token, and go on with the new weights. Layers that got no
        weights keep the former ones.
        """
        await super().finish_weight_update(weight_version)
        self._is_updating = False
        await self.reset_prefix_cache(reset_running_requests=True)
        await self._resume_after_update()

    def _check_weights(self) -> None:
        if self._is_updating:
            raise RuntimeError(
                "an update of the weights has not ended; call finish_weight_update (after a failure, start anew)"
            )

    async def _resume_after_update(self) -> None:
        if self._resumes_after_update:
            await self.resume_generation()
