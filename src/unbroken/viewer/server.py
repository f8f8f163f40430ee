"""Serves the pages on this machine, or writes them into a folder that is opened without a server and sent to others.

http://127.0.0.1:PORT/SECRET/             the page, for whoever knows the URL; no web page can read it
http://127.0.0.1:PORT/SECRET/api/index    an object of `resources`, as JSON
POST .../api/run/0/step/12/rollout/3/note  a note of a rollout: all that is ever written

page/index.html                            the page
page/data/run/0/step/12.js                 one object of `resources`, as a script: a browser reads no JSON from a disk
page/images/run/0/image/SHA256
"""

from __future__ import annotations

import hmac
import json
import secrets
import shutil
import sys
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from unbroken.errors import InvalidInputError, MetricsError, StoreError
from unbroken.runs.records.notes import MAX_NOTE_BYTES, ChangedNoteError
from unbroken.viewer.assets import ASSETS, read_asset
from unbroken.viewer.resources import Resources

_HOST = "127.0.0.1"
_NUM_SECRET_BYTES = 24
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_IMAGE_TYPES = {b"\x89PNG": "image/png", b"\xff\xd8\xff": "image/jpeg", b"GIF8": "image/gif", b"RIFF": "image/webp"}
_MARK = "unbroken-view.json"
_SERVED = b'data-source="api"'
_EXPORTED = b'data-source="files"'


