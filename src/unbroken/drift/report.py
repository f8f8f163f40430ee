"""The result of `unbroken drift` as one value, and its forms: text, JSON, a page, and a row of the table in the docs.

`DriftReport.to_json` is versioned: within a version fields are added, never renamed or removed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from unbroken.retokenising.changes import CAUSE_WORDS, Cause
from unbroken.retokenising.comparison import Counts
from unbroken.training.metrics.mismatch import Mismatch
from unbroken.viewer.reports import SideBySide, format_percent, make_printable, render_page, to_plain, write_text

JSON_FORMAT, JSON_VERSION = "unbroken-drift", 1
_LABELS = {
    Cause.BPE_SPLIT: "bpe split",
    Cause.RESERIALISED_CALL: "call respelled",
    Cause.STRIPPED_SPACE: "white space",
    Cause.DROPPED_REASONING: "reasoning",
    Cause.TURN_END: "turn end",
    Cause.REWRITTEN: "rewritten",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftSetup:
    """What was sampled, and how."""

    model: str
    engine: str
    """embedded or server."""
    parser: str
    template_sha256: str
    options: Mapping[str, Any]
    prompts: str
    """demo, lookup, or the name of a file."""
    num_conversations: int
    temperature: float
    max_tokens: int
    max_turns: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftExample:
    """A rollout that changed for a cause, id by id."""

    cause: Cause
    sides: SideBySide


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftReport:
    """What retokenising would have changed."""

    about: DriftSetup
    compared: Counts
    changed: Counts
    """Rollouts and turns with other ids, and sampled ids that are not there any more."""
    causes: Mapping[Cause, Counts]
    """The same by cause, for all causes; a turn can have several."""
    num_failed: int
    """Conversations without a turn, because the engine or the template refused them."""
    num_refused: int
    """Conversations that the template refuses after they were parsed: the usual pipeline has no row for them."""
    num_turns_left_out: int
    """Turns that a fork left behind: they are in rows of their own, and not compared."""
    exact: Mismatch | None
    """The scoring pass over the ids as they were sampled: the engine's own rounding. None without scoring."""
    retokenised: Mismatch | None
    num_unscored: int
    """Rollouts that are too long for the engine once retokenised."""
    seconds: float
    examples: tuple[DriftExample, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Convert to plain values, as described in `docs/drift.md`. The examples are for the page only."""
        return {
            "format": JSON_FORMAT,
            "version": JSON_VERSION,
            "about": to_plain(self.about),
            "compared": to_plain(self.compared),
            "changed": self._describe(self.changed),
            "causes": {cause.value: self._describe(counts) for cause, counts in self.causes.items()},
            "num_failed": self.num_failed,
            "num_refused": self.num_refused,
            "num_turns_left_out": self.num_turns_left_out,
            "exact": to_plain(self.exact),
            "retokenised": to_plain(self.retokenised),
            "num_unscored": self.num_unscored,
            "seconds": round(self.seconds, 1),
        }

    def _describe(self, counts: Counts) -> dict[str, Any]:
        whole = self.compared
        return {
            **to_plain(counts),
            "share_of_rollouts": _divide(counts.num_rollouts, whole.num_rollouts),
            "share_of_turns": _divide(counts.num_turns, whole.num_turns),
            "share_of_ids": _divide(counts.num_ids, whole.num_ids),
        }


def to_text(report: DriftReport) -> str:
    """Show all findings as text."""
    return write_text(f"unbroken drift  {report.about.model}", [_make_sentence(report)], _make_rows(report))


def to_html(report: DriftReport) -> str:
    """Make the page."""
    return render_page(
        "unbroken.drift",
        "report.html.jinja",
        report=report,
        sentence=_make_sentence(report),
        words=CAUSE_WORDS,
        left_out=list(_describe_left_out(report)),
    )


def _make_sentence(report: DriftReport) -> str:
    """The result in one sentence."""
    compared = report.compared
    if not report.changed.num_rollouts:
        return f"Retokenising would have changed none of {compared.num_rollouts} rollouts ({compared.num_ids:,} ids)."
    rollouts, turns, ids = _format_shares(report.changed, compared)
    return (
        f"Retokenising would have changed {rollouts} of {compared.num_rollouts} rollouts, {turns} of "
        f"{compared.num_turns} turns and {ids} of {compared.num_ids:,} sampled ids."
    )


def _format_shares(counts: Counts, whole: Counts) -> tuple[str, str, str]:
    return (
        format_percent(counts.num_rollouts, whole.num_rollouts),
        format_percent(counts.num_turns, whole.num_turns),
        format_percent(counts.num_ids, whole.num_ids),
    )


def to_row(report: DriftReport) -> str:
    """A row of the table in `docs/drift.md`."""
    compared, found = report.compared, report.retokenised
    name, prompts = (
        make_printable(text).replace("|", "\\|").replace("`", "'")
        for text in (report.about.model, report.about.prompts)
    )
    cells = [
        f"`{name}`",
        f"{prompts}, temperature {report.about.temperature:g}, seed {report.about.seed}",
        str(compared.num_rollouts),
        *_format_shares(report.changed, compared),
        *(format_percent(report.causes[cause].num_rollouts, compared.num_rollouts) for cause in Cause),
        "-" if found is None else f"{100 * found.share_off_20pct:.1f} %",
        "-" if found is None else f"{found.k3:.1e}",
    ]
    return f"| {' | '.join(cells)} |\n"


def _describe_mismatch(found: Mismatch) -> str:
    """The numbers of a scoring pass in words."""
    return (
        f"{100 * found.share_off_20pct:.2f} % of {found.num_tokens:,} ratios off by more than 20 %, k3 {found.k3:.1e}, "
        f"largest log-ratio {found.max_abs:.1e}"
    )


def _describe_left_out(report: DriftReport) -> Iterator[str]:
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
            rollouts, turns, ids = _format_shares(counts, compared)
            yield _LABELS[cause], [f"{rollouts} of rollouts, {turns} of turns, {ids} of ids: {CAUSE_WORDS[cause]}"]
    if report.exact is not None and report.retokenised is not None:
        yield "as sampled", [_describe_mismatch(report.exact)]
        yield "retokenised", [_describe_mismatch(report.retokenised)]
    left_out = list(_describe_left_out(report))
    if left_out:
        yield "not compared", left_out
    yield "time", [f"{report.seconds:.1f} s"]


def _divide(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
