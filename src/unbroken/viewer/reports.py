"""Reports of other commands as one file that opens offline, drawn with the viewer's stylesheet, charts and grid of ids.

Jinja escapes all text from outside. What the script draws is JSON whose `<`, `>` and `&` are escaped, and the page's
Content-Security-Policy names the one script and the one stylesheet that may be used, by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from unbroken.viewer.assets import read_asset
from unbroken.viewer.texts import make_printable

_PACKAGE = "unbroken.viewer"
_STYLES = ("viewer.css",)
_SCRIPTS = ("common.js", "streams.js", "grid.js", "charts.js")


def render_report(package: str, name: str, **values: Any) -> str:
    """Render a template of a package, which extends `base.html.jinja` and may import `pieces.html.jinja`."""
    loaders = [PackageLoader(package, package_path=""), PackageLoader(_PACKAGE, package_path="report")]
    environment = Environment(
        loader=ChoiceLoader(loaders),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(visible=make_printable, sha256=_hash)
    style = _join(_STYLES, "report.css")
    return environment.get_template(name).render(style=style, script=_join(_SCRIPTS, "report.js"), **values)


def write_page(file: Path, page: str) -> None:
    """Write a page, and create its folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(page, encoding="utf-8")


def make_token(
    token_id: int, text: str, origin: str, *, is_changed: bool = False, note: str | None = None
) -> dict[str, Any]:
    """An id for the grid of a report. `origin` is prompt, sampled, bridge or message."""
    return {"id": token_id, "text": text, "origin": origin, "changed": is_changed, "note": note}


def _join(assets: tuple[str, ...], own: str) -> Markup:
    """Files of ours as one; each script begins with its own 'use strict'."""
    texts = [read_asset(name).decode() for name in assets]
    texts.append((resources.files(_PACKAGE) / "report" / own).read_text("utf-8"))
    return Markup("\n".join(texts))


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
