"""The Renderer protocol: the only place where text becomes token ids and token ids become text.

Its methods and their names follow the PyPI package `renderers`, so that its hand-written renderers can be adapted
(`integrations.renderers`). Two things differ: a bridge that cannot be proven is a `Refusal` with its reason, where the
package returns None, and a parse says which ids each tool call came from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, TypeAlias, runtime_checkable

from unbroken.errors import InvalidInputError, InvariantError
from unbroken.messages import Message, ToolSchema
from unbroken.types import ImageSpan, TokenIds, token_ids

TEMPLATE = -1
"""Message index of an id that the template wrote, not a message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedPrompt:
    """A conversation as ids, ending with the generation prompt."""

    token_ids: TokenIds
    """[T]"""
    message_indices: TokenIds
    """[T] which message's text an id spells, or whose image it is of (`TEMPLATE`, -1, where the template wrote it)."""
    images: tuple[ImageSpan, ...] = ()


class Closing(StrEnum):
    """What had to be written to end the sampled turn before anything could follow it (I7)."""

    NONE = "none"
    """The turn ended with the template's own end-of-turn id."""
    TRUNCATED = "truncated"
    """No stop id was sampled: the template's end-of-turn ids were given."""
    REASONING = "reasoning"
    """Cut inside its reasoning: the closing of the reasoning and the end-of-turn ids were given."""
    FOREIGN_STOP = "foreign_stop"
    """Ended by a stop id that is not the template's (`<|endoftext|>`): the end-of-turn ids were given after it."""


class RefusalReason(StrEnum):
    """Why a bridge could not be proven. Stable names: they are metrics."""

    UNDERIVABLE = "underivable"
    """The template has no control token between an assistant turn and what follows."""
    HISTORY_DEPENDENT = "history_dependent"
    """The text between the turns depends on the conversation before them."""
    TEMPLATE_RAISES = "template_raises"
    """The template refuses this sequence of roles."""
    DROPS_MESSAGE = "drops_message"
    """The template leaves out, repeats or reorders a new message or a tool call."""
    REORDERS_TURN = "reorders_turn"
    """Text of the assistant turn is rendered after the new messages."""
    BAD_EXTENSION = "bad_extension"
    """The new messages cannot extend the turn: none, an assistant message, or an answer to no call of the turn."""
    UNSAFE_TEXT = "unsafe_text"
    """A control token stands where it cannot be encoded as text (a tool call's name, a transformed message)."""
    UNSUPPORTED = "unsupported"
    """The renderer does not bridge this (the package's own verdict carries no reason)."""
    FAILED_AUDIT = "failed_audit"
    """A bridge of this kind was found wrong when a whole conversation was rendered (`shadow_audit`)."""
    REWRITES_HISTORY = "rewrites_history"
    """`HistoryPolicy.TEMPLATE` only: the template would render what came before in another way from here on."""


class HistoryPolicy(StrEnum):
    """What happens where a template rewrites earlier turns, as most do with reasoning once a new user message comes."""

    EXACT = "exact"
    """Append only: the model goes on seeing what it sampled, and one rollout stays one sequence."""
    TEMPLATE = "template"
    """As the template has it: such a bridge is refused, so the conversation is rendered afresh and forks."""


def parse_history_policy(value: HistoryPolicy | str) -> HistoryPolicy:
    """The policy of this name.

    Raises:
        InvalidInputError: there is none.
    """
    try:
        return HistoryPolicy(value)
    except ValueError:
        names = [policy.value for policy in HistoryPolicy]
        raise InvalidInputError(f"history must be one of {names}, got {value!r}") from None


