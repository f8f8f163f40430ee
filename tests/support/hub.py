"""The Hugging Face Hub's HTTP API as huggingface_hub uses it to upload a folder, on a port of this machine."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_right"


class Hub:
    """What the hub was asked to do."""

    def __init__(self) -> None:
        self.url = ""
        self.created: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        """Files of all commits, by repository and path."""
        self.summaries: list[str] = []
        self.blobs: dict[str, bytes] = {}
        self.environment: dict[str, str] = {}
        """Of a process that shall talk to this hub; its token is the right one."""


@contextmanager
def serve_hub() -> Iterator[Hub]:
    """Serve during the block."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("_Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    # hf_xet would upload large files by a protocol of its own.
    hub.environment = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(404, {"error": "not found"})

    def do_HEAD(self) -> None:
        self._answer(404, {})

    def do_PUT(self) -> None:
        self.hub.blobs[self.path.rpartition("/")[2]] = self._read()
        self._answer(200, {})

    def do_POST(self) -> None:
        body = self._read()
        path = self.path.partition("?")[0]
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._answer(401, {"error": "Invalid credentials in Authorization header"})
        elif path == "/api/repos/create":
            self.hub.created.append(json.loads(body))
            self._answer(200, {"url": f"{self.hub.url}/me/mine"})
        elif path == "/api/validate-yaml":
            self._answer(200, {"errors": [], "warnings": []})
        elif "/preupload/" in path:
            files = json.loads(body)["files"]
            self._answer(
                200, {"files": [{"path": f["path"], "uploadMode": _mode(f), "shouldIgnore": False} for f in files]}
            )
        elif path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            actions = [
                {**each, "actions": {"upload": {"href": f"{self.hub.url}/blob/{each['oid']}"}}} for each in objects
            ]
            self._answer(200, {"transfer": "basic", "objects": actions})
        elif "/commit/" in path:
            self._commit(path.split("/api/models/")[1].partition("/commit/")[0], body)
            self._answer(200, {"commitUrl": f"{self.hub.url}/me/mine/commit/1", "commitOid": "1", "success": True})
        else:
            self._answer(404, {"error": path})

    def _commit(self, repository: str, body: bytes) -> None:
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            match line["key"]:
                case "header":
                    self.hub.summaries.append(value["summary"])
                case "file":
                    self.hub.files[f"{repository}/{value['path']}"] = base64.b64decode(value["content"])
                case "lfsFile":
                    blob = self.hub.blobs[value["oid"]]
                    assert hashlib.sha256(blob).hexdigest() == value["oid"]
                    self.hub.files[f"{repository}/{value['path']}"] = blob

    def _read(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _answer(self, status: int, contents: Any) -> None:
        data = json.dumps(contents).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _mode(file: dict[str, Any]) -> str:
    return "lfs" if file["path"].endswith(".safetensors") else "regular"
