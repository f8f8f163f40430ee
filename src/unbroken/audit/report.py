"""The findings of an audit as one value, which is shown as text, JSON or HTML.

`AuditReport.to_json` is versioned: within a version fields are added, never renamed or removed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from unbroken.reports import to_plain
from unbroken.viewer.reports import SideBySide

JSON_FORMAT, JSON_VERSION = "unbroken-audit", 2


class TemplateKind(StrEnum):
    """The effect of new messages on the history, as the template renders it."""

    APPEND_ONLY = "append_only"
    STRIPS_REASONING_ON_USER = "strips_reasoning_on_user"
    STRIPS_REASONING = "strips_reasoning"
    """Within a tool cycle too, or only the empty wrapper around the last turn's missing reasoning."""
    REWRITES_HISTORY = "rewrites_history"
    UNDERIVABLE = "underivable"
    """The end of a turn cannot be found, or no usual turn could be bridged."""


class Trait(StrEnum):
    """A part of conversations that the template does not carry, or not as expected."""

    IGNORES_TOOLS = "ignores_tools"
    RENDERS_NO_CALLS = "renders_no_calls"
    REFUSES_RESULTS = "refuses_results"
    DROPS_RESULTS = "drops_results"
    REFUSES_PARALLEL_CALLS = "refuses_parallel_calls"
    DROPS_PARALLEL_CALLS = "drops_parallel_calls"
    DROPS_TEXT_BESIDE_CALLS = "drops_text_beside_calls"
    REFUSES_SYSTEM = "refuses_system"
    DROPS_SYSTEM = "drops_system"
    REFUSES_LATE_SYSTEM = "refuses_late_system"
    DROPS_LATE_SYSTEM = "drops_late_system"
    REFUSES_USERS_IN_A_ROW = "refuses_users_in_a_row"
    RENDERS_NO_REASONING = "renders_no_reasoning"


