"""Shows a report as plain text, at most 80 columns wide, and as a row of the table in `docs/drift.md`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator

from unbroken.audit.output.text import WIDTH, format_percent, wrap_row
from unbroken.drift.report import DriftReport
from unbroken.retokenising.causes import Cause
from unbroken.training.metrics.mismatch import Mismatch
from unbroken.viewer.texts import make_printable

_LABELS = {
    Cause.BPE_SPLIT: "bpe split",
    Cause.RESERIALISED_CALL: "call respelled",
    Cause.STRIPPED_SPACE: "white space",
    Cause.DROPPED_REASONING: "reasoning",
    Cause.TURN_END: "turn end",
    Cause.REWRITTEN: "rewritten",
}
CAUSE_WORDS = {
    Cause.BPE_SPLIT: "the same text in other ids",
    Cause.RESERIALISED_CALL: "a call spelled in another way",
    Cause.STRIPPED_SPACE: "white space",
    Cause.DROPPED_REASONING: "reasoning left out or wrapped in another way",
    Cause.TURN_END: "another end of the turn",
    Cause.REWRITTEN: "a turn, or what is between two, written in another way",
}


def to_text(report: DriftReport) -> str:
    """Show all findings, each as a label with its lines."""
    lines = [f"unbroken drift  {make_printable(report.about.model)}"[:WIDTH], ""]
    lines += [*textwrap.wrap(make_sentence(report), WIDTH, break_on_hyphens=False), ""]
    for label, values in _make_rows(report):
        lines += wrap_row(label, values)
    return "\n".join(lines) + "\n"


def make_sentence(report: DriftReport) -> str:
    """The result in one sentence."""
    changed, compared = report.changed, report.compared
    if not changed.num_rollouts:
        return f"Retokenising would have changed none of {compared.num_rollouts} rollouts ({compared.num_ids:,} ids)."
    return (
        f"Retokenising would have changed {format_percent(changed.num_rollouts, compared.num_rollouts)} of "
        f"{compared.num_rollouts} rollouts, {format_percent(changed.num_turns, compared.num_turns)} of "
        f"{compared.num_turns} turns and {format_percent(changed.num_ids, compared.num_ids)} of {compared.num_ids:,} "
        "sampled ids."
    )


def to_row(report: DriftReport) -> str:
    """A row of the table in `docs/drift.md`."""
    changed, compared, found = report.changed, report.compared, report.retokenised
    name, prompts = (
        make_printable(text).replace("|", "\\|").replace("`", "'")
        for text in (report.about.model, report.about.prompts)
    )
    cells = [
        f"`{name}`",
        f"{prompts}, temperature {report.about.temperature:g}, seed {report.about.seed}",
        str(compared.num_rollouts),
        format_percent(changed.num_rollouts, compared.num_rollouts),
        format_percent(changed.num_turns, compared.num_turns),
        format_percent(changed.num_ids, compared.num_ids),
        *(format_percent(report.causes[cause].num_rollouts, compared.num_rollouts) for cause in Cause),
        "-" if found is None else f"{100 * found.share_off_20pct:.1f} %",
        "-" if found is None else f"{found.k3:.1e}",
    ]
    return f"| {' | '.join(cells)} |\n"


def describe_mismatch(found: Mismatch) -> str:
    """The numbers of a scoring pass in words."""
    return (
        f"{100 * found.share_off_20pct:.2f} % of {found.num_tokens:,} ratios off by more than 20 %, k3 {found.k3:.1e}, "
        f"largest log-ratio {found.max_abs:.1e}"
    )


def describe_left_out(report: DriftReport) -> Iterator[str]:
    """What could not be compared."""
    if report.num_failed:
        yield f"{report.num_failed} conversations failed before their first turn"
    if report.num_refused:
        yield f"{report.num_refused} conversations are refused by the template once they are parsed"
    if report.num_turns_left_out:
        yield f"{report.num_turns_left_out} turns before a fork"
    if report.num_unscored:
        yield f"{report.num_unscored} rollouts do not fit into the context once retokenised, and have no ratios"


def _make_rows(report: DriftReport) -> Iterator[tuple[str, Iterable[str]]]:
    about, compared = report.about, report.compared
    yield (
        "sampled",
        [
            f"{about.num_conversations} conversations ({make_printable(about.prompts)}), temperature "
            f"{about.temperature:g}, seed {about.seed}, by the {about.engine} engine; calls are read as "
            f"{make_printable(about.parser)}"
        ],
    )
    for cause, counts in report.causes.items():
        if counts.num_rollouts:
            yield (
                _LABELS[cause],
                [
                    f"{format_percent(counts.num_rollouts, compared.num_rollouts)} of rollouts, "
                    f"{format_percent(counts.num_turns, compared.num_turns)} of turns, "
                    f"{format_percent(counts.num_ids, compared.num_ids)} of ids: {CAUSE_WORDS[cause]}"
                ],
            )
    if report.exact is not None and report.retokenised is not None:
        yield "as sampled", [describe_mismatch(report.exact)]
        yield "retokenised", [describe_mismatch(report.retokenised)]
    left_out = list(describe_left_out(report))
    if left_out:
        yield "not compared", left_out
    yield "time", [f"{report.seconds:.1f} s"]
