"""The Renderer protocol: the only place where text becomes token ids and token ids become text.

Names follow the PyPI package `renderers`. Two things differ: a bridge that does not hold is a `Refusal` with a reason,
where the package returns None, and a parse says which ids each tool call came from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, TypeAlias, runtime_checkable

from unbroken.errors import InvariantError
from unbroken.messages import Message, ToolSchema, make_call
from unbroken.threads import DaemonThreads
from unbroken.types import ImageSpan, TokenIds, token_ids

TEMPLATE = -1
"""Message index of an id of the template's own text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedPrompt:
    """A conversation as ids, ending with the generation prompt."""

    token_ids: TokenIds
    """[T]"""
    message_indices: TokenIds
    """[T] index of the message whose text or image the id belongs to, or `TEMPLATE`."""
    images: tuple[ImageSpan, ...] = ()


class Closing(StrEnum):
    """How a bridge closed the sampled turn (I7)."""

    NONE = "none"
    """The turn ended with the template's own end-of-turn id."""
    TRUNCATED = "truncated"
    """No stop id was sampled: the template's end-of-turn ids were added."""
    REASONING = "reasoning"
    """The turn was cut inside its reasoning: the end of the reasoning and the end-of-turn ids were added."""
    FOREIGN_STOP = "foreign_stop"
    """The turn ended with a stop id that is not the template's (`<|endoftext|>`): the end-of-turn ids were added."""


class RefusalReason(StrEnum):
    """Why there is no bridge. The names are metrics and must not change."""

    UNDERIVABLE = "underivable"
    """The template has no control token between an assistant turn and what follows."""
    HISTORY_DEPENDENT = "history_dependent"
    """The text between the turns is another one for this turn than for a turn with sentinels as its texts."""
    TEMPLATE_RAISES = "template_raises"
    """The template refuses this sequence of roles."""
    DROPS_MESSAGE = "drops_message"
    """The template leaves out, repeats or reorders a new message or a tool call."""
    REORDERS_TURN = "reorders_turn"
    """Text of the assistant turn is rendered after the new messages."""
    BAD_EXTENSION = "bad_extension"
    """The new messages cannot extend the turn: none, an assistant message, or a result for no call of the turn."""
    UNSAFE_TEXT = "unsafe_text"
    """A control token that cannot be encoded as text here (in a call's name, or in text that the template rewrites)."""
    UNSUPPORTED = "unsupported"
    """The renderer does not bridge this. The package `renderers` gives no other reason."""
    REWRITES_HISTORY = "rewrites_history"
    """`HistoryPolicy.TEMPLATE` only: from here on the template renders the history differently."""


class HistoryPolicy(StrEnum):
    """The policy where a template rewrites earlier turns, as most drop their reasoning after a new user message."""

    EXACT = "exact"
    """Append only: the model keeps seeing what it sampled, and one rollout stays one sequence."""
    TEMPLATE = "template"
    """Follow the template: such a bridge is refused, so the conversation is rendered afresh and forks."""
    REPEAT_SYSTEM = "repeat_system"
    """As `EXACT`, also where the template moves a system text behind the turn, as Mistral's do with each question: the
    bridge repeats it, and the model reads it in both places."""


class HistoryEffect(StrEnum):
    """The effect of a fresh rendering of the conversation on everything before the bridge (P2)."""

    KEPT = "kept"
    DROPS_REASONING = "drops_reasoning"
    """Only the reasoning of the turn or an earlier one is left out or wrapped differently."""
    REWRITTEN = "rewritten"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bridge:
    """The ids between a sampled turn and the next generation prompt: next prompt = all ids so far + `bridge_ids`."""

    bridge_ids: TokenIds
    """[B] given, not sampled."""
    message_indices: TokenIds
    """[B] index of the new message whose text or image the id belongs to, or `TEMPLATE`."""
    closing: Closing = Closing.NONE
    num_closing: int = 0
    """How many ids at the beginning close the turn; 0 if it needs none, or if that is not known."""
    num_taken_back: int = 0
    """1 if the sampled stop id is the next message's header with the wrong role (GLM samples `<|user|>` and a tool
    result follows): the next prompt omits that id, so the trajectory forks before it. The one exception to I1."""
    history: HistoryEffect | None = None
    """Whether the template would have kept everything before (P2), None if unknown. The bridge is exact (P1) either
    way."""
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
    """There is no bridge. The caller renders the conversation afresh, forks, and counts the reason."""

    reason: RefusalReason
    detail: str = ""


