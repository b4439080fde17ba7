"""``python -m tests.bench.soak``: load on a running server, alone and beside attackers by turns.

The load is answers of a fixed length, half of them streams over gRPC, half over OpenAI's API, at a fixed concurrency.
The attackers are a process of their own with another source address, 127.0.0.2. On one machine they take processor time
from the server that attackers from elsewhere would not, so they send at rates that are set, and their time is printed.

Ends with status 1 when beside attackers fewer than 0.8 of the requests a second are answered, or one is lost: failed,
or answered with other tokens than the same prompt was before.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.synchronize import Event
from typing import Any

import grpc
import httpx
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.deploy.bench.machine import machine, versions
from outrider.v1 import generation_pb2 as pb
from tests.security import attackers as raw
from tests.security.attackers import ELSEWHERE, POST, PREFACE, PROMPT, Caller, Drip, call, code_of, connect, data

GOAL = 0.8
"""The share that must remain of the requests a second alone."""

WIDE = {"type": "object", "properties": {f"p{n}": {} for n in range(4000)}}
Attack = Callable[[Caller, tuple[int, int]], object]


def _slow(_: Caller, ports: tuple[int, int]) -> None:
    drips = [
        Drip(ports[0], POST, b"x", 10),
        Drip(ports[0], POST + b"content-length: 5000\r\n\r\n", b"x", 10),
        Drip(ports[1], PREFACE + call(raw.GENERATE), data(b"x"), 10),
    ]
    time.sleep(3)
    for drip in drips:
        drip.close()


def _unread(_: Caller, ports: tuple[int, int]) -> None:
    asked = raw.generation(pb.GenerateStreamRequest, max_tokens=100, ignore_eos=True).SerializeToString()
    body = json.dumps({"prompt": PROMPT, "max_tokens": 100, "ignore_eos": True, "stream": True}).encode()
    over_http = POST + b"content-length: %d\r\n\r\n" % len(body) + body
    with connect(ports[1], ELSEWHERE, 2048) as first, connect(ports[0], ELSEWHERE, 2048) as second:
        first.sendall(PREFACE + call(raw.STREAM) + data(raw.message(asked), raw.END_STREAM))
        second.sendall(over_http)
        time.sleep(10)


def _idle(caller: Caller, ports: tuple[int, int]) -> None:
    connections = [connect(port, ELSEWHERE) for port in ports * 20]
    health = health_pb2_grpc.HealthStub(caller.channel)
    watches = [health.Watch(health_pb2.HealthCheckRequest()) for _ in range(50)]
    time.sleep(5)
    for each in (*connections, *watches):
        each.close() if hasattr(each, "close") else each.cancel()


def _poll(caller: Caller, _: tuple[int, int]) -> None:
    with ThreadPoolExecutor(16) as pool:
        for number in range(16):
            if number % 2:
                pool.submit(caller.http.get, "/outrider/v1/status")
            else:
                pool.submit(code_of, lambda: caller.stub.GetServerStatus(pb.GetServerStatusRequest(), timeout=10))


def _unusual(caller: Caller, ports: tuple[int, int]) -> None:
    too_long = data(b"\0\x7f\xff\xff\xff" + bytes(40_000))
    raw.exchange(ports[1], PREFACE + call(raw.GENERATE) + too_long, ELSEWHERE, b"grpc-message")
    raw.exchange(ports[1], PREFACE + call(b"/\xff"), ELSEWHERE, b"grpc-message")
    raw.exchange(ports[0], b"GET /\xff HTTP/1.1\r\nhost: x\r\n\r\n", ELSEWHERE)
    for content in (bytes(9 << 20), b'{"prompt": ' + b"[" * 50_000):
        caller.http.post("/v1/completions", content=content, headers={"content-type": "application/json"})


def _schema(caller: Caller, _: tuple[int, int]) -> None:
    constrained = pb.StructuredOutputs(json=json.dumps(WIDE))
    code_of(lambda: caller.generate(timeout_s=3, max_tokens=2, structured_outputs=constrained))


def _strangers(caller: Caller, _: tuple[int, int]) -> None:
    for number in range(8):
        code_of(lambda n=number: caller.stub.AbortRequest(pb.AbortRequestRequest(request_id=f"load-{n}"), timeout=10))
        caller.http.post("/v1/completions", json={"prompt": []}, headers={"authorization": "Bearer wrong"})


ATTACKS: Sequence[tuple[float, Attack]] = (
    (5, _slow), (12, _unread), (6, _idle), (1, _poll), (1, _unusual), (5, _schema), (1, _strangers),
)  # fmt: skip
"""Each begins so many seconds after it has last begun, or when that has ended."""


def attack(ports: tuple[int, int], key: str | None, only: list[str], on: Event, over: Event) -> None:
    """Attacks while ``on`` is set, until ``over`` is."""

    def repeat(every_s: float, one: Attack) -> None:
        with Caller(*ports, source=ELSEWHERE, key=key) as caller:
            while not over.is_set():
                if not on.wait(0.2):
                    continue
                began = time.monotonic()
                with suppress(OSError, httpx.HTTPError, grpc.RpcError):
                    one(caller, ports)
                over.wait(max(0.0, began + every_s - time.monotonic()))

    with ThreadPoolExecutor() as pool:
        for each in ATTACKS:
            if not only or each[1].__name__[1:] in only:
                pool.submit(repeat, *each)


class Load:
    """Clients that ask one request after the other."""

    def __init__(self, ports: tuple[int, int], key: str | None, concurrency: int, max_tokens: int) -> None:
        self.answered, self.lost, self.stop = 0, Counter[str](), False
        self._of, self._max_tokens = (*ports, raw.HERE, key), max_tokens
        self._pool = ThreadPoolExecutor(concurrency)
        self._clients = [self._pool.submit(self._run, number) for number in range(concurrency)]

    def _run(self, number: int) -> None:
        fields: dict[str, Any] = {"max_tokens": self._max_tokens, "ignore_eos": True, "request_id": f"load-{number}"}
        prompt = [*PROMPT, number % 250]
        first: list[int] | None = None
        with Caller(*self._of) as caller:
            while not self.stop:
                try:
                    tokens = self._ask(caller, number % 2 == 0, {**fields, "prompt": prompt})
                except (grpc.RpcError, httpx.HTTPError) as error:
                    self.lost[str(error)] += 1
                    continue
                first = first or tokens
                self.lost["other tokens than before"] += tokens != first
                self.answered += tokens == first

    @staticmethod
    def _ask(caller: Caller, over_grpc: bool, fields: dict[str, Any]) -> list[int]:
        if over_grpc:
            return [token for each in caller.stream(**fields) for token in each.token_ids]
        body = {"temperature": 0, "return_token_ids": True, "stream": True, **fields}
        with caller.http.stream("POST", "/v1/completions", json=body) as answer:
            answer.raise_for_status()
            events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
        return [token for event in events for token in event["choices"][0].get("token_ids") or []]

    def join(self) -> None:
        self.stop = True
        for client in self._clients:
            client.result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--http-port", type=int, default=8000, help="of the gateway on this machine, without TLS")
    parser.add_argument("--grpc-port", type=int, default=9000)
    parser.add_argument("--key", help="API key of load and attackers")
    parser.add_argument(
        "--only", nargs="*", default=[], help=f"of {', '.join(each.__name__[1:] for _, each in ATTACKS)}"
    )
    parser.add_argument("--turns", type=int, default=4, help="alone and beside attackers, so many of each")
    parser.add_argument("--seconds", type=float, default=20.0, help="of a turn")
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()
    ports = args.http_port, args.grpc_port
    print(machine(()), versions(), flush=True)
    context = multiprocessing.get_context("spawn")
    on, over = context.Event(), context.Event()
    attackers = context.Process(target=attack, args=(ports, args.key, args.only, on, over), daemon=True)
    attackers.start()
    load = Load(ports, args.key, args.concurrency, args.max_tokens)
    time.sleep(args.seconds / 2)
    rates: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(2 * args.turns):
        beside = turn % 2 == 1
        (on.set if beside else on.clear)()
        time.sleep(2)
        before, cpu_s = load.answered, sum(psutil.Process(attackers.pid).cpu_times()[:2])
        time.sleep(args.seconds)
        rates[beside].append((load.answered - before) / args.seconds)
        cpu_s = sum(psutil.Process(attackers.pid).cpu_times()[:2]) - cpu_s
        who = f"beside attackers, who took {cpu_s:.1f} s of processor time" if beside else "alone"
        print(f"{rates[beside][-1]:6.2f} requests/s {who}; lost so far: {dict(+load.lost)}", flush=True)
    over.set()
    load.join()
    attackers.join(30)
    ratio = sum(rates[True]) / sum(rates[False])
    print(f"ratio {ratio:.2f} (goal {GOAL}); lost: {dict(+load.lost) or 'none'}")
    sys.exit(ratio < GOAL or bool(+load.lost))


if __name__ == "__main__":
    main()
