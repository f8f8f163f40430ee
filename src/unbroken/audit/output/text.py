"""The report for people: plain text, 80 columns wide at most."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence

from unbroken.audit.report import (
    AuditReport,
    BoundaryFinding,
    ClosedTurn,
    TemplateKind,
    Token,
    Trait,
)

WIDTH, LABEL_WIDTH = 80, 16
_MOST_TOKENS_SHOWN = 9
_MOST_SHAPES_SHOWN = 3

KIND_WORDS = {
    TemplateKind.APPEND_ONLY: "append-only: it keeps what came before as it is",
    TemplateKind.STRIPS_REASONING_ON_USER: "strips reasoning when a new user message follows",
    TemplateKind.STRIPS_REASONING: "strips or re-wraps reasoning whatever follows, tool results too",
    TemplateKind.REWRITES_HISTORY: "rewrites history: more than reasoning changes once messages follow",
    TemplateKind.UNDERIVABLE: "underivable: it cannot be told how a turn ends and the next begins",
}
TRAIT_WORDS = {
    Trait.IGNORES_TOOLS: "does not show tools to the model",
    Trait.RENDERS_NO_CALLS: "renders no calls: a model's call is part of its text",
    Trait.REFUSES_RESULTS: "refuses tool results",
    Trait.DROPS_RESULTS: "leaves tool results out",
    Trait.REFUSES_PARALLEL_CALLS: "refuses parallel calls",
    Trait.DROPS_PARALLEL_CALLS: "leaves out all but one of parallel calls",
    Trait.DROPS_TEXT_BESIDE_CALLS: "leaves out a turn's text beside its calls",
    Trait.REFUSES_SYSTEM: "refuses system messages",
    Trait.DROPS_SYSTEM: "leaves system messages out",
    Trait.REFUSES_LATE_SYSTEM: "refuses system messages in mid-conversation",
    Trait.DROPS_LATE_SYSTEM: "leaves out system messages in mid-conversation",
    Trait.REFUSES_USERS_IN_A_ROW: "refuses two user messages in a row",
    Trait.RENDERS_NO_REASONING: "renders no reasoning",
}


def to_text(report: AuditReport) -> str:
    """All findings, a label and its lines each."""
    about = report.about
    lines = [
        _cut(f"unbroken audit  {visible(about.name)}"),
        "",
        *textwrap.wrap(visible(report.sentence), WIDTH, break_on_hyphens=False),
        "",
    ]
    for label, values in _rows(report):
        lines += _row(label, values)
    return "\n".join(lines) + "\n"


def visible(text: str) -> str:
    """Text from outside on one line, with characters that a terminal would obey spelled out."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def spelled(tokens: Sequence[Token]) -> str:
    """Tokens between quotes with their ids; of many their number and the beginning of their text."""
    if len(tokens) <= _MOST_TOKENS_SHOWN:
        return " ".join(f'"{visible(token.text)}" ({token.token_id})' for token in tokens)
    return f'{len(tokens)} ids, "{_cut_to(visible("".join(token.text for token in tokens)), 100)}"'


