"""Shows a report as one HTML page that opens offline, with the viewer's pieces."""

from __future__ import annotations

from unbroken.audit.output.html import make_tokens
from unbroken.audit.output.text import format_percent
from unbroken.drift.report import DriftReport
from unbroken.drift.text import CAUSE_WORDS, describe_left_out, make_sentence
from unbroken.viewer.reports import render_report


def to_html(report: DriftReport) -> str:
    """Make the page."""
    return render_report(
        "unbroken.drift",
        "page.html.jinja",
        report=report,
        sentence=make_sentence(report),
        words=CAUSE_WORDS,
        left_out=list(describe_left_out(report)),
        make_tokens=make_tokens,
        percent=format_percent,
    )
