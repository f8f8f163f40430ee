"""Shows a report as one HTML page that opens offline, with the viewer's pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unbroken.audit.output.text import format_percent, make_rows
from unbroken.audit.report import AuditReport, ShownToken, Verdict
from unbroken.viewer.reports import make_token, render_report

_VERDICT_WORDS = {
    Verdict.FIT: "FIT",
    Verdict.PARTLY_FIT: "PARTLY FIT",
    Verdict.UNFIT: "NOT USABLE",
    Verdict.UNDECIDED: "UNDECIDED",
}
_WITH_TABLES = ("arguments", "bridges")
"""The findings with tables of their own."""


def to_html(report: AuditReport) -> str:
    """Make the page."""
    return render_report(
        "unbroken.audit.output",
        "report.html.jinja",
        report=report,
        verdict=_VERDICT_WORDS[report.verdict],
        rows=[(label, list(values)) for label, values in make_rows(report) if label not in _WITH_TABLES],
        num_changed=sum(token.is_changed for token in report.side_by_side.exact),
        exact=make_tokens(report.side_by_side.exact),
        retokenised=make_tokens(report.side_by_side.retokenised),
        percent=format_percent,
    )


def make_tokens(tokens: Sequence[ShownToken]) -> list[dict[str, Any]]:
    """Ids for the grid of a report."""
    return [make_token(token.token_id, token.text, token.origin.value, is_changed=token.is_changed) for token in tokens]
