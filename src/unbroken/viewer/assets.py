"""The pages' own files, and what a browser may do with them: run these scripts, and nothing that came with the data."""

from __future__ import annotations

from importlib import resources

_SCRIPTS = (
    *("common", "streams", "grid", "tree", "timeline", "retokenised", "charts", "store", "cluster", "run", "table"),
    *("step", "math", "markdown", "notes", "rollout", "problem", "pair", "main"),
)
ASSETS = {
    "index.html": "text/html; charset=utf-8",
    "viewer.css": "text/css; charset=utf-8",
    **{f"{name}.js": "text/javascript; charset=utf-8" for name in _SCRIPTS},
}
"""Name and type of each file."""


def read_asset(name: str) -> bytes:
    """The content of a file of `ASSETS`."""
    return (resources.files("unbroken.viewer") / "page" / name).read_bytes()
