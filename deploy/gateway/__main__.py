"""Runs the gateway of one node of a cluster until SIGTERM: ``python -m outrider.deploy.gateway CONFIG``.

Serve's proxies of the node must listen on ``serving.http_port`` and ``serving.grpc_port`` of 127.0.0.1.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from pathlib import Path

from outrider.cluster.config import ConfigError, load_config
from outrider.deploy.cli import fail
from outrider.deploy.gateway import TOKEN_VARIABLE, Gateway


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m outrider.deploy.gateway", description="Run a node's gateway.")
    parser.add_argument("config", metavar="CONFIG", type=Path, help="Outrider's configuration file")
    args = parser.parse_args()
    try:
        serving = load_config(str(args.config)).serving
        config, own = serving.gateway, (serving.http_port, serving.grpc_port)
        if config == "off":
            raise ConfigError("serving.gateway: is off; there is nothing to run")
        if not own[0] or not own[1]:
            raise ConfigError("serving.http_port, serving.grpc_port: write the ports of Serve's proxies")
        token = os.environ.get(TOKEN_VARIABLE, "")
        gateway = Gateway(config, token, ("127.0.0.1", own[0]), ("127.0.0.1", own[1]))
        ends = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: ends.set())
        gateway.start()
        where = f"{config.host}:{gateway.config.http_port} and {config.host}:{gateway.config.grpc_port}"
        print(f"outrider: the gateway listens on {where}", file=sys.stderr, flush=True)
        while not ends.wait(0.5):
            if not gateway.alive():
                return fail(f"HAProxy ended: {gateway.output()[-600:]}")
        gateway.drain(serving.drain_s)
    except (ConfigError, OSError) as error:
        return fail(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
