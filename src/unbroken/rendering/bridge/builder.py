r"""Builds bridges (I1): the ids between a sampled turn and the next generation prompt, from the glue between them.

ChatML, ids shortened: the engine sampled `[.., call, <|im_end|>]` and one tool reply "42" follows.

    the glue    <|im_end|>\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n
                          `--------------------- the bridge ----------------------´

Had the turn been cut by length, the bridge would begin with the `<|im_end|>` before that (I7).

Only the last sampled id is read; a turn without a stop id is also parsed, to see whether it ended inside its reasoning.
Sampled ids are never searched for ends, because a model may sample or spell control tokens anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from unbroken.errors import ImageError, MessagesError
from unbroken.images.processor import ImageInputs
from unbroken.messages import Message, ToolSchema, check_messages, check_tools, has_images
from unbroken.rendering.base import Bridge, BridgeOutcome, Closing, HistoryEffect, HistoryPolicy, RefusalReason
from unbroken.rendering.bridge.glue import Glue, GlueFinder
from unbroken.rendering.bridge.turn_ends import BridgeRefusedError, TurnEnds
from unbroken.rendering.encoding.marks import Span
from unbroken.rendering.encoding.safe_encoder import SafeEncoder, UnsafeTextError
from unbroken.rendering.images import MessageImage, PlaceholderError, load_images, place_images
from unbroken.rendering.message_format import ReasoningDelimiters
from unbroken.types import TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """Where in the glue a bridge starts, and how it closes the turn."""

    position: int = 0
    anchor: str = ""
    """A control token to encode the bridge after; its id is not part of the bridge."""
    text_before: str = ""
    closing: Closing = Closing.NONE
    num_taken_back: int = 0


class BridgeBuilder:
    """Builds bridges for one template with its options and one tokenizer. Any number of threads may use it."""

    def __init__(
        self,
        glue: GlueFinder,
        encoder: SafeEncoder,
        ends: TurnEnds,
        *,
        reasoning: ReasoningDelimiters | None,
        stop_token_ids: frozenset[int],
        renders_calls: bool,
        policy: HistoryPolicy = HistoryPolicy.EXACT,
    ) -> None:
        self._glue = glue
        self._encoder = encoder
        self._ends = ends
        self._unambiguous_ends = ends.tokens - ends.ambiguous
        self._reasoning = reasoning
        self._stop_token_ids = stop_token_ids
        self._renders_calls = renders_calls
        self._policy = policy

    def build(
        self,
        completion_ids: TokenIds,
        new_messages: Sequence[Message],
        *,
        assistant: Message,
        tools: Sequence[ToolSchema],
        earlier: Sequence[Message],
        ends_in_reasoning: Callable[[], bool],
        images: ImageInputs | None = None,
        no_images_because: str = "",
    ) -> BridgeOutcome:
        """Build the bridge after a turn, of which only the last sampled id decides anything.

        `ends_in_reasoning` is called only if the turn was cut.

        Raises:
            MessagesError: the turn is malformed.
            ToolDefinitionError: the tools are not a list of schemas.
        """
        check_messages([assistant])
        check_tools(tools)
        last_id = int(completion_ids[-1]) if len(completion_ids) else -1
        try:
            self._check_extension(assistant, new_messages)
            loaded = _load_new_images(new_messages, images, no_images_because)
            glue = self._glue.find(
                assistant,
                new_messages,
                earlier=earlier,
                tools=tools,
                sampled_text=lambda: self._encoder.decode([int(token_id) for token_id in completion_ids]),
            )
            if self._policy is HistoryPolicy.TEMPLATE and glue.history is not HistoryEffect.KEPT:
                raise BridgeRefusedError(RefusalReason.REWRITES_HISTORY, _describe_effect(glue.history))
            return self._encode(glue, self._find_start(glue, last_id, ends_in_reasoning), loaded, images)
        except BridgeRefusedError as error:
            return error.refusal

    def _check_extension(self, assistant: Message, new_messages: Sequence[Message]) -> None:
        """Refuse what no bridge can have."""
        try:
            check_messages(new_messages)
        except MessagesError as error:
            raise BridgeRefusedError(RefusalReason.BAD_EXTENSION, f"new {error}") from None
        if has_images(assistant.get("content")):
            raise BridgeRefusedError(RefusalReason.BAD_EXTENSION, "a sampled turn has no images")
        call_ids = [str(call.get("id") or "") for call in assistant.get("tool_calls") or ()]
        for message in new_messages:
            self._check_new_message(message, call_ids)

    def _check_new_message(self, message: Mapping[str, object], call_ids: Sequence[str]) -> None:
        role, call_id = str(message["role"]), message.get("tool_call_id")
        if role == "assistant":
            raise BridgeRefusedError(RefusalReason.BAD_EXTENSION, "an assistant message cannot extend a sampled turn")
        if self._encoder.spells_control(role):
            raise BridgeRefusedError(RefusalReason.UNSAFE_TEXT, f"the role {role!r} has a control token in it")
        if call_id is not None and call_id not in call_ids and self._renders_calls:
            raise BridgeRefusedError(
                RefusalReason.BAD_EXTENSION, f"tool_call_id {call_id!r} is not one of the turn's {list(call_ids)}"
            )

    def _find_start(self, glue: Glue, last_id: int, ends_in_reasoning: Callable[[], bool]) -> _Start:
        """Find the start of the bridge after a turn whose last sampled id is `last_id`."""
        last = self._encoder.control.get_text(last_id)
        if last is not None and last in self._unambiguous_ends:
            if (position := self._find_sampled_end(glue, last)) is not None:
                return _Start(position=position, anchor=last)
            if last in self._ends.headers:
                return _Start(num_taken_back=1)
            return _Start(closing=Closing.FOREIGN_STOP)
        if last_id in self._stop_token_ids:
            return _Start(closing=Closing.FOREIGN_STOP)
        if self._reasoning is not None and ends_in_reasoning():
            return _Start(closing=Closing.REASONING, text_before=self._reasoning.close_text, anchor=glue.end_token)
        return _Start(closing=Closing.TRUNCATED)

    def _find_sampled_end(self, glue: Glue, last: str) -> int | None:
        """The end of the sampled token `last` in the end of the turn; None if the template writes another end."""
        if last == glue.end_token or self._ends.last_turn_ends.get(last) == glue.end_token:
            return len(glue.end_token)
        for ending in self._list_endings(glue):
            if last in ending:
                return ending.index(last) + len(last)
        return None

    def _list_endings(self, glue: Glue) -> list[str]:
        """The ends of turns, up to the stop, that the glue begins with."""
        return [each for each in (*self._ends.endings, glue.ending) if each and glue.text.startswith(each)]

    def _count_closing(self, glue: Glue, start: _Start, bridge_ids: TokenIds) -> int:
        """The ids up to the last control token of the turn's end."""
        if start.closing is Closing.NONE or glue.end_token in self._ends.headers:
            return 0
        ending = max(self._list_endings(glue), key=len, default=glue.end_token)
        control = self._encoder.control
        num_control = sum(1 for _ in control.find(start.text_before + ending))
        found = np.flatnonzero(np.isin(bridge_ids, list(control.ids)))
        return int(found[num_control - 1]) + 1 if 0 < num_control <= len(found) else 0

    def _encode(self, glue: Glue, start: _Start, images: Sequence[MessageImage], inputs: ImageInputs | None) -> Bridge:
        """Encode the glue from `start` on, after a control token: to the tokenizer it is not the start of a text.

        Raises `BridgeRefusedError` if that is impossible without forging a control id, or an image is refused.
        """
        before = start.anchor + start.text_before
        shift = len(before) - start.position
        spans = [
            Span(start=span.start + shift, stop=span.stop + shift, index=span.index)
            for span in glue.spans
            if span.start >= start.position
        ]
        try:
            encoding = self._encoder.encode(before + glue.text[start.position :], spans)
        except UnsafeTextError as error:
            raise BridgeRefusedError(RefusalReason.UNSAFE_TEXT, str(error)) from None
        skip = 1 if start.anchor else 0
        if start.anchor and self._encoder.control.get_text(int(encoding.token_ids[0])) != start.anchor:
            raise BridgeRefusedError(RefusalReason.UNDERIVABLE, f"{start.anchor!r} is not encoded as one id")
        try:
            placed = place_images(encoding.token_ids[skip:], encoding.message_indices[skip:], images, inputs)
        except PlaceholderError as error:
            raise BridgeRefusedError(RefusalReason.DROPS_MESSAGE, str(error)) from None
        except ImageError as error:
            raise BridgeRefusedError(RefusalReason.BAD_EXTENSION, f"new {error}") from None
        return Bridge(
            bridge_ids=placed.token_ids,
            message_indices=placed.message_indices,
            images=placed.images,
            closing=start.closing,
            num_closing=self._count_closing(glue, start, placed.token_ids),
            num_taken_back=start.num_taken_back,
            history=glue.history,
        )


def _describe_effect(effect: HistoryEffect | None) -> str:
    if effect is None:
        return "history='template', and the template does not render the history alone, so that its effect is unknown"
    return f"the template's effect on what came before is {effect.value!r}, and history='template'"


def _load_new_images(
    new_messages: Sequence[Message], images: ImageInputs | None, no_images_because: str
) -> list[MessageImage]:
    try:
        return load_images(new_messages, images, no_images_because=no_images_because)
    except (MessagesError, ImageError) as error:
        raise BridgeRefusedError(RefusalReason.BAD_EXTENSION, f"new {error}") from None