class HistoryEffect(StrEnum):
    """What a fresh rendering would do to what a bridge follows (P2), as far as the certificate's panel tells."""

    KEPT = "kept"
    DROPS_REASONING = "drops_reasoning"
    """Only reasoning, the turn's or an earlier one's, is left out or wrapped differently."""
    REWRITTEN = "rewritten"
    """Something else changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bridge:
    """The ids between a sampled turn and the next generation prompt: next prompt = all ids so far + `bridge_ids`."""

    bridge_ids: TokenIds
    """[B] given, not sampled."""
    message_indices: TokenIds
    """[B] index into the new messages of the text an id spells, `TEMPLATE` where the template wrote it."""
    closing: Closing = Closing.NONE
    num_taken_back: int = 0
    """1 where the sampled stop id is itself the next turn's header, of the wrong role (GLM samples `<|user|>` and a
    tool reply follows): the next prompt leaves that id out, so the trajectory forks before it. The one exception to I1.
    """
    history: HistoryEffect | None = None
    """Whether the template itself would have kept everything before (P2); None if nobody looked. The bridge is exact
    (P1) either way."""
    images: tuple[ImageSpan, ...] = ()
    """Offsets count from the start of `bridge_ids`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "bridge_ids", token_ids(self.bridge_ids, name="bridge_ids"))
        if self.num_taken_back not in (0, 1):
            raise InvariantError(f"num_taken_back must be 0 or 1, got {self.num_taken_back}")
        if len(self.message_indices) != len(self.bridge_ids):
            raise InvariantError(
                f"message_indices has {len(self.message_indices)} entries for {len(self.bridge_ids)} bridge_ids"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """No bridge could be proven. The caller renders afresh and forks, and counts the reason."""

    reason: RefusalReason
    detail: str = ""


class ToolCallStatus(StrEnum):
    """How one attempt at a tool call parsed. Malformed calls are data, never dropped."""

    OK = "ok"
    INVALID_JSON = "invalid_json"
    INVALID_SYNTAX = "invalid_syntax"
    """The text breaks its format's own rules, where that is not JSON (XML-like tags, Python-like calls)."""
    UNCLOSED = "unclosed"
    """The completion ended inside the call."""
    MISSING_NAME = "missing_name"
    INVALID_ARGUMENTS = "invalid_arguments"
    """The arguments are not an object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedToolCall:
    """One attempt at a tool call, in the order it was sampled."""

    raw: str
    """What the model wrote between the delimiters."""
    status: ToolCallStatus
    span: tuple[int, int]
    """Half-open range of completion ids, delimiters included."""
    name: str = ""
    """Empty unless the status is OK."""
    arguments: dict[str, Any] = field(default_factory=dict)
    call_id: str = ""
    """The id that the model wrote for the call, in formats that have one; else empty."""


class PartKind(StrEnum):
    """What a stretch of sampled ids is."""

    REASONING = "reasoning"
    CONTENT = "content"
    TOOL_CALL = "tool_call"
    """One attempt at a call, its delimiters included."""
    MARKUP = "markup"
    """Delimiters of reasoning and content, channel headers, and white space that only sets parts apart."""
    STOP = "stop"
    """The id or ids that ended the turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsePart:
    """The completion ids [span[0], span[1]) are one part of the turn."""

    kind: PartKind
    span: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedResponse:
    """A completion's ids read as an assistant turn."""

    content: str
    reasoning: str = ""
    tool_calls: tuple[ParsedToolCall, ...] = ()
    """Every attempt; filter by status."""
    reasoning_complete: bool = True
    """False where the completion ended inside its reasoning."""
    parts: tuple[ResponsePart, ...] = ()
    """All completion ids, in order: each belongs to exactly one part."""

    @property
    def failures(self) -> tuple[ParsedToolCall, ...]:
        """The attempts that are not calls."""
        return tuple(call for call in self.tool_calls if call.status is not ToolCallStatus.OK)

    def __post_init__(self) -> None:
        position = 0
        for k, part in enumerate(self.parts):
            start, stop = part.span
            if start != position or stop <= start:
                raise InvariantError(
                    f"parts[{k}] ({part.kind}) has the span {part.span}: it must begin at {position}, where the part "
                    "before it ends, and hold at least one id"
                )
            position = stop

    def to_message(self, call_ids: Sequence[str]) -> Message:
        """The assistant message this turn is, with one id for each attempt (`call_ids` is as long as `tool_calls`).

        Attempts that failed to parse are not calls and do not appear; their ids are skipped.
        """
        if len(call_ids) != len(self.tool_calls):
            raise InvariantError(f"{len(call_ids)} call ids for {len(self.tool_calls)} tool calls: one each is needed")
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        calls = [(c, i) for c, i in zip(self.tool_calls, call_ids, strict=True) if c.status is ToolCallStatus.OK]
        if calls:
            message["tool_calls"] = [
                {"id": i, "type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c, i in calls
            ]
        return message


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What a reader has become certain of: more text, or one whole attempt at a call.

    The texts of all REASONING deltas, joined, are the reasoning; those of all CONTENT deltas the content.
    """

    kind: PartKind
    """REASONING, CONTENT or TOOL_CALL."""
    text: str = ""
    tool_call: ParsedToolCall | None = None


class ResponseReader(Protocol):
    """Reads one completion while it is sampled. How its ids are split over the calls of `feed` makes no difference."""

    def feed(self, token_ids: Iterable[int], /) -> tuple[Delta, ...]:
        """Take more ids; what is certain now. Text that may still become a delimiter, or be trimmed, is held back."""
        ...

    def close(self) -> tuple[Delta, ...]:
        """The completion is over: what was held back. Closing again gives nothing more."""
        ...

    def finish(self) -> ParsedResponse:
        """Close it if that was not done, and give all that was read, as `Renderer.parse_response` would."""
        ...


@runtime_checkable
class LoadsImages(Protocol):
    """What a `Renderer` that takes images may offer beside its own methods."""

    def load_images(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with each image replaced by its file (`{"type": "image", "image": EncodedImage}`).

        They render as the originals do, and quickly: nothing is read, decoded or processed again.

        Raises:
            MessagesError: the messages are malformed, or there are images and the model takes none.
            ImageError: an image is of no form that is taken, broken, beyond the limits, or refused by the processor.
        """
        ...


BridgeOutcome: TypeAlias = Bridge | Refusal


@runtime_checkable
class Renderer(Protocol):
    """Messages to ids and back, for one model.

    Call ids are unique within a conversation; the rollout loop makes them so.
    """

    def render(self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] = ()) -> RenderedPrompt:
        """Render a whole conversation with the generation prompt, text encoded so that it forges no control id (I5).

        The ids are what the model consumes: where a message has an image, all ids that stand for it, and a span.

        Raises:
            MessagesError: the messages are malformed, or have images and the model takes none.
            ImageError: an image cannot be used.
            ToolDefinitionError: the tools are no list of schemas.
            TemplateError: the template refuses them, or does not write each image where it is.
        """
        ...

    def render_ids(
        self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] = (), add_generation_prompt: bool = False
    ) -> TokenIds:
        """Like `render`, ids only, with the generation prompt left to the caller."""
        ...

    def parse_response(
        self, completion_ids: TokenIds, *, prompt_ids: TokenIds | None = None, tools: Sequence[ToolSchema] = ()
    ) -> ParsedResponse:
        """Read a completion as content, reasoning and tool calls; never raises for what a model may sample.

        `prompt_ids` tells whether the generation prompt already opened the reasoning. The schemas of `tools` type the
        arguments in formats that write all values as text; no call is refused for them.
        """
        ...

    def open_response(self, *, prompt_ids: TokenIds | None = None, tools: Sequence[ToolSchema] = ()) -> ResponseReader:
        """Read a completion while it is sampled: like `parse_response`, for ids that come one after the other."""
        ...

    def get_stop_token_ids(self) -> tuple[int, ...]:
        """The ids that end a turn, for `SamplingParams.stop_token_ids`."""
        ...

    def bridge_to_next_turn(
        self,
        prompt_ids: TokenIds,
        completion_ids: TokenIds,
        new_messages: Sequence[Message],
        *,
        assistant: Message,
        tools: Sequence[ToolSchema] = (),
        earlier: Sequence[Message] | None = None,
    ) -> BridgeOutcome:
        """The ids between `prompt_ids + completion_ids` and the next completion: `new_messages`, next header (I1).

        `assistant` is the message that `parse_response` gave for `completion_ids`, with the call ids that the new tool
        messages answer. `earlier` are the messages before it: a few templates (DeepSeek-V3's) write something else
        before the first tool result of a conversation, and are refused where this is not known. Only their roles are
        looked at. The cost does not depend on the length of the history.
        """
        ...