class ViewerServer(ThreadingHTTPServer):
    """Answers requests below its `url`, from this machine only."""

    daemon_threads = True

    def __init__(self, resources: Resources, *, port: int = 0) -> None:
        """Listen on a port; 0: any free one.

        Raises:
            InvalidInputError: the port is in use.
        """
        try:
            super().__init__((_HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            raise InvalidInputError(f"--port must be a free port, got {port}: {error}") from None
        self.resources = resources
        self.secret = secrets.token_urlsafe(_NUM_SECRET_BYTES)

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://{_HOST}:{self.server_port}/{self.secret}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that leaves before it has its answer is no failure."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: ViewerServer
    server_version = "unbroken"
    sys_version = ""
    timeout = 30

    def do_GET(self) -> None:
        """Answer with a file, an image or an object; see the module."""
        if (refusal := self._find_refusal()) is not None:
            self._send(403, "text/plain; charset=utf-8", refusal.encode())
            return
        path = self.path.partition("?")[0].removeprefix(f"/{self.server.secret}/") or "index.html"
        try:
            if path in ASSETS:
                self._send(200, ASSETS[path], read_asset(path))
            elif path.startswith("images/"):
                data = self.server.resources.get_image(path.removeprefix("images/"))
                self._send(200, _find_image_type(data), data)
            elif path.startswith("api/"):
                self._send_json(200, self.server.resources.get(path.removeprefix("api/")))
            else:
                self._send_json(404, {"error": f"there is no {path[:200]}"})
        except (InvalidInputError, StoreError) as error:
            self._send_json(500, {"error": str(error)})
        except LookupError as error:
            self._send_json(404, {"error": str(error)})
        except ConnectionError:
            raise
        except Exception as error:  # a record with an unknown fault: the other pages still work
            self._send_json(500, {"error": f"it cannot be shown: {type(error).__name__}: {error}"[:500]})

    def do_POST(self) -> None:
        """Save a note of a rollout, and answer with what is shown of it."""
        if (refusal := self._find_refusal() or self._find_refusal_to_write()) is not None:
            self._send(403, "text/plain; charset=utf-8", refusal.encode())
            return
        path = self.path.partition("?")[0].removeprefix(f"/{self.server.secret}/api/")
        try:
            self._send_json(200, self.server.resources.write_note(path, self._read_body()))
        except ChangedNoteError as error:
            self._send_json(409, {"error": str(error)})
        except InvalidInputError as error:
            self._send_json(400, {"error": str(error)})
        except LookupError as error:
            self._send_json(404, {"error": str(error)})
        except (MetricsError, StoreError) as error:
            self._send_json(500, {"error": str(error)})

    def _read_body(self) -> bytes:
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdecimal() and len(length) < 9) or int(length) > MAX_NOTE_BYTES:
            raise InvalidInputError(f"Content-Length must be 0 to {MAX_NOTE_BYTES}, got {length[:20]!r}")
        return self.rfile.read(int(length))

    def _find_refusal_to_write(self) -> str | None:
        """Why nothing is written: another page may link here, and may not send anything, not even by a form."""
        own = [f"http://{self.headers.get('Host')}", None]
        if self.headers.get("Sec-Fetch-Site", "same-origin") != "same-origin" or self.headers.get("Origin") not in own:
            return "a page of another origin writes nothing here\n"
        if self.headers.get("Content-Type") != "application/json":
            return "Content-Type must be application/json\n"
        return None

    def _find_refusal(self) -> str | None:
        """Why the request is refused: by another name of this machine a web page could be behind it."""
        own = {f"{name}:{self.server.server_port}" for name in (_HOST, "localhost")}
        if self.headers.get("Host") not in own:
            return f"Host must be {' or '.join(sorted(own))}\n"
        if self.headers.get("Sec-Fetch-Site") in ("cross-site", "same-site") and not self._opens_page():
            return "a page of another origin reads nothing here\n"
        parts = self.path.partition("?")[0].split("/", 2)
        if len(parts) < 3 or not hmac.compare_digest(parts[1].encode(), self.server.secret.encode()):
            return "the URL must have the secret that `unbroken view` printed\n"
        return None

    def _opens_page(self) -> bool:
        """Whether someone follows a link here, which shows the page and gives nothing to where the link is."""
        return self.headers.get("Sec-Fetch-Mode") == "navigate"

    def _send_json(self, status: int, value: Any) -> None:
        # ASCII only: what a rollout holds may be half a surrogate pair, which UTF-8 has no bytes for.
        self._send(status, "application/json", json.dumps(value, separators=(",", ":")).encode())

    def _send(self, status: int, kind: str, data: bytes) -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Type": kind, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the name of the base class
        """Say nothing: a request's line has the secret."""


def _find_image_type(data: bytes) -> str:
    """The type of an image file by its first bytes; no type that a browser would run."""
    return next((kind for start, kind in _IMAGE_TYPES.items() if data.startswith(start)), "application/octet-stream")


def export_page(resources: Resources, folder: Path, *, max_rollouts: int = sys.maxsize) -> int:
    """Write the page into `folder`, in place of an earlier export; returns how many files it has.

    Of each run it has the lines of all rollouts, and `max_rollouts` of them whole, evenly spread over the steps.

    Raises:
        InvalidInputError: the folder holds other files or links, or cannot be written.
    """
    _check_target(folder)
    num_files = len(ASSETS)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _MARK).write_text('{"format": 1}\n', "utf-8")
        for part in ("data", "images"):
            if (folder / part).exists():
                shutil.rmtree(folder / part)
        for name in ASSETS:
            (folder / name).write_bytes(read_asset(name).replace(_SERVED, _EXPORTED))
        for path in resources.list_paths(max_rollouts=max_rollouts):
            with suppress(LookupError, InvalidInputError):  # a run or gateway may delete what was listed
                _write_file(folder / "data" / f"{path}.js", _to_script(path, resources.get(path)))
                num_files += 1
        for path in resources.list_images():
            with suppress(LookupError):
                _write_file(folder / "images" / path, resources.get_image(path))
                num_files += 1
    except OSError as error:
        raise InvalidInputError(f"--export {folder} cannot be written: {error}") from error
    return num_files


def _check_target(folder: Path) -> None:
    """Raise unless an export may take the place of all that a folder has."""
    if folder.exists() and not folder.is_dir():
        raise InvalidInputError(f"--export must be a folder, got the file {folder}")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / _MARK).exists():
        raise InvalidInputError(f"--export must be a new or empty folder or an earlier export, got {folder}")
    for name in (_MARK, *ASSETS, "data", "images"):  # what is below the last two is removed before anything is written
        if (folder / name).is_symlink():
            raise InvalidInputError(f"--export must be a folder without links, and {folder / name} is one: remove it")


def _to_script(path: str, value: object) -> bytes:
    """An object as a script that hands it to the page.

    It is a string of JSON: as an expression `{"__proto__": 1}` would be an object without such a key.
    """
    data = json.dumps(value, separators=(",", ":"))
    return f"receive({json.dumps(path)}, JSON.parse({json.dumps(data)}));\n".encode()


def _write_file(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
