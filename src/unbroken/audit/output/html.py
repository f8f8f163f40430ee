"""Shows a report as one HTML page that opens offline, with the viewer's pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unbroken.audit.output.text import (
    KIND_WORDS,
    TRAIT_WORDS,
    describe_boundary,
    describe_closing,
    format_percent,
    format_tokens,
)
from unbroken.audit.report import AuditReport, ShownToken, Verdict
from unbroken.viewer.reports import make_token, render_report

_VERDICT_WORDS = {
    Verdict.FIT: "FIT",
    Verdict.PARTLY_FIT: "PARTLY FIT",
    Verdict.UNFIT: "NOT USABLE",
    Verdict.UNDECIDED: "UNDECIDED",
}


def to_html(report: AuditReport) -> str:
    """Make the page."""
    return render_report(
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
        exact=make_tokens(report.side_by_side.exact),
        retokenised=make_tokens(report.side_by_side.retokenised),
        percent=format_percent,
    )


def make_tokens(tokens: Sequence[ShownToken]) -> list[dict[str, Any]]:
    """Ids for the grid of a report."""
    return [make_token(token.token_id, token.text, token.origin.value, is_changed=token.is_changed) for token in tokens]
