"""Another host on this machine: processes, network, Ray's files and shared memory of its own, and a wire to it that can
be cut, delays and loses. The other files and users are this machine's.

``python -m tests.support.cluster.wire PID`` carries frames between two TAP devices, one here, one in the namespace of
that process, and reads from its input what the wire is like from now on: a line of JSON, delay_s, loss, is_cut.
"""

from __future__ import annotations

import fcntl
import heapq
import json
import os
import random
import select
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Self

import psutil

HERE, THERE = "198.18.7.1", "198.18.7.2"
"""Addresses of the range that is set apart for tests of networks (RFC 2544)."""

APART = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
TOOLS = ("unshare", "nsenter", "mount", "ip")
ITS_OWN = ("/tmp/ray", "/dev/shm")
TAPS = ("outrider-here", "outrider-there")
MTU = 1500
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_FRAME = MTU + 18


@dataclass(frozen=True)
class Weather:
    delay_s: float = 0.0
    """Added to each frame, each way."""

    loss: float = 0.0
    """The share of frames that is lost, each way."""

    is_cut: bool = False


def can_make_hosts() -> bool:
    if not (all(map(shutil.which, TOOLS)) and os.access("/dev/net/tun", os.R_OK | os.W_OK)):
        return False
    return subprocess.run([*APART, "true"], capture_output=True, check=False).returncode == 0


class Host:
    """Makes another host, from entering to leaving the with block. Commands run there with ``prefix``."""

    def __enter__(self) -> Self:
        self._namespaces = subprocess.Popen([*APART, "sleep", "infinity"])
        self._carrier: subprocess.Popen[str] | None = None
        try:
            self._first = self._wait_for_first()
            furnish(self.prefix)
            self._carrier = subprocess.Popen(
                [sys.executable, "-m", "tests.support.cluster.wire", str(self._first)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            assert self._carrier.stdout is not None
            assert self._carrier.stdout.readline() == "ready\n", "no wire"
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for process in (self._carrier, self._namespaces):
            if process is not None:
                process.kill()
                process.wait()

    @property
    def prefix(self) -> list[str]:
        return ["nsenter", f"--target={self._first}", "--net", "--mount", "--pid", f"--wdns={os.getcwd()}"]

    @contextmanager
    def weather(self, **weather: float) -> Iterator[None]:
        """Fields of Weather, for the block."""
        self._tell(Weather(**weather))
        try:
            yield
        finally:
            self._tell(Weather())

    def _tell(self, weather: Weather) -> None:
        assert self._carrier is not None
        assert self._carrier.stdin is not None
        self._carrier.stdin.write(json.dumps(asdict(weather)) + "\n")
        self._carrier.stdin.flush()

    def _wait_for_first(self) -> int:
        """Return the process that the others there descend from, once nothing that is mounted there shows here."""
        unshare = psutil.Process(self._namespaces.pid)
        while True:
            assert self._namespaces.poll() is None, "no other host"
            if (children := unshare.children()) and children[0].name() == "sleep":
                return children[0].pid
            time.sleep(0.01)


def furnish(prefix: Sequence[str] = ()) -> None:
    """Give namespaces that APART has made files of their own, and a way to themselves."""
    for folder in ITS_OWN:
        os.makedirs(folder, exist_ok=True)
        subprocess.run([*prefix, "mount", "-t", "tmpfs", "tmpfs", folder], check=True)
    subprocess.run([*prefix, "ip", "link", "set", "lo", "up"], check=True)


def _tap(name: str) -> int:
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return file


def _join(pid: int) -> tuple[int, int]:
    """Both ends, with their addresses, up."""
    ends = _tap(TAPS[0]), _tap(TAPS[1])
    there = ["nsenter", f"--net=/proc/{pid}/ns/net"]
    subprocess.run(["ip", "link", "set", TAPS[1], "netns", str(pid)], check=True)
    for prefix, tap, address in (([], TAPS[0], HERE), (there, TAPS[1], THERE)):
        subprocess.run([*prefix, "ip", "addr", "add", f"{address}/30", "dev", tap], check=True)
        subprocess.run([*prefix, "ip", "link", "set", tap, "mtu", str(MTU), "up"], check=True)
    return ends


def carry(pid: int) -> None:
    """Carry frames until the input ends."""
    ends = _join(pid)
    other = dict(zip(ends, reversed(ends), strict=True))
    print("ready", flush=True)
    said, weather, under_way, number = sys.stdin.fileno(), Weather(), list[tuple[float, int, int, bytes]](), 0
    while True:
        waits = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        readable, _, _ = select.select([said, *ends], [], [], waits)
        if said in readable:
            if not (lines := os.read(said, 1 << 16).splitlines()):
                return
            weather = Weather(**json.loads(lines[-1]))
        for end in ends:
            if end in readable:
                frame = os.read(end, _FRAME)
                if not weather.is_cut and random.random() >= weather.loss:
                    number += 1
                    heapq.heappush(under_way, (time.monotonic() + weather.delay_s, number, other[end], frame))
        while under_way and under_way[0][0] <= time.monotonic():
            os.write(under_way[0][2], heapq.heappop(under_way)[3])


if __name__ == "__main__":
    carry(int(sys.argv[1]))
