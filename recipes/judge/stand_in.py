"""A stand-in for a judge, to try the recipe without one: `python recipes/judge/stand_in.py [PORT]`.

It answers chat completions, reads the answer in the prompt, and replies with the share of digits in it.
"""

from __future__ import annotations

import json
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class StandIn(BaseHTTPRequestHandler):
    """Replies to `POST /v1/chat/completions`."""

    def do_POST(self) -> None:
        """Judge the answer that the last message shows."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        shown = body["messages"][-1]["content"]
        answer = re.search(r"Answer: (.*)\n\nHow near", shown, re.DOTALL)
        text = answer[1] if answer else ""
        score = sum(map(str.isdigit, text)) / max(1, len(text))
        message = {"role": "assistant", "content": f"{score:.3f}"}
        reply = {
            "object": "chat.completion",
            "model": body["model"],
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": len(shown), "completion_tokens": 1, "total_tokens": len(shown) + 1},
        }
        data = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Say nothing of each request."""


def main(port: int) -> None:
    """Serve on this machine alone, until it is interrupted."""
    with ThreadingHTTPServer(("127.0.0.1", port), StandIn) as server:
        print(f"a judge at http://127.0.0.1:{server.server_address[1]}/v1", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 8020)
