"""What an audit found, as one value: text, JSON and HTML are three ways to show it.

`AuditReport.to_json` is versioned: within a version fields are added, never renamed or removed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

JSON_FORMAT, JSON_VERSION = "unbroken-audit", 1


class TemplateKind(StrEnum):
    """What the template does to what came before, once new messages follow."""

    APPEND_ONLY = "append_only"
    STRIPS_REASONING_ON_USER = "strips_reasoning_on_user"
    STRIPS_REASONING = "strips_reasoning"
    """Within a tool cycle as well, or only the empty wrapper of reasoning that the last turn has."""
    REWRITES_HISTORY = "rewrites_history"
    UNDERIVABLE = "underivable"
    """It cannot be told where a turn ends."""


class Trait(StrEnum):
    """Something that the template does not carry, or not as one may expect."""

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


class Verdict(StrEnum):
    """What a training run may expect."""

    FIT = "fit"
    PARTLY_FIT = "partly_fit"
    UNFIT = "unfit"


EXIT_CODES: Mapping[Verdict, int] = {Verdict.FIT: 0, Verdict.PARTLY_FIT: 3, Verdict.UNFIT: 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """An id with its text."""

    token_id: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What was audited, and how."""

    name: str
    is_stand_in: bool
    """The tokenizer was made for the audit, as a template without a model was given."""
    renderer: str
    template_sha256: str
    num_template_characters: int
    options: Mapping[str, Any]
    unread_options: tuple[str, ...]
    """Options that the template never reads."""
    num_vocabulary: int
    num_control_tokens: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KindFinding:
    """The class of the template."""

    kind: TemplateKind
    traits: tuple[Trait, ...]
    detail: str = ""
    """Why it is underivable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderingFinding:
    """Our sandboxed rendering against transformers' own."""

    num_compared: int
    num_same: int
    example: str = ""
    """The first difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedTurn:
    """What is given after a turn that did not end by itself (I7)."""

    how: str
    """How the turn ended, in words."""
    closing: str
    """`rendering.base.Closing`, or the reason of a refusal."""
    given: tuple[Token, ...]
    """The ids that close the turn, up to and with its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnEndFinding:
    """How turns end."""

    ends: tuple[Token, ...]
    """What the template writes, or the model samples, at the end of a turn."""
    stops: tuple[Token, ...]
    """`Renderer.get_stop_token_ids`."""
    are_headers: bool
    """The ends are the headers of what follows."""
    closed: tuple[ClosedTurn, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryFinding:
    """Sampled turn + rendering of only the new messages, against the bridge."""

    situation: str
    outcome: str
    """`same`, `different`, `refused` (by us), `raises` (the template does not render the new messages alone), or
    `drops` (it leaves their text out then)."""
    lost: tuple[Token, ...] = ()
    """Ids of the bridge that concatenation lacks."""
    added: tuple[Token, ...] = ()
    """Ids that concatenation puts in and the template does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentSpelling:
    """One way to spell the arguments of a call, as a model may."""

    name: str
    sampled: str
    is_kept: bool
    """Whether the template writes the same text again."""
    rendered: str = ""
    """What it writes instead, where that is JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentsFinding:
    """What the template makes of arguments that were parsed."""

    form: str
    """`rendering.message_format.ArgumentFormat`."""
    is_json: bool
    """Whether it writes arguments as JSON at all."""
    spellings: tuple[ArgumentSpelling, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgeryFinding:
    """Control tokens spelled in a tool's answer (I5)."""

    role: str
    """The role of the message that spelled them."""
    num_tried: int
    num_forged_naively: int
    """That become ids when the rendered text is tokenised as it is."""
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
    """Ids that are not found again, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTripFinding:
    """Random turns, rendered by the template and parsed."""

    parser: str
    num_turns: int
    num_same: int
    num_not_comparable: int
    """Turns that the template refuses, or does not write behind its own generation prompt."""
    differences: Mapping[str, int]
    """By the part that differs: `content`, `reasoning`, `calls`."""
    example: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedShare:
    """Refused conversations of one reason."""

    reason: str
    num: int
    situations: tuple[str, ...]
    detail: str
    """Of the first one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateCost:
    """What one shape's certificate cost."""

    shape: str
    outcome: str
    """`certified`, or the reason of the refusal."""
    num_renderings: int
    duration_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FuzzFinding:
    """Bridges over random conversations, judged by the template's rendering of the whole."""

    num_conversations: int
    num_exact: int
    num_wrong: int
    num_unjudged: int
    not_accepted: Mapping[str, int]
    """By situation: the template itself refuses them or leaves something out."""
    refused: tuple[RefusedShare, ...]
    wrong: tuple[str, ...]
    """What is wrong, for the first few."""
    certificates: tuple[CertificateCost, ...]

    @property
    def num_refused(self) -> int:
        """All refusals."""
        return sum(share.num for share in self.refused)

    @property
    def num_accepted(self) -> int:
        """Conversations that the template takes and that could be judged."""
        return self.num_exact + self.num_refused + self.num_wrong

    @property
    def exact_share(self) -> float:
        """Of the accepted ones; 0 if there are none."""
        return self.num_exact / self.num_accepted if self.num_accepted else 0.0


class Origin(StrEnum):
    """Where an id of a sequence comes from."""

    PROMPT = "prompt"
    SAMPLED = "sampled"
    BRIDGE = "bridge"
    MESSAGE = "message"
    """Of a bridge: the text of a tool or a user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownToken:
    """An id in one of two sequences that are compared."""

    token_id: int
    text: str
    origin: Origin
    is_changed: bool
    """The other sequence has another id in its place, or none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SideBySide:
    """One conversation, sampled as models do: what we train on, and what retokenising would have made of it."""

    exact: tuple[ShownToken, ...]
    retokenised: tuple[ShownToken, ...]
    notes: tuple[str, ...]
    """What about the sampled turns is not as the template would have written them."""
    missing: str = ""
    """Why there is nothing to show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """Everything."""

    about: About
    verdict: Verdict
    sentence: str
    """The verdict in one sentence."""
    kind: KindFinding
    rendering: RenderingFinding
    turn_ends: TurnEndFinding
    boundaries: tuple[BoundaryFinding, ...]
    arguments: ArgumentsFinding
    forgery: ForgeryFinding
    drift: DriftFinding
    round_trip: RoundTripFinding
    fuzz: FuzzFinding
    side_by_side: SideBySide

    @property
    def exit_code(self) -> int:
        """For CI: 0 fit, 3 partly fit, 4 unfit."""
        return EXIT_CODES[self.verdict]

    def to_json(self) -> dict[str, Any]:
        """All of it as plain values; `docs/audit.md` describes them. The side-by-side view is for the page only."""
        values = {
            field.name: _plain(getattr(self, field.name))
            for field in dataclasses.fields(self)
            if field.name != "side_by_side"
        }
        values["fuzz"]["exact_share"] = self.fuzz.exact_share
        return {"format": JSON_FORMAT, "version": JSON_VERSION, "exit_code": self.exit_code, **values}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value
