"""``python -m outrider.deploy.gateway CONFIG``: the gateway of one node of a cluster, until SIGTERM.

Serve's proxies of the node must listen on ``serving.http_port`` and ``serving.grpc_port`` of 127.0.0.1.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from outrider.cluster.config import GatewayConfig, ServingConfig
from outrider.cluster.config_section import ConfigError, read_yaml
from outrider.deploy.cli import fail
from outrider.deploy.gateway import TOKEN_VARIABLE, Gateway
from outrider.deploy.gateway.files import render

LOOPBACK = "127.0.0.1"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m outrider.deploy.gateway", description="Run a node's gateway.")
    parser.add_argument("config", metavar="CONFIG", type=Path, help="Outrider's configuration file")
    parser.add_argument("--print", action="store_true", help="print HAProxy's configuration and end")
    args = parser.parse_args()
    try:
        config, http_port, grpc_port, drain_s = _read(args.config)
        if args.print:
            backends = {"http_backend": f"{LOOPBACK}:{http_port}", "grpc_backend": f"{LOOPBACK}:{grpc_port}"}
            fields = ("http_port", "grpc_port", "admin_port")
            binds = {field: f"{config.host}:{port}" for field in fields if (port := getattr(config, field)) is not None}
            print(render(config, Path("/etc/haproxy"), backends, binds), end="")
            return 0
        token = os.environ.get(TOKEN_VARIABLE, "")
        gateway = Gateway(config, token, (LOOPBACK, http_port), (LOOPBACK, grpc_port), drain_s)
        ends = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: ends.set())
        gateway.start()
        print(
            f"outrider: the gateway listens on {config.host}:{gateway.http_port} and {config.host}:{gateway.grpc_port}",
            file=sys.stderr,
            flush=True,
        )
        while not ends.wait(0.5):
            if not gateway.alive():
                return fail(f"HAProxy ended: {gateway.output()[-600:]}")
        gateway.drain()
    except (ConfigError, OSError) as error:
        return fail(str(error))
    return 0


def _read(path: Path) -> tuple[GatewayConfig, int, int, float]:
    """The gateway's configuration, the ports of Serve's proxies, and serving.drain_s."""
    tree: Any = read_yaml(path.read_text())
    serving = (tree or {}).get("serving") or {}
    if not isinstance(section := serving.get("gateway") or {}, dict):
        raise ConfigError("serving.gateway: is off; there is nothing to run")
    for field in ("http_port", "grpc_port"):
        if not isinstance(serving.get(field), int):
            raise ConfigError(f"serving.{field}: is missing; write the port of Serve's proxies")
    try:
        config = GatewayConfig.model_validate(section)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, ("serving", "gateway", *first["loc"])))
        raise ConfigError(f"{field}: {first['msg']}") from None
    drain_s = serving.get("drain_s", ServingConfig.model_fields["drain_s"].default)
    return config, serving["http_port"], serving["grpc_port"], float(drain_s)


if __name__ == "__main__":
    sys.exit(main())