class ToolCallStatus(StrEnum):
    """The result of parsing one attempt at a tool call. Malformed calls are data and never dropped."""

    OK = "ok"
    INVALID_JSON = "invalid_json"
    INVALID_SYNTAX = "invalid_syntax"
    """The text breaks the rules of a format that is not JSON (XML-like tags, Python-like calls)."""
    UNCLOSED = "unclosed"
    MISSING_NAME = "missing_name"
    INVALID_ARGUMENTS = "invalid_arguments"
    """The arguments are not an object."""
    IN_REASONING = "in_reasoning"
    """A call begins in reasoning that is never closed, and could not be told from text about calls."""
    BEHIND_TEXT = "behind_text"
    """A call of one of the tools ends the turn behind text, in a format whose calls are the whole turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedToolCall:
    """One attempt at a tool call, in the order it was sampled."""

    raw: str
    """The text between the delimiters."""
    status: ToolCallStatus
    span: tuple[int, int]
    """Half-open range of completion ids, delimiters included; empty if `IN_REASONING` or `BEHIND_TEXT`: the ids are the
    reasoning's, or the content's."""
    name: str = ""
    """Of a failed call too, where it could be read; else empty."""
    arguments: dict[str, Any] = field(default_factory=dict)
    call_id: str = ""
    """The call id that the model wrote, in formats that have one; else empty."""
    full_text: str = ""
    """`raw` with its delimiters; without them if others share them, or if the renderer does not know them."""

    def __post_init__(self) -> None:
        if not self.full_text:
            object.__setattr__(self, "full_text", self.raw)


class PartKind(StrEnum):
    """The kind of a part of a turn."""

    REASONING = "reasoning"
    CONTENT = "content"
    TOOL_CALL = "tool_call"
    """One attempt, with its delimiters."""
    MARKUP = "markup"
    """Delimiters of reasoning and content, channel headers, and white space between parts."""
    STOP = "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsePart:
    """A part of a turn: the completion ids [span[0], span[1])."""

    kind: PartKind
    span: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedResponse:
    """An assistant turn, read from the ids of a completion."""

    content: str
    reasoning: str = ""
    tool_calls: tuple[ParsedToolCall, ...] = ()
    """Every attempt; filter by status."""
    reasoning_complete: bool = True
    """False if the completion ended inside its reasoning."""
    parts: tuple[ResponsePart, ...] = ()
    """All completion ids, in order: each belongs to exactly one part."""

    @property
    def failures(self) -> tuple[ParsedToolCall, ...]:
        """The attempts that did not parse as calls."""
        return tuple(call for call in self.tool_calls if call.status is not ToolCallStatus.OK)

    def __post_init__(self) -> None:
        position = 0
        for k, part in enumerate(self.parts):
            start, stop = part.span
            if start != position or stop <= start:
                raise InvariantError(
                    f"parts[{k}] ({part.kind}) has the span {part.span}: it must begin at {position}, the end of the "
                    "part before it, and have at least one id"
                )
            position = stop

    def to_message(self, call_ids: Sequence[str]) -> Message:
        """Build the assistant message, with one of `call_ids` for each of `tool_calls`. Failed calls are left out."""
        if len(call_ids) != len(self.tool_calls):
            raise InvariantError(f"{len(call_ids)} call ids for {len(self.tool_calls)} tool calls: give one for each")
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        calls = [(c, i) for c, i in zip(self.tool_calls, call_ids, strict=True) if c.status is ToolCallStatus.OK]
        if calls:
            message["tool_calls"] = [make_call(i, c.name, c.arguments) for c, i in calls]
        return message


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """Text, or one whole attempt at a call. The joined texts of a kind are the response's reasoning or content."""

    kind: PartKind
    """REASONING, CONTENT or TOOL_CALL."""
    text: str = ""
    tool_call: ParsedToolCall | None = None


class ResponseReader(Protocol):
    """Reads one completion while it is sampled. It does not matter how the ids are split over calls of `feed`."""

    def feed(self, token_ids: Iterable[int], /) -> tuple[Delta, ...]:
        """Take more ids and return what is certain now. Text that may become a delimiter or be trimmed is held back."""
        ...

    def close(self) -> tuple[Delta, ...]:
        """End the completion and return what was held back. Closing again returns nothing."""
        ...

    def finish(self) -> ParsedResponse:
        """Close the reader if needed, and return the whole response, as `Renderer.parse_response` does."""
        ...


class BufferedReader:
    """Implements `ResponseReader` for parsers of whole completions: collects the ids, and parses them at the end."""

    def __init__(self, parse: Callable[[Sequence[int]], ParsedResponse]) -> None:
        self._parse = parse
        self._ids: list[int] = []
        self._response: ParsedResponse | None = None

    def feed(self, token_ids: Iterable[int], /) -> tuple[Delta, ...]:
        """Take more ids; returns nothing before the end."""
        if self._response is not None:
            raise InvariantError("the response was closed: open another reader for another completion")
        self._ids.extend(map(int, token_ids))
        return ()

    def close(self) -> tuple[Delta, ...]:
        """Return everything, reasoning and content before the calls; nothing when called again."""
        if self._response is not None:
            return ()
        parsed = self._response = self._parse(self._ids)
        texts = ((PartKind.REASONING, parsed.reasoning), (PartKind.CONTENT, parsed.content))
        return (
            *(Delta(kind=kind, text=text) for kind, text in texts if text),
            *(Delta(kind=PartKind.TOOL_CALL, tool_call=call) for call in parsed.tool_calls),
        )

    def finish(self) -> ParsedResponse:
        """Close the reader if needed, and return the whole response."""
        self.close()
        assert self._response is not None
        return self._response


