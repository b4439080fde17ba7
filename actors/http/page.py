"""The page at ``/``: plain files from ``static/``, no build step, nothing from anywhere else."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib import resources

from fastapi import FastAPI, Request
from starlette.responses import Response

ASSETS_PATH = "/outrider/page"
INDEX = "index.html"

MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    # Kept by the browser, asked about each time: a new version is seen at once, an old one costs a 304.
    "cache-control": "no-cache",
}


@dataclass(frozen=True)
class StaticFile:
    content: bytes
    media_type: str
    etag: str


def load_static_files() -> dict[str, StaticFile]:
    """By file name."""
    files = {}
    for entry in resources.files("actors.http").joinpath("static").iterdir():
        media_type = MEDIA_TYPES.get(entry.name[entry.name.rfind(".") :])
        if media_type is not None:
            content = entry.read_bytes()
            files[entry.name] = StaticFile(content, media_type, f'"{hashlib.sha256(content).hexdigest()[:32]}"')
    return files


def add_page_routes(app: FastAPI) -> None:
    """Raises FileNotFoundError when the installation lacks the page's files."""
    files = load_static_files()
    if INDEX not in files:
        raise FileNotFoundError("actors/http/static/index.html is not installed; install outrider again")
    paths = {"/": files.pop(INDEX)} | {f"{ASSETS_PATH}/{name}": file for name, file in files.items()}
    for path, file in paths.items():
        app.add_api_route(path, _route(file), methods=["GET", "HEAD"], include_in_schema=False)


def _route(file: StaticFile) -> Callable[[Request], Awaitable[Response]]:
    headers = {**HEADERS, "etag": file.etag}

    async def respond(request: Request) -> Response:
        known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
        if file.etag in known:
            return Response(status_code=304, headers=headers)
        return Response(file.content, media_type=file.media_type, headers=headers)

    return respond
