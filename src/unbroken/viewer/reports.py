"""Pages of commands that open offline; what they say as text and JSON is in `unbroken.reports`.

A page is drawn with the viewer's stylesheet, charts and grid of ids. Jinja escapes all text from outside. What the
script draws is JSON whose `<`, `>` and `&` are escaped, and the page's Content-Security-Policy names the one script and
the one stylesheet that may be used, by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from unbroken.reports import format_percent, make_printable, to_plain
from unbroken.retokenising.changes import IdOrigin
from unbroken.viewer.assets import read_asset

if TYPE_CHECKING:
    from unbroken.retokenising.comparison import Retokenised

_PACKAGE = "unbroken.viewer"
_STYLES = ("viewer.css",)
_SCRIPTS = ("common.js", "streams.js", "grid.js", "charts.js")


@dataclass(frozen=True, slots=True, kw_only=True)
class _ShownToken:
    """An id in a grid of a page."""

    token_id: int
    text: str
    origin: IdOrigin
    is_changed: bool
    """The other sequence has a different id in its place, or none."""
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SideBySide:
    """A conversation as the ids that we train on, and as those of the usual pipeline."""

    exact: tuple[_ShownToken, ...]
    retokenised: tuple[_ShownToken, ...]


def show_side_by_side(
    found: Retokenised, get_text: Callable[[int], str], *, notes: Mapping[int, str] | None = None
) -> SideBySide:
    """Show both sequences; `notes` are on positions of the exact ids. A new id has the origin of what it replaced."""
    ids, usual = found.token_ids.tolist(), found.retokenised_ids.tolist()
    changed, usual_changed = [False] * len(ids), [False] * len(usual)
    usual_origins: list[IdOrigin] = []
    position = 0
    for change in found.changes:
        (start, stop), (first, last) = change.gap.before, change.gap.after
        changed[start:stop] = [True] * (stop - start)
        usual_changed[first:last] = [True] * (last - first)
        usual_origins += found.origins[position:start]
        usual_origins += [found.origins[min(start, len(ids) - 1)]] * (last - first)
        position = stop
    usual_origins += found.origins[position:]
    return SideBySide(
        exact=tuple(
            _ShownToken(token_id=i, text=get_text(i), origin=origin, is_changed=is_changed, note=(notes or {}).get(k))
            for k, (i, origin, is_changed) in enumerate(zip(ids, found.origins, changed, strict=True))
        ),
        retokenised=tuple(
            _ShownToken(token_id=i, text=get_text(i), origin=origin, is_changed=is_changed)
            for i, origin, is_changed in zip(usual, usual_origins, usual_changed, strict=True)
        ),
    )


def render_page(package: str, name: str, **values: Any) -> str:
    """Render a template of a package, which extends `base.html.jinja` and may import `pieces.html.jinja`."""
    loaders = [PackageLoader(package, package_path=""), PackageLoader(_PACKAGE, package_path="report")]
    environment = Environment(
        loader=ChoiceLoader(loaders), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(visible=make_printable, sha256=_hash, plain=to_plain)
    environment.globals.update(percent=format_percent)
    style = _join(_STYLES, "report.css")
    return environment.get_template(name).render(style=style, script=_join(_SCRIPTS, "report.js"), **values)


def _join(assets: tuple[str, ...], own: str) -> Markup:
    """Files of ours as one; each script begins with its own 'use strict'."""
    texts = [read_asset(name).decode() for name in assets]
    texts.append((resources.files(_PACKAGE) / "report" / own).read_text("utf-8"))
    return Markup("\n".join(texts))


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
