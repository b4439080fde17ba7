"""Answers a file of requests in OpenAI's batch format, at full batch, without a server.

Each line of the input is ``{"custom_id": ..., "method": "POST", "url": "/v1/chat/completions", "body": {...}}``; each
line of the output is the answer to one of them, in the order in which they end. A run that was interrupted goes on
where it stopped: requests whose ``custom_id`` the output holds already are left out.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tqdm import tqdm

from outrider.actors.replica_calls import HttpCall
from outrider.actors.serving.routing.request_profile import of_body
from outrider.cluster.config import ConfigError, OutriderConfig

if TYPE_CHECKING:
    from outrider.actors.serving.openai.app import OpenAIApp

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
WAITING_PER_SEAT = 4
"""Requests handed to the engine for each that it batches: enough that no step runs short, few enough to keep memory."""


@dataclass(frozen=True)
class BatchRequest:
    """One line of the input."""

    custom_id: str
    url: str
    body: dict[str, Any]


def read_requests(path: Path) -> list[BatchRequest]:
    """Returns the requests of a file. Raises ConfigError naming the line and the field that is wrong."""
    requests: list[BatchRequest] = []
    seen: set[str] = set()
    for number, line in _lines(path, "-i"):
        where = f"{path}, line {number}"
        try:
            document = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{where}: is not JSON: {error}") from None
        if not isinstance(document, dict):
            raise ConfigError(f"{where}: must be an object")
        custom_id, url, body = (document.get(name) for name in ("custom_id", "url", "body"))
        if not isinstance(custom_id, str) or not custom_id:
            raise ConfigError(f"{where}: custom_id: must be a text that is not empty")
        if custom_id in seen:
            raise ConfigError(f"{where}: custom_id: {custom_id!r} stands in the file twice; answers are told by it")
        if url not in URLS:
            raise ConfigError(f"{where}: url: must be one of {', '.join(URLS)} (found {url!r})")
        if document.get("method", "POST") != "POST":
            raise ConfigError(f"{where}: method: must be POST")
        if not isinstance(body, dict):
            raise ConfigError(f"{where}: body: must be an object")
        if body.get("stream"):
            raise ConfigError(f"{where}: body.stream: answers of a batch are not streamed; leave it out")
        seen.add(custom_id)
        requests.append(BatchRequest(custom_id, url, body))
    return requests


def answered(path: Path) -> set[str]:
    """Returns the ``custom_id`` of each answer in an output, and cuts off a last line that was not written whole.

    Raises ConfigError for a file of something else.
    """
    if not path.exists():
        return set()
    whole, found = 0, set()
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            try:
                found.add(json.loads(line)["custom_id"])
            except (ValueError, TypeError, KeyError):
                raise ConfigError(f"-o: {path} holds lines that are no answers; write to another file") from None
            whole += len(line)
    with path.open("r+b") as file:
        file.truncate(whole)
    return found


async def run_batch(config: OutriderConfig, requests: list[BatchRequest], output: Path) -> int:
    """Answers requests, each appended to output as soon as it ends. Returns how many ended with an error."""
    from outrider.actors.serving.openai.app import OpenAIApp
    from outrider.deploy.llm.llm import AsyncLLM

    llm = AsyncLLM.from_config(config)
    failed = 0
    try:
        app = await OpenAIApp.make(llm, llm.config, "batch")
        room = asyncio.Semaphore(WAITING_PER_SEAT * llm.config.target.max_num_seqs)
        with output.open("a", encoding="utf-8") as file, tqdm(total=len(requests), unit="req", desc="run-batch") as bar:

            async def answer(request: BatchRequest) -> int:
                async with room:
                    status, body = await _answer(app, request)
                _write(file, request, status, body)
                bar.update()
                return int(status >= 400)

            failed = sum(await asyncio.gather(*map(answer, requests)))
    finally:
        llm.shutdown()
    return failed


async def _answer(app: OpenAIApp, request: BatchRequest) -> tuple[int, Any]:
    """Returns status and decoded body of the answer by vLLM's OpenAI server."""
    body = json.dumps(request.body).encode()
    headers = ((b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()))
    call = HttpCall("POST", request.url, b"", headers, body, request_id=uuid.uuid4().hex, routed=of_body(request.body))
    status, content = await app.whole_answer(call)
    return status, json.loads(content or b"null")


def _write(file: IO[str], request: BatchRequest, status: int, body: Any) -> None:
    answer = {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": request.custom_id,
        "response": {"status_code": status, "request_id": uuid.uuid4().hex, "body": body if status < 400 else None},
        "error": None if status < 400 else body,
    }
    file.write(json.dumps(answer, ensure_ascii=False) + "\n")
    file.flush()


def _lines(path: Path, option: str) -> Iterator[tuple[int, str]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option}: {path} cannot be read: {error}") from None
    return ((number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip())
