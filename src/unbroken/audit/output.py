"""Shows what an audit has found as a report, and as a page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from unbroken.audit.report import (
    KIND_WORDS,
    TRAIT_WORDS,
    AuditReport,
    BoundaryFinding,
    ClosedTurn,
    Token,
    Trait,
    TurnEndFinding,
    Verdict,
)
from unbroken.reports import Report, ReportTable, format_percent, make_printable, shorten
from unbroken.viewer.reports import render_page

_MAX_TOKENS_SHOWN = 9

_BOUNDARY_WORDS = {
    "same": "nothing is lost",
    "refused": "we refuse the bridge, there is nothing to compare with",
    "raises": "the template does not render the new messages alone",
    "drops": "rendered alone, the new message itself is left out",
}
_HISTORY_WORDS = {
    "kept": "keeps everything",
    "drops_reasoning": "drops or re-wraps reasoning",
    "rewritten": "rewrites more than reasoning",
}
_VERDICT_WORDS = {
    Verdict.FIT: "FIT",
    Verdict.PARTLY_FIT: "PARTLY FIT",
    Verdict.UNFIT: "NOT USABLE",
    Verdict.UNDECIDED: "UNDECIDED",
}
_WITH_TABLES = ("arguments", "bridges")
"""The findings that have tables."""


def make_report(report: AuditReport) -> Report:
    """The verdict and all findings."""
    return Report(
        title=f"unbroken audit  {report.about.name}",
        conclusions=[report.sentence, report.action],
        tables=[ReportTable(rows=[(label, *lines) for label, lines in _make_rows(report)])],
        values=report.to_json(),
    )


def to_html(report: AuditReport) -> str:
    """Make the page."""
    shown = report.side_by_side
    return render_page(
        "unbroken.audit",
        "report.html.jinja",
        report=report,
        shown=shown,
        verdict=_VERDICT_WORDS[report.verdict],
        rows=[(label, list(values)) for label, values in _make_rows(report) if label not in _WITH_TABLES],
        num_changed=sum(token.is_changed for token in shown.sides.exact) if shown.sides else 0,
    )


def _format_tokens(tokens: Sequence[Token]) -> str:
    """Show tokens in quotes with their ids; for many tokens, only their number and the beginning of the text."""
    if len(tokens) <= _MAX_TOKENS_SHOWN:
        return " ".join(f'"{make_printable(token.text)}" ({token.token_id})' for token in tokens)
    return f'{len(tokens)} ids, "{shorten(make_printable("".join(token.text for token in tokens)), 100)}"'


def _describe_closing(closed: ClosedTurn) -> str:
    """Describe how a cut turn is closed."""
    if closed.given:
        return f"{closed.how}: given {_format_tokens(closed.given)}"
    known = closed.closing in ("none", "truncated", "reasoning", "foreign_stop")
    return f"{closed.how}: {'nothing is given, the next header ends it' if known else f'refused, {closed.closing}'}"


def _describe_boundary(boundary: BoundaryFinding) -> str:
    """Describe the ids that concatenation loses and adds."""
    if boundary.outcome in _BOUNDARY_WORDS:
        return f"{boundary.situation}: {_BOUNDARY_WORDS[boundary.outcome]}"
    parts = [f"loses {_format_tokens(boundary.lost)}"] if boundary.lost else []
    parts += [f"adds {_format_tokens(boundary.added)}"] if boundary.added else []
    return f"{boundary.situation}: {', '.join(parts)}"


def _make_rows(report: AuditReport) -> Iterator[tuple[str, Iterable[str]]]:
    """Describe each finding: its label and its lines."""
    yield "template", _describe_template(report)
    yield "tokenizer", _describe_tokenizer(report)
    if report.about.unread_options:
        names = ", ".join(map(make_printable, report.about.unread_options))
        yield "warning", [f"the template never reads the options {names}: is the spelling right?"]
    yield "rendering", _describe_rendering(report)
    ends = report.turn_ends
    yield (
        "turns end with",
        [_format_tokens(ends.ends) or "-", *(["these are headers of the next message"] * ends.are_headers)],
    )
    yield "stop ids", _describe_stops(ends)
    yield "a cut turn", [_describe_closing(closed) for closed in ends.closed] or ["-"]
    yield "concatenation", [_describe_boundary(boundary) for boundary in report.boundaries] or ["-"]
    yield "arguments", _describe_arguments(report)
    yield "forgery", _describe_forgery(report)
    yield "drift", _describe_drift(report)
    yield "parser", _describe_round_trip(report)
    yield "bridges", _describe_bridges(report)
    yield "history", list(_describe_history(report)) or ["-"]


def _describe_stops(ends: TurnEndFinding) -> Iterator[str]:
    yield _format_tokens(ends.stops) or "-"
    if ends.stops_inside:
        yield f"sampling ends inside a turn at {_format_tokens(ends.stops_inside)}: more of the turn follows it"


def _describe_template(report: AuditReport) -> Iterator[str]:
    yield KIND_WORDS[report.kind.kind]
    if report.kind.detail:
        yield make_printable(report.kind.detail)
    yield from (TRAIT_WORDS[trait] for trait in report.kind.traits)


def _describe_rendering(report: AuditReport) -> Iterator[str]:
    found = report.rendering
    yield f"{found.num_same} of {found.num_compared} conversations are the text that transformers renders"
    if found.example:
        yield make_printable(found.example)


def _describe_tokenizer(report: AuditReport) -> Iterator[str]:
    about = report.about
    if about.is_stand_in:
        yield "a stand-in, as no model was given: ids and drift are not the model's"
    yield f"{about.num_vocabulary:,} ids, {about.num_control_tokens:,} of them control tokens"


def _describe_arguments(report: AuditReport) -> Iterator[str]:
    arguments = report.arguments
    if not arguments.is_json:
        is_ignored = Trait.RENDERS_NO_CALLS in report.kind.traits
        yield "not rendered" if is_ignored else "written in the template's own markup, not as JSON"
        return
    kept = [spelling.name for spelling in arguments.spellings if spelling.is_kept]
    yield f"kept as they were sampled: {', '.join(kept) or 'none'}"
    for spelling in arguments.spellings:
        if not spelling.is_kept:
            rendered = make_printable(spelling.rendered) or "other text"
            yield f"{spelling.name}: {make_printable(spelling.sampled)} becomes {rendered}"


def _describe_forgery(report: AuditReport) -> Iterator[str]:
    found = report.forgery
    yield (
        f"{found.num_forged_naively} of {found.num_tried} control tokens become ids when a {found.role} message "
        f"spells them and the text is tokenised as it is{': ' if found.examples else ''}"
        f"{' '.join(map(make_printable, found.examples))}"
    )
    refused = f", {found.num_refused_by_us} are refused" if found.num_refused_by_us else ""
    yield f"{found.num_forged_by_us} as we encode it{refused}"


def _describe_drift(report: AuditReport) -> Iterator[str]:
    found = report.drift
    yield (
        f"{format_percent(found.num_sequences_changed, found.num_sequences)} of {found.num_sequences} random sequences "
        f"and {format_percent(found.num_ids_changed, found.num_ids)} of their ids change when decoded and encoded again"
    )


def _describe_round_trip(report: AuditReport) -> Iterator[str]:
    found = report.round_trip
    num = found.num_turns - found.num_not_comparable
    yield f"{found.parser}: {found.num_same} of {num} turns that the template writes are read back the same"
    if found.num_not_comparable:
        yield f"{found.num_not_comparable} more turns cannot be compared"
    if found.differences:
        yield "differ in " + ", ".join(f"{part} ({num})" for part, num in found.differences.items())
        yield make_printable(shorten(found.example, 200))
    if found.unread_calls:
        yield f"warning: {make_printable(found.unread_calls)}"


def _describe_bridges(report: AuditReport) -> Iterator[str]:
    fuzz = report.fuzz
    yield (
        f"{fuzz.num_exact} exact, {fuzz.num_refused} refused, {fuzz.num_wrong} wrong, over "
        f"{fuzz.num_conversations} random conversations (seed {report.about.seed})"
    )
    for share in fuzz.refused:
        seen = "; ".join(share.situations)
        yield f"refused, {share.reason} ({share.num}): {make_printable(share.detail)}. Seen after: {seen}"
    if fuzz.not_accepted:
        cases = "; ".join(f"{situation} ({num})" for situation, num in fuzz.not_accepted.items())
        yield f"the template itself does not accept {sum(fuzz.not_accepted.values())} of them: {cases}"
    if fuzz.num_unjudged:
        yield f"not judged ({fuzz.num_unjudged}): the template ends the turn differently later on"
    yield from (f"wrong: {make_printable(wrong)}" for wrong in fuzz.wrong)


def _describe_history(report: AuditReport) -> Iterator[str]:
    for role, counts in report.fuzz.history.items():
        parts = ", ".join(
            f"{words} in {counts[effect]}" for effect, words in _HISTORY_WORDS.items() if effect in counts
        )
        yield f"after a {role} message, a fresh rendering {parts}"