@runtime_checkable
class LoadsImages(Protocol):
    """Optional method of a `Renderer` that takes images."""

    def load_images(self, messages: Sequence[Message]) -> list[Message]:
        """Replace each image of the messages by its file (`{"type": "image", "image": EncodedImage}`).

        The result renders like the original, but faster: nothing is read, decoded or processed again.

        Raises:
            MessagesError: the messages are malformed, or there are images and the model takes none.
            ImageError: an image has an unknown form, is broken, is beyond the limits, or the processor refuses it.
        """
        ...


@runtime_checkable
class ConstrainsCalls(Protocol):
    """Optional method of a `Renderer` that can make a turn call tools."""

    def constrain_calls(self, functions: Sequence[ToolSchema], *, prompt_ids: TokenIds, several: bool) -> str:
        """A turn that calls one of these functions, or with `several` any number from one on, after its reasoning.

        Returns a structural tag of xgrammar as JSON text, for `StructuredOutput`. It is in the model's own call format,
        and a turn that obeys it parses as calls.

        Raises:
            InvalidInputError: the call format has no such grammar.
        """
        ...


@runtime_checkable
class ClosesReasoning(Protocol):
    """Optional method of a `Renderer` that can close the reasoning of a turn that is being sampled."""

    def get_reasoning_end(self) -> TokenIds:
        """The ids that end reasoning, as the template writes it between reasoning and answer.

        Raises:
            InvalidInputError: the template has no reasoning, or no single control token closes it.
        """
        ...


@runtime_checkable
class ThreadedRenderer(Protocol):
    """Optional attribute of a `Renderer` that works for many rollouts: its own threads.

    A single one renders for the rollouts of a group in the order in which they asked, and leaves the loop its turn.
    """

    @property
    def renderer_threads(self) -> DaemonThreads:
        """The threads to use this renderer in, for callers with an event loop."""
        ...


BridgeOutcome: TypeAlias = Bridge | Refusal


@runtime_checkable
class Renderer(Protocol):
    """Messages to ids and back, for one model. The rollout loop makes call ids unique within a conversation.

    Rollouts call it from threads, several at a time, so that their event loop never waits for it.
    """

    def render(self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] = ()) -> RenderedPrompt:
        """Render a whole conversation with the generation prompt. Text from outside forges no control id (I5).

        The ids are those that the model reads: an image is all ids of its expansion, with a span.

        Raises:
            MessagesError: the messages are malformed, have parts that are neither text nor images, or have images and
                the model takes none.
            ImageError: an image is in an unsupported form, broken, beyond the limits, or refused by the processor.
            ToolDefinitionError: the tools are not a list of schemas.
            TemplateError: the template refuses the messages, rewrites text with control tokens in it, or does not write
                each image once in its message.
        """
        ...

    def render_ids(
        self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] = (), add_generation_prompt: bool = False
    ) -> TokenIds:
        """Like `render`, ids only; the generation prompt is optional."""
        ...

    def parse_response(
        self, completion_ids: TokenIds, *, prompt_ids: TokenIds | None = None, tools: Sequence[ToolSchema] = ()
    ) -> ParsedResponse:
        """Read a completion as content, reasoning and tool calls. Never raises, for any ids that the model sampled.

        `prompt_ids` show whether the generation prompt already opened the reasoning. The schemas of `tools` give the
        types of arguments in formats that write all values as text; they never make a call invalid.
        """
        ...

    def open_response(
        self, *, prompt_ids: TokenIds | None = None, tools: Sequence[ToolSchema] = (), reads_calls: bool = True
    ) -> ResponseReader:
        """Open a reader that parses a completion while it is sampled.

        Without `reads_calls`, the text of calls is content, delimiters included: for a turn that can have none.
        """
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
        earlier: Sequence[Message],
    ) -> BridgeOutcome:
        """The ids between `prompt_ids + completion_ids` and the next completion (I1).

        `assistant` is the message of `completion_ids` (`parse_response`), with the call ids that new tool messages
        answer, and `earlier` are all messages before it: the bridge is checked on this conversation. The history is
        rendered as text, but not tokenised.

        Raises:
            MessagesError: `assistant` or a message of `earlier` is malformed.
            ToolDefinitionError: the tools are not a list of schemas.
        """
        ...
