"""Reports of commands: as plain text of 80 columns, as JSON, and as one page that opens offline.

A page is drawn with the viewer's stylesheet, charts and grid of ids. Jinja escapes all text from outside. What the
script draws is JSON whose `<`, `>` and `&` are escaped, and the page's Content-Security-Policy names the one script and
the one stylesheet that may be used, by their hashes.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from unbroken.errors import InvalidInputError
from unbroken.retokenising.changes import IdOrigin
from unbroken.viewer.assets import read_asset

if TYPE_CHECKING:
    from unbroken.retokenising.comparison import Retokenised

WIDTH = 80
_LABEL_WIDTH = 16
_PACKAGE = "unbroken.viewer"
_STYLES = ("viewer.css",)
_SCRIPTS = ("common.js", "streams.js", "grid.js", "charts.js")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownToken:
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

    exact: tuple[ShownToken, ...]
    retokenised: tuple[ShownToken, ...]


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
            ShownToken(token_id=i, text=get_text(i), origin=origin, is_changed=is_changed, note=(notes or {}).get(k))
            for k, (i, origin, is_changed) in enumerate(zip(ids, found.origins, changed, strict=True))
        ),
        retokenised=tuple(
            ShownToken(token_id=i, text=get_text(i), origin=origin, is_changed=is_changed)
            for i, origin, is_changed in zip(usual, usual_origins, usual_changed, strict=True)
        ),
    )


def write_text(title: str, paragraphs: Iterable[str], rows: Iterable[tuple[str, Iterable[str]]]) -> str:
    """A report as text: its title, paragraphs, and rows, each a label with its lines. All may be from outside."""
    wrapped = [
        line for text in paragraphs for line in textwrap.wrap(make_printable(text), WIDTH, break_on_hyphens=False)
    ]
    lines = [shorten(make_printable(title), WIDTH), "", *wrapped, ""]
    lines += [line for label, values in rows for line in _wrap_row(label, values)]
    return "\n".join(lines) + "\n"


def _wrap_row(label: str, values: Iterable[str]) -> Iterator[str]:
    """Put a label before the first of the lines that show the values."""
    for value in values:
        wrapped = textwrap.wrap(
            value, WIDTH - _LABEL_WIDTH, subsequent_indent="  ", break_on_hyphens=False, replace_whitespace=False
        )
        for line in wrapped or [""]:
            yield f"{label:<{_LABEL_WIDTH}}{line}".rstrip()
            label = ""


def make_printable(text: str) -> str:
    """Put text from outside on one line, with control characters escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shorten(text: str, length: int) -> str:
    """Cut a text that is longer."""
    return text if len(text) <= length else f"{text[: length - 2]}.."


def format_percent(part: float, whole: float = 1) -> str:
    """Show a share in percent with one decimal."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def to_plain(value: Any) -> Any:
    """Convert dataclasses, enums and mappings to values that JSON has."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [to_plain(item) for item in value]
    return value


def write_file(file: Path, text: str) -> None:
    """Write a report, and create its folder; raises `InvalidInputError` if that is not possible."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidInputError(f"{file} cannot be written: {error.strerror or error}") from None


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