KIND_WORDS: Mapping[TemplateKind, str] = {
    TemplateKind.APPEND_ONLY: "append-only: it keeps the history as it is",
    TemplateKind.STRIPS_REASONING_ON_USER: "strips reasoning on a user message: when a new one follows",
    TemplateKind.STRIPS_REASONING: "strips or re-wraps reasoning: whatever follows, tool results too",
    TemplateKind.REWRITES_HISTORY: "rewrites history: more than reasoning changes once messages follow",
    TemplateKind.UNDERIVABLE: "underivable: no turn of the usual kinds could be bridged",
}
"""A short name before the colon."""
TRAIT_WORDS: Mapping[Trait, str] = {
    Trait.IGNORES_TOOLS: "does not show tools to the model",
    Trait.RENDERS_NO_CALLS: "renders no calls, so that a model's are part of its text",
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
PARALLEL_LIMITS = frozenset({Trait.REFUSES_PARALLEL_CALLS, Trait.DROPS_PARALLEL_CALLS})
LIMITS = PARALLEL_LIMITS | {Trait.RENDERS_NO_CALLS, Trait.REFUSES_RESULTS, Trait.DROPS_RESULTS}
"""The traits that a rollout with tools would notice."""


class Verdict(StrEnum):
    """Whether the template can be used for training."""

    FIT = "fit"
    PARTLY_FIT = "partly_fit"
    UNFIT = "unfit"
    UNDECIDED = "undecided"
    """Without the model's tokenizer, control tokens were not recognised, or guessed wrong."""


EXIT_CODES: Mapping[Verdict, int] = {Verdict.FIT: 0, Verdict.PARTLY_FIT: 3, Verdict.UNFIT: 4, Verdict.UNDECIDED: 5}


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """An id with its text."""

    token_id: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditSetup:
    """The subject of the audit and its settings."""

    name: str
    is_stand_in: bool
    """The tokenizer was made for the audit, as no model was given."""
    template_sha256: str
    num_template_characters: int
    options: Mapping[str, Any]
    unread_options: tuple[str, ...]
    num_vocabulary: int
    num_control_tokens: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KindFinding:
    """The class of the template."""

    kind: TemplateKind
    traits: tuple[Trait, ...]
    detail: str = ""
    """The reason, if the kind is UNDERIVABLE."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderingFinding:
    """Our rendering compared with transformers' own; `example` is the first difference."""

    num_compared: int
    num_same: int
    text_sha256: str
    """Of the texts of all conversations: templates with the same one write the same."""
    example: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedTurn:
    """How a turn that did not end by itself is closed (I7)."""

    how: str
    """How the turn ended, in words."""
    closing: str
    """`rendering.base.Closing`, or the reason of a refusal."""
    given: tuple[Token, ...]
    """The ids that close the turn, including its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnEndFinding:
    """How turns end; `stops` are those of `Renderer.get_stop_token_ids`."""

    ends: tuple[Token, ...]
    """The tokens that the template writes, or the model samples, at the end of a turn."""
    stops: tuple[Token, ...]
    are_headers: bool
    """The ends are the headers of the next messages."""
    closed: tuple[ClosedTurn, ...]
    stops_inside: tuple[Token, ...] = ()
    """The stop ids after which more of a turn follows, as the template writes it: sampling would end before that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryFinding:
    """The sampled turn + a rendering of only the new messages, compared with the bridge."""

    situation: str
    outcome: str
    """`same`, `different`, `refused` (by us), `raises` (the template does not render the new messages alone), or
    `drops` (it then leaves their text out)."""
    lost: tuple[Token, ...] = ()
    """Ids of the bridge that concatenation lacks."""
    added: tuple[Token, ...] = ()
    """Ids that concatenation adds and the template does not write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentSpelling:
    """One way to spell the arguments of a call; `is_kept` if the template writes the same text again."""

    name: str
    sampled: str
    is_kept: bool
    rendered: str = ""
    """The JSON that it writes instead; empty if it is something else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentsFinding:
    """How the template writes parsed arguments."""

    form: str
    """`rendering.message_format.ArgumentFormat`."""
    is_json: bool
    spellings: tuple[ArgumentSpelling, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgeryFinding:
    """Control tokens spelled in a message (I5), which has the role `role`."""

    role: str
    num_tried: int
    num_forged_naively: int
    """Control tokens that become ids when the rendered text is tokenised as it is."""
    num_forged_by_us: int
    num_refused_by_us: int
    examples: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftFinding:
    """Random ids of the vocabulary, without control tokens, decoded and encoded again."""

    num_sequences: int
    num_ids: int
    num_sequences_changed: int
    num_ids_changed: int
    """Ids that do not occur, in order, in the new sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTripFinding:
    """Random turns, rendered by the template and parsed again."""

    parser: str
    num_turns: int
    num_same: int
    num_not_comparable: int
    """Turns that the template refuses, or does not write after its generation prompt."""
    differences: Mapping[str, int]
    """The number of turns by the part that differs: `content`, `reasoning`, `calls`."""
    example: str = ""
    unread_calls: str = ""
    """What is wrong, if no format reads back the calls that the template renders: `TemplateRenderer.unread_calls`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedShare:
    """The conversations that were refused for one reason, with the detail of the first."""

    reason: str
    num: int
    situations: tuple[str, ...]
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FuzzFinding:
    """Bridges over random conversations, judged by the template's rendering of the whole; `wrong` has examples."""

    num_conversations: int
    num_exact: int
    num_wrong: int
    num_unjudged: int
    history: Mapping[str, Mapping[str, int]]
    """The number of bridges by what a fresh rendering does to everything before (P2), a `rendering.base.HistoryEffect`,
    after a new message with the role `system`, or else with the role of the last one: `user` or `tool`."""
    not_accepted: Mapping[str, int]
    """The number of conversations that the template itself refuses or shortens, by situation."""
    refused: tuple[RefusedShare, ...]
    wrong: tuple[str, ...]

    @property
    def num_refused(self) -> int:
        """The number of refusals, for all reasons."""
        return sum(share.num for share in self.refused)

    @property
    def num_accepted(self) -> int:
        """Conversations that the template accepts and that could be judged."""
        return self.num_exact + self.num_refused + self.num_wrong

    @property
    def exact_share(self) -> float:
        """The exact share of the accepted conversations; 0 if there are none."""
        return self.num_exact / self.num_accepted if self.num_accepted else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownConversation:
    """One conversation as the ids that we train on, and as the ids that retokenising would give."""

    sides: SideBySide | None
    notes: tuple[str, ...] = ()
    """How the sampled turns differ from what the template would write."""
    missing: str = ""
    """Why there are no sequences; empty if there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """All findings of an audit, with the verdict in one `sentence`, and the `action` to take."""

    about: AuditSetup
    verdict: Verdict
    sentence: str
    action: str
    kind: KindFinding
    rendering: RenderingFinding
    turn_ends: TurnEndFinding
    boundaries: tuple[BoundaryFinding, ...]
    arguments: ArgumentsFinding
    forgery: ForgeryFinding
    drift: DriftFinding
    round_trip: RoundTripFinding
    fuzz: FuzzFinding
    side_by_side: ShownConversation

    @property
    def exit_code(self) -> int:
        """For CI: 0 fit, 3 partly fit, 4 unfit, 5 undecided."""
        return EXIT_CODES[self.verdict]

    def to_json(self) -> dict[str, Any]:
        """Convert to plain values, as described in `docs/audit.md`. The side-by-side view is for the page only."""
        values = {
            field.name: to_plain(getattr(self, field.name))
            for field in dataclasses.fields(self)
            if field.name != "side_by_side"
        }
        values["fuzz"]["exact_share"] = self.fuzz.exact_share
        return {"format": JSON_FORMAT, "version": JSON_VERSION, "exit_code": self.exit_code, **values}
