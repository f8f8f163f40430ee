"""A judge on a port of its own, in a thread, which answers by a script."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, Mapping[str, Any]]
"""A status and a body."""


def says(text: str, *, finish_reason: str = "stop", total_tokens: int | None = 10) -> Answer:
    """A chat completion."""
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}
    usage = {} if total_tokens is None else {"usage": {"total_tokens": total_tokens}}
    return 200, {"choices": [choice], **usage}


def fails(status: int) -> Answer:
    """An error."""
    return status, {"error": {"message": f"status {status}"}}


@contextmanager
def serve_judge(answer: Callable[[str], Answer], asked: list[dict[str, Any]]) -> Iterator[str]:
    """Answer by the last message's text; `asked` gets the bodies. Yields the URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append({**body, "path": self.path, "authorization": self.headers.get("Authorization")})
            status, reply = answer(body["messages"][-1]["content"])
            data = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
