"""``python -m tests.bench.access_cost``: what a key check, a wrong key and TLS add to a call, as ratios.

On a real grpc.aio server with a handler that does nothing: against an engine's round each of them is a small part of
what is printed here. Sides take turns, and the medians of their turns are compared: in processor time of this process,
client and server together, which another program on the machine does not stretch as it does the clock's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import grpc

from outrider.actors.serve_seam.listening import bind_grpc
from outrider.actors.serving.access.calls import guarded_rpc
from outrider.actors.serving.access.files import Reloading
from outrider.actors.serving.access.guard import GRPC_CALLS, Asked, Guard, Refused
from outrider.actors.serving.access.keys import Key, KeyRing, hash_of, new_secret
from outrider.actors.serving.access.tls import reloading_certificates
from tests.certificates import Authority

METHOD = "/outrider.v1.GenerationService/Generate"


def guard_of(number: int) -> tuple[Guard, str]:
    secrets = [new_secret() for _ in range(number)]
    keys = [
        Key(name=f"k{n}", hash=hash_of(secret.encode()), scopes=("generate",), requests_per_minute=10**9)
        for n, secret in enumerate(secrets)
    ]
    ring = KeyRing(keys)
    return Guard(Reloading([os.devnull], lambda: ring)), secrets[-1]


def check_us(guard: Guard, header: str, times: int = 20_000) -> float:
    asked = Asked("grpc", METHOD, header, "peer", GRPC_CALLS[METHOD])
    begun = time.process_time()
    for _ in range(times):
        try:
            with guard.admit(asked):
                pass
        except Refused:
            pass
    return (time.process_time() - begun) / times * 1e6


async def serve(guard: Guard | None, certificates: Any) -> tuple[Any, int]:
    async def call(requests: Any, context: Any) -> Any:
        async for _ in requests:
            return b"answer"
        return b""

    handler = grpc.stream_unary_rpc_method_handler(guarded_rpc(METHOD, call, guard))
    server = grpc.aio.server()
    services = {"Generate": handler}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("outrider.v1.GenerationService", services),))
    port = bind_grpc(server, "127.0.0.1", 0, certificates)
    await server.start()
    return server, port


async def calls_us(channel: Any, header: str | None, times: int) -> float:
    call = channel.unary_unary(METHOD)
    metadata = (("authorization", header),) if header else ()
    begun = time.process_time()
    for _ in range(times):
        await call(b"x" * 200, metadata=metadata)
    return (time.process_time() - begun) / times * 1e6


async def measure(turns: int, times: int) -> dict[str, float]:
    guard, secret = guard_of(1000)
    header = f"Bearer {secret}"
    authority = Authority()
    options = [("grpc.enable_http_proxy", 0)]
    with tempfile.TemporaryDirectory() as directory:
        certificate, key = authority.sign().write(Path(directory), "server")
        certificates = reloading_certificates(str(certificate), str(key))
        sides: dict[str, tuple[Any, str | None]] = {}
        servers = []
        for name, keyed, tls in (("plain", None, None), ("keys", guard, None), ("tls", None, certificates)):
            server, port = await serve(keyed, tls)
            servers.append(server)
            address = f"localhost:{port}"
            if tls is None:
                channel = grpc.aio.insecure_channel(address, options=options)
            else:
                credentials = grpc.ssl_channel_credentials(authority.certificate)
                channel = grpc.aio.secure_channel(address, credentials, options=options)
            sides[name] = channel, header if keyed else None
            await calls_us(*sides[name], times)
        taken: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(turns):
            for name, side in sides.items():
                taken[name].append(await calls_us(*side, times))
        for channel, _ in sides.values():
            await channel.close()
        for server in servers:
            await server.stop(0)
    plain = statistics.median(taken["plain"])
    right, wrong = check_us(guard, header), check_us(guard_of(1000)[0], "Bearer outrider_wrong")
    few = guard_of(1)
    return {
        "call_cpu_us": plain,
        "call_with_a_key_ratio": statistics.median(taken["keys"]) / plain,
        "call_over_tls_ratio": statistics.median(taken["tls"]) / plain,
        "check_of_1000_keys_cpu_us": right,
        "check_of_1_key_cpu_us": check_us(few[0], f"Bearer {few[1]}"),
        "check_of_a_wrong_key_cpu_us": wrong,
        "check_per_call_ratio": right / plain,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--times", type=int, default=200, help="calls a turn")
    args = parser.parse_args()
    import logging

    logging.disable(logging.WARNING)  # a wrong key a microsecond is a line each
    found = asyncio.run(measure(args.turns, args.times))
    about = {"machine": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}
    print(json.dumps({**about, "grpc": grpc.__version__, **{name: round(x, 3) for name, x in found.items()}}, indent=1))


if __name__ == "__main__":
    main()
