"""Shows a report as one HTML page without external resources. Jinja escapes all text from outside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from unbroken.audit.output.text import (
    KIND_WORDS,
    TRAIT_WORDS,
    describe_boundary,
    describe_closing,
    format_percent,
    format_tokens,
    make_printable,
)
from unbroken.audit.report import AuditReport, Origin, ShownToken, SideBySide, Verdict

_NUM_UNFOLDED = 24
_VERDICT_WORDS = {
    Verdict.FIT: "FIT",
    Verdict.PARTLY_FIT: "PARTLY FIT",
    Verdict.UNFIT: "NOT USABLE",
    Verdict.UNDECIDED: "UNDECIDED",
}


def write_page(report: AuditReport, file: Path) -> None:
    """Write the page, and create its folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(to_html(report), encoding="utf-8")


def to_html(report: AuditReport) -> str:
    """Make the page."""
    return render_page(
        "unbroken.audit.output",
        "report.html.jinja",
        report=report,
        verdict=_VERDICT_WORDS[report.verdict],
        kind=KIND_WORDS[report.kind.kind],
        traits=[TRAIT_WORDS[trait] for trait in report.kind.traits],
        closed=[describe_closing(closed) for closed in report.turn_ends.closed],
        boundaries=[describe_boundary(boundary) for boundary in report.boundaries],
        spelled=format_tokens,
        num_changed=sum(token.is_changed for token in report.side_by_side.exact),
        num_folded=count_folded(report.side_by_side),
    )


def render_page(package: str, name: str, **values: Any) -> str:
    """Render a template of a package, which may include this one's `style.css.jinja` and `tokens.html.jinja`."""
    environment = Environment(
        loader=ChoiceLoader(
            [PackageLoader(package, package_path=""), PackageLoader("unbroken.audit.output", package_path="")]
        ),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(visible=make_printable, shown=_show_token)
    return environment.get_template(name).render(percent=format_percent, **values)


def count_folded(sides: SideBySide) -> int:
    """The number of ids to fold at the beginning of both sides: all of a long prompt except its end."""
    num_same = 0
    for ours, usual in zip(sides.exact, sides.retokenised, strict=False):
        if ours != usual or ours.origin is not Origin.PROMPT:
            break
        num_same += 1
    return num_same - _NUM_UNFOLDED if num_same > 2 * _NUM_UNFOLDED else 0


def _show_token(token: ShownToken) -> str:
    """A token's text for the page: a line break as an arrow, other control characters escaped."""
    return "".join("↵" if c == "\n" else make_printable(c) for c in token.text) or "∅"
