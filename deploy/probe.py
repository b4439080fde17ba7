"""Whether a server that was just started answers, and whether its ports are what ``serving`` says: asked from outside,
the way a stranger would."""

from __future__ import annotations

import http.client
import socket
import ssl

import psutil

from outrider.cluster.config import ConfigError, ServingConfig
from outrider.deploy.ports import reachable

TIMEOUT_S = 10.0
_QUICK_S = 2.0
_EVERYWHERE = ("0.0.0.0", "::", "")
_HEALTH = "/health"
_WITH_A_KEY = "/v1/models"


class Probe:
    """Shows no key and no certificate, and believes every certificate: what the ports do, not whose they are."""

    def __init__(self, serving: ServingConfig) -> None:
        self._serving = serving
        self._host = reachable(serving.host)
        self._tls: ssl.SSLContext | None = None
        if serving.ssl_certfile is not None:
            self._tls = ssl.create_default_context()
            self._tls.check_hostname = False
            self._tls.verify_mode = ssl.CERT_NONE

    def missing(self) -> str | None:
        """What a client would still miss; None: nothing. With clients' certificates that is told by the ports alone."""
        try:
            self._connect(self._serving.grpc_port).close()
            if self._serving.ssl_ca_certs is not None:
                self._connect(self._serving.http_port).close()
                return None
            status = self._status(_HEALTH)
        except (OSError, http.client.HTTPException) as error:
            return getattr(error, "strerror", None) or str(error) or type(error).__name__
        return None if status == http.client.OK else f"{_HEALTH} answers {status}"

    def check(self) -> None:
        """Raises ConfigError naming the key that does not hold."""
        serving = self._serving
        if self._tls is not None:
            for port in (serving.grpc_port, serving.http_port):
                if self._understands_plain_text(port):
                    raise ConfigError(f"serving.ssl_certfile: port {port} answers plain text{_NOT_OURS}")
        if serving.ssl_ca_certs is not None:
            for port in (serving.grpc_port, serving.http_port):
                if self._takes_strangers(port):
                    raise ConfigError(f"serving.ssl_ca_certs: port {port} asks clients for no certificate{_NOT_OURS}")
        elif serving.keys_file is not None and (status := self._status(_WITH_A_KEY)) != http.client.UNAUTHORIZED:
            raise ConfigError(f"serving.keys_file: without a key, {_WITH_A_KEY} answers {status}{_NOT_OURS}")
        for key, port in (("grpc_port", serving.grpc_port), ("http_port", serving.http_port)):
            if serving.host not in _EVERYWHERE and _listens_everywhere(port):
                raise ConfigError(
                    f"serving.host: is {serving.host}, but serving.{key} ({port}) listens on every interface"
                    f"{_NOT_OURS}, or set serving.host: 0.0.0.0"
                )

    def _connect(self, port: int) -> socket.socket:
        """With a handshake, where there is TLS. Raises OSError."""
        plain = socket.create_connection((self._host, port), timeout=_QUICK_S)
        if self._tls is None:
            return plain
        try:
            return self._tls.wrap_socket(plain)
        except BaseException:
            plain.close()
            raise

    def _status(self, path: str) -> int:
        """Of a GET. Raises OSError or HTTPException."""
        port = self._serving.http_port
        if self._tls is None:
            connection = http.client.HTTPConnection(self._host, port, timeout=TIMEOUT_S)
        else:
            connection = http.client.HTTPSConnection(self._host, port, timeout=TIMEOUT_S, context=self._tls)
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        finally:
            connection.close()

    def _understands_plain_text(self, port: int) -> bool:
        """A server of either protocol answers the beginning of HTTP/2 in its own way: by settings, or by an error."""
        try:
            with socket.create_connection((self._host, port), timeout=_QUICK_S) as plain:
                plain.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
                answer = plain.recv(64)
        except OSError:
            return False
        return bool(answer) and answer[:1] not in _TLS_ALERT

    def _takes_strangers(self, port: int) -> bool:
        """In TLS 1.3 the refusal comes behind the handshake, with the first thing that is read."""
        try:
            with self._connect(port) as connection:
                connection.sendall(b"GET / HTTP/1.1\r\nHost: probe\r\n\r\n")
                return bool(connection.recv(1))
        except OSError:
            return False


_TLS_ALERT = (b"\x15",)
_NOT_OURS = (
    ": the proxies were not started with it. Set RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH and OUTRIDER_ACCESS in the "
    "environment of every node before Ray starts (docs/access.md)"
)


def _listens_everywhere(port: int) -> bool:
    return any(
        each.status == psutil.CONN_LISTEN and each.laddr and each.laddr.port == port and each.laddr.ip in _EVERYWHERE
        for each in psutil.net_connections("tcp")
    )
