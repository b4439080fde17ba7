"""Which of vLLM's platforms this process runs on. The only place that asks."""

from __future__ import annotations


def on_gpu() -> bool:
    from vllm.platforms import current_platform

    return not current_platform.is_cpu()


def worker_class() -> type:
    """vLLM's V1 worker for this platform (the CPU module cannot be imported on a GPU build)."""
    if on_gpu():
        from vllm.v1.worker.gpu_worker import Worker

        return Worker
    from vllm.v1.worker.cpu_worker import CPUWorker

    return CPUWorker
