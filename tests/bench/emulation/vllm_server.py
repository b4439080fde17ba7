"""`vllm serve` with an emulated model, scheduling as it does on a GPU: a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from outrider.cluster.placement import available_cores, thread_environment
from tests.bench.emulation import plugin, served
from tests.bench.emulation.in_process import KV_CACHE_BYTES, MAX_MODEL_LEN, keep_asynchronous

START_LIMIT_S = 180.0


@contextmanager
def vllm_serving(model: Path, port: int, max_num_seqs: int, directory: Path) -> Iterator[None]:
    """Raises RuntimeError when it does not start."""
    arguments = [
        "--model", str(model), "--port", str(port), "--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager",
        "--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(max_num_seqs),
        "--kv-cache-memory-bytes", str(KV_CACHE_BYTES), "--served-model-name", "target", "--no-enable-log-requests",
        "--distributed-executor-backend", "uni",
    ]  # fmt: skip
    log = directory / "vllm.log"
    environment = os.environ | thread_environment(available_cores()) | plugin.environment(directory / "plugin")
    command = [sys.executable, "-m", __name__, *arguments]
    with (
        log.open("w") as errors,
        subprocess.Popen(command, env=environment, cwd=directory, stdout=errors, stderr=errors) as server,
    ):
        try:
            give_up = time.monotonic() + START_LIMIT_S
            while not _answers(port):
                if server.poll() is not None or time.monotonic() > give_up:
                    raise RuntimeError(f"vllm serve did not start; see {log}: {log.read_text()[-2000:]}")
                time.sleep(0.5)
            yield
        finally:
            served.end(server)


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def main() -> None:
    """The command: arguments are those of `vllm serve`, which looks for a distribution of vLLM's usual name, so its
    server is started without it."""
    keep_asynchronous()
    from vllm.entrypoints.launchers.api_server.entry import main as serve

    serve()


if __name__ == "__main__":
    main()
