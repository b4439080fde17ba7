"""A server of OpenAI's API that says the same two words to everything, in this process."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Api(BaseHTTPRequestHandler):
    """Streams two words for each prompt, and counts them at /metrics."""

    prompts: list[str]
    fails = False

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            return self._send(json.dumps({"data": [{"id": "m", "root": "m"}]}))
        if self.path == "/metrics":
            text = f"# TYPE vllm:generation_tokens counter\nvllm:generation_tokens_total {2.0 * len(self.prompts)}\n"
            return self._send(text)
        return self._send("")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.fails:
            return self._send("{}", 500)
        self.prompts.append(body["prompt"])
        pieces = [{"choices": [{"text": text}]} for text in (" one", " two")]
        pieces.append({"choices": [], "usage": {"completion_tokens": 2}})  # type: ignore[dict-item]
        return self._send("".join(f"data: {json.dumps(piece)}\n\n" for piece in pieces) + "data: [DONE]\n\n")

    def _send(self, text: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json" if self.path == "/v1/models" else "text/event-stream")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Keep quiet."""


def server(port: int = 0) -> ThreadingHTTPServer:
    return ThreadingHTTPServer(("127.0.0.1", port), type("ThisApi", (Api,), {"prompts": []}))
