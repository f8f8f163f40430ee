"""The pages' own files, and what a browser may do with them: run these scripts, and nothing that came with the data."""

from __future__ import annotations

from importlib import resources

ASSETS = {
    "index.html": "text/html; charset=utf-8",
    "viewer.css": "text/css; charset=utf-8",
    "common.js": "text/javascript; charset=utf-8",
    "streams.js": "text/javascript; charset=utf-8",
    "grid.js": "text/javascript; charset=utf-8",
    "tree.js": "text/javascript; charset=utf-8",
    "timeline.js": "text/javascript; charset=utf-8",
    "retokenised.js": "text/javascript; charset=utf-8",
    "charts.js": "text/javascript; charset=utf-8",
    "store.js": "text/javascript; charset=utf-8",
    "cluster.js": "text/javascript; charset=utf-8",
    "run.js": "text/javascript; charset=utf-8",
    "table.js": "text/javascript; charset=utf-8",
    "step.js": "text/javascript; charset=utf-8",
    "rollout.js": "text/javascript; charset=utf-8",
    "main.js": "text/javascript; charset=utf-8",
}
"""Name and type of each file."""


def read_asset(name: str) -> bytes:
    """The content of a file of `ASSETS`."""
    return (resources.files("unbroken.viewer") / "page" / name).read_bytes()
