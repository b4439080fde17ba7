"""`outrider serve` on a machine whose disk, and whose shared memory, are full: they are file systems of its own, in a
mount namespace, which are made as small as what is in them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from outrider.deploy.client.sync_client import OutriderClient
from tests.support.cluster.outrider_serve import ENDS_WITHIN_S, outrider_serve
from tests.support.cluster.serving import HANG_GUARD_S, Models
from tests.support.models.reference import Reference

pytestmark = [pytest.mark.engine, pytest.mark.exhaustive, pytest.mark.timeout(1200)]

PAGE = 4096
MOST_PAGES = 1 << 14
PROMPT = "to be or not to be, that is the question: to be or not to be"
SHARED = "/dev/shm"
MOUNT = 'mount -t tmpfs -o size=2g tmpfs "$1" && mount -t tmpfs -o size=4g tmpfs "$2" && shift 2 && exec "$@"'


def can_mount() -> bool:
    tried = subprocess.run(
        ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, check=False
    )
    return tried.returncode == 0


def fill(path: Path) -> None:
    """Some pages may have been given back since it was looked at. Raises OSError."""
    with path.open("wb", buffering=0) as file:
        for _ in range(MOST_PAGES):
            file.write(bytes(PAGE))


@dataclass
class Server:
    process: subprocess.Popen[str]
    disk: str
    client: OutriderClient
    url: str
    reference: Reference

    def check(self) -> None:
        """Answers over both APIs, a large one among them, which Ray would put into its object store."""
        prompt = list(PROMPT.encode())
        answer = self.client.generate(PROMPT, temperature=0.0, max_tokens=200)
        self.reference.check(prompt, answer.token_ids, label="over gRPC")
        body: dict[str, Any] = {
            "prompt": PROMPT,
            "temperature": 0,
            "max_tokens": 800,
            "logprobs": 5,
            "ignore_eos": True,
        }
        response = httpx.post(f"{self.url}/v1/completions", json=body, timeout=HANG_GUARD_S)
        assert response.status_code == 200, response.text
        assert len(response.content) > 100_000
        assert response.json()["usage"]["completion_tokens"] == 800

    @contextmanager
    def full(self, path: str) -> Iterator[None]:
        """Leave no free page in the file system meanwhile. What is in it stays."""
        root = Path(f"/proc/{self.process.pid}/root{path}")
        inside, more = os.statvfs(root), root / "more"
        used = (inside.f_blocks - inside.f_bfree) * inside.f_frsize
        self._resize(path, used + PAGE)
        try:
            with pytest.raises(OSError, match="No space left"):
                fill(more)
            yield
        finally:
            more.unlink(missing_ok=True)
            if self.process.poll() is None:
                self._resize(path, inside.f_blocks * inside.f_frsize)

    def _resize(self, path: str, size: int) -> None:
        mount = ["mount", "-o", f"remount,size={size}", path]
        subprocess.run(["nsenter", "--target", str(self.process.pid), "--mount", *mount], check=True)


@pytest.fixture(scope="module")
def server(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if not can_mount():
        pytest.skip("may not mount anything here")
    disk = tempfile.mkdtemp(dir="/tmp")  # not pytest's own: sockets want short paths
    mounted = ["unshare", "--mount", "sh", "-c", MOUNT, "sh", disk, SHARED]
    try:
        with (
            outrider_serve(models, tmp_path_factory.mktemp("full"), {"RAY_TMPDIR": disk}, mounted) as served,
            OutriderClient(served.grpc) as client,
        ):
            yield Server(served.process, disk, client, f"http://{served.http}", Reference(models.target))
    finally:
        shutil.rmtree(disk, ignore_errors=True)


@pytest.mark.parametrize("what", ["disk", "shared memory"])
def test_what_is_full_costs_no_answer_and_what_is_free_again_is_used(server: Server, what: str) -> None:
    server.check()
    with server.full(server.disk if what == "disk" else SHARED):
        for _ in range(3):
            server.check()
    server.check()


def test_it_ends_as_always(server: Server) -> None:
    with server.full(server.disk):
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(ENDS_WITHIN_S) == 0