def percent(part: int, whole: int) -> str:
    """A share in percent, with a digit behind the point."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def closed_words(closed: ClosedTurn) -> str:
    """What is given after a turn that was cut."""
    if closed.given:
        return f"{closed.how}: given {spelled(closed.given)}"
    known = closed.closing in ("none", "truncated", "reasoning", "foreign_stop")
    return f"{closed.how}: {'nothing is given, the next header ends it' if known else f'refused, {closed.closing}'}"


def boundary_words(boundary: BoundaryFinding) -> str:
    """What concatenation loses and adds."""
    if boundary.outcome == "same":
        return f"{boundary.situation}: nothing is lost"
    if boundary.outcome == "refused":
        return f"{boundary.situation}: we refuse the bridge, there is nothing to compare with"
    if boundary.outcome == "raises":
        return f"{boundary.situation}: the template does not render the new messages alone"
    if boundary.outcome == "drops":
        return f"{boundary.situation}: rendered alone, the new message itself is left out"
    parts = [f"loses {spelled(boundary.lost)}"] if boundary.lost else []
    parts += [f"adds {spelled(boundary.added)}"] if boundary.added else []
    return f"{boundary.situation}: {', '.join(parts)}"


def _rows(report: AuditReport) -> Iterator[tuple[str, Iterable[str]]]:
    yield "template", _template(report)
    yield "tokenizer", _tokenizer(report)
    if report.about.unread_options:
        names = ", ".join(map(visible, report.about.unread_options))
        yield "warning", [f"the template never reads the options {names}: is the spelling right?"]
    yield "rendering", _rendering(report)
    ends = report.turn_ends
    yield "turns end with", [spelled(ends.ends) or "-", *(["these are headers of what follows"] * ends.are_headers)]
    yield "stop ids", [spelled(ends.stops) or "-"]
    yield "a cut turn", [closed_words(closed) for closed in ends.closed] or ["-"]
    yield "concatenation", [boundary_words(boundary) for boundary in report.boundaries] or ["-"]
    yield "arguments", _arguments(report)
    yield "forgery", _forgery(report)
    yield "drift", _drift(report)
    yield "parser", _round_trip(report)
    yield "bridges", _bridges(report)
    yield "certificates", _certificates(report)


def _template(report: AuditReport) -> Iterator[str]:
    yield KIND_WORDS[report.kind.kind]
    if report.kind.detail:
        yield visible(report.kind.detail)
    yield from (TRAIT_WORDS[trait] for trait in report.kind.traits)


def _rendering(report: AuditReport) -> Iterator[str]:
    found = report.rendering
    yield f"{found.num_same} of {found.num_compared} conversations are the text that transformers renders"
    if found.example:
        yield visible(found.example)


def _tokenizer(report: AuditReport) -> Iterator[str]:
    about = report.about
    if about.is_stand_in:
        yield "a stand-in, as no model was given: ids and drift are not the model's"
    yield f"{about.num_vocabulary:,} ids, {about.num_control_tokens:,} of them control tokens"


def _arguments(report: AuditReport) -> Iterator[str]:
    arguments = report.arguments
    if not arguments.is_json:
        is_ignored = Trait.RENDERS_NO_CALLS in report.kind.traits
        yield "not rendered" if is_ignored else "written in the template's own markup, not as JSON"
        return
    kept = [spelling.name for spelling in arguments.spellings if spelling.is_kept]
    yield f"kept as they were sampled: {', '.join(kept) or 'none'}"
    for spelling in arguments.spellings:
        if not spelling.is_kept:
            rendered = visible(spelling.rendered) or "other text"
            yield f"{spelling.name}: {visible(spelling.sampled)} becomes {rendered}"


def _forgery(report: AuditReport) -> Iterator[str]:
    found = report.forgery
    yield (
        f"{found.num_forged_naively} of {found.num_tried} control tokens become ids when a {found.role} message "
        f"spells them and the text is tokenised as it is{': ' if found.examples else ''}"
        f"{' '.join(map(visible, found.examples))}"
    )
    refused = f", {found.num_refused_by_us} are refused" if found.num_refused_by_us else ""
    yield f"{found.num_forged_by_us} as we encode it{refused}"


def _drift(report: AuditReport) -> Iterator[str]:
    found = report.drift
    yield (
        f"{percent(found.num_sequences_changed, found.num_sequences)} of {found.num_sequences} random sequences and "
        f"{percent(found.num_ids_changed, found.num_ids)} of their ids change when decoded and encoded again"
    )


def _round_trip(report: AuditReport) -> Iterator[str]:
    found = report.round_trip
    num = found.num_turns - found.num_not_comparable
    yield f"{found.parser}: {found.num_same} of {num} turns that the template writes are read back the same"
    if found.num_not_comparable:
        yield f"{found.num_not_comparable} more turns cannot be compared"
    if found.differences:
        yield "differ in " + ", ".join(f"{part} ({num})" for part, num in found.differences.items())
        yield visible(_cut_to(found.example, 200))


def _bridges(report: AuditReport) -> Iterator[str]:
    fuzz = report.fuzz
    yield (
        f"{fuzz.num_exact} exact, {fuzz.num_refused} refused, {fuzz.num_wrong} wrong, over "
        f"{fuzz.num_conversations} random conversations (seed {report.about.seed})"
    )
    for share in fuzz.refused:
        seen = "; ".join(share.situations)
        yield f"refused, {share.reason} ({share.num}): {visible(share.detail)}. Seen after: {seen}"
    if fuzz.not_accepted:
        cases = "; ".join(f"{situation} ({num})" for situation, num in fuzz.not_accepted.items())
        yield f"the template itself does not accept {sum(fuzz.not_accepted.values())} of them: {cases}"
    if fuzz.num_unjudged:
        yield f"not judged ({fuzz.num_unjudged}): the template ends the turn in another way later on"
    yield from (f"wrong: {visible(wrong)}" for wrong in fuzz.wrong)


def _certificates(report: AuditReport) -> Iterator[str]:
    costs = report.fuzz.certificates
    if not costs:
        yield "-"
        return
    total = sum(cost.duration_ms for cost in costs)
    num_renderings = sum(cost.num_renderings for cost in costs)
    yield f"{len(costs)} shapes, {num_renderings} renderings, {total:.0f} ms, once each; the dearest:"
    for cost in sorted(costs, key=lambda cost: -cost.duration_ms)[:_MOST_SHAPES_SHOWN]:
        told = "" if cost.outcome == "certified" else f"{cost.outcome}: "
        yield f"{cost.num_renderings:4d} renderings {cost.duration_ms:6.0f} ms  {told}{cost.shape}"


def _row(label: str, values: Iterable[str]) -> Iterator[str]:
    for value in values:
        wrapped = textwrap.wrap(
            value, WIDTH - LABEL_WIDTH, subsequent_indent="  ", break_on_hyphens=False, replace_whitespace=False
        )
        for line in wrapped or [""]:
            yield f"{label:<{LABEL_WIDTH}}{line}".rstrip()
            label = ""


def _cut(line: str) -> str:
    return _cut_to(line, WIDTH)


def _cut_to(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 2]}.."
