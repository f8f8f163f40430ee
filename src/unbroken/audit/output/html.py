"""The report as one page that opens without a network. Everything from outside is escaped by the template engine."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from unbroken.audit.output.text import (
    KIND_WORDS,
    TRAIT_WORDS,
    boundary_words,
    closed_words,
    percent,
    spelled,
    visible,
)
from unbroken.audit.report import AuditReport, Origin, ShownToken, SideBySide, Verdict

_NUM_UNFOLDED = 24
_VERDICT_WORDS = {Verdict.FIT: "FIT", Verdict.PARTLY_FIT: "PARTLY FIT", Verdict.UNFIT: "NOT USABLE"}


def write_page(report: AuditReport, file: Path) -> None:
    """Write the page; its folder is made."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(to_html(report), encoding="utf-8")


def to_html(report: AuditReport) -> str:
    """The page."""
    environment = Environment(
        loader=PackageLoader("unbroken.audit.output", package_path=""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(visible=visible, shown=_shown)
    return environment.get_template("report.html.jinja").render(
        report=report,
        verdict=_VERDICT_WORDS[report.verdict],
        kind=KIND_WORDS[report.kind.kind],
        traits=[TRAIT_WORDS[trait] for trait in report.kind.traits],
        closed=[closed_words(closed) for closed in report.turn_ends.closed],
        boundaries=[boundary_words(boundary) for boundary in report.boundaries],
        spelled=spelled,
        percent=percent,
        num_changed=sum(token.is_changed for token in report.side_by_side.exact),
        num_folded=_num_folded(report.side_by_side),
    )


def _num_folded(sides: SideBySide) -> int:
    """How many ids at the beginning of both sides need not be seen at once: all of a long prompt but its end."""
    num_same = 0
    for ours, usual in zip(sides.exact, sides.retokenised, strict=False):
        if ours != usual or ours.origin is not Origin.PROMPT:
            break
        num_same += 1
    return num_same - _NUM_UNFOLDED if num_same > 2 * _NUM_UNFOLDED else 0


def _shown(token: ShownToken) -> str:
    """A token's text on a page: a line break as an arrow, what does not print spelled out."""
    return "".join("↵" if c == "\n" else visible(c) for c in token.text) or "∅"
