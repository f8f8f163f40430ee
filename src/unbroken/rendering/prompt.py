"""Renders a conversation to ids so that no text from outside becomes a control token (I5)."""

from __future__ import annotations

import functools
import hashlib
import marshal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from unbroken.errors import MessagesError, TemplateError
from unbroken.images.lru_cache import LruCache
from unbroken.images.processor import ImageInputs
from unbroken.messages import (
    KNOWN_ROLES,
    Message,
    ToolSchema,
    check_conversation,
    check_tools,
    copy_containers,
    get_text,
    has_images,
)
from unbroken.rendering.base import RenderedPrompt
from unbroken.rendering.chat_template import ChatTemplate
from unbroken.rendering.encoding.marks import Marks, Span, find_outside_strings
from unbroken.rendering.encoding.safe_encoder import SafeEncoder, UnsafeTextError
from unbroken.rendering.images import MessageImage, PlaceholderError, find_placeholder, load_images, place_images
from unbroken.rendering.message_format import MessageFormat
from unbroken.threads import RendererLock
from unbroken.types.arrays import freeze

_MAX_RENDERED_AGAIN = 16
"""The most messages to render again in search of those whose images a template leaves out."""
_ALWAYS_WRITTEN = KNOWN_ROLES - {"developer"}
"""Roles that every template knows; a message of another one may be left out."""
_MAX_CHARACTERS = 2**25
"""Of all texts that are remembered: about 80 conversations of 100k tokens."""
_MESSAGE_CHARACTERS = 500
"""What a message takes beside its text, or many short conversations would take far more memory than their texts."""
_ID_CHARACTERS = 8
"""What an id takes with the index of its message."""
_NO_REFERENCES = 2
"""The format of `marshal` that spells equal values alike, wherever they are shared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownPrompt:
    """A prompt that was rendered. It is shared, and never changed."""

    messages: list[dict[str, Any]]
    """In the template's format."""
    text: str
    absent: frozenset[str]
    """Control tokens that no text of the messages has in it, as far as that was looked for."""
    digest: Any
    """The `hashlib` object of the tools and messages, for those that follow."""
    rendered: RenderedPrompt | None = None
    """Its ids, if it was rendered whole and has no images."""


class RecentPrompts:
    """The prompts that were rendered last: the next turn of a conversation begins with the messages of one of them.

    They are found by a digest of the messages as they are now, so that a caller may change its own. It tells apart what
    is equal in Python and not in JSON (1 and True, the order of arguments). Images have no part in a rendering.
    """

    def __init__(self) -> None:
        self._prompts: LruCache[bytes, KnownPrompt] = LruCache(_MAX_CHARACTERS, _count_characters)

    def add(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema],
        text: str,
        *,
        converted: list[dict[str, Any]],
        known: KnownPrompt | None = None,
        absent: frozenset[str] = frozenset(),
        rendered: RenderedPrompt | None = None,
    ) -> None:
        """Remember the rendering of messages, in the template's format `converted`, with a generation prompt.

        The first messages are those of `known`; `absent` are control tokens that these texts do not have. The oldest
        prompts are forgotten.
        """
        num_known = 0 if known is None else len(known.messages)
        digest = _digest(messages[num_known:], tools, None if known is None else known.digest)
        if digest is None:
            return
        # A template's format shares what is nested in a message, such as arguments, and the caller may change that.
        own = [*([] if known is None else known.messages), *copy_containers(converted[num_known:])]
        prompt = KnownPrompt(messages=own, text=text, absent=absent, digest=digest, rendered=rendered)
        self._prompts.put(digest.digest(), prompt)

    def find(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> KnownPrompt | None:
        """The prompt of these messages; None if it is not remembered."""
        digest = _digest(messages, tools, None)
        return None if digest is None else self._prompts.get(digest.digest())


def _count_characters(prompt: KnownPrompt) -> int:
    num_ids = 0 if prompt.rendered is None else len(prompt.rendered.token_ids)
    return len(prompt.text) + _ID_CHARACTERS * num_ids + _MESSAGE_CHARACTERS * len(prompt.messages)


def _digest(messages: Sequence[Message], tools: Sequence[ToolSchema], known: Any) -> Any:
    """The `hashlib` object of tools and messages, after those of `known`; None for values that are not as in JSON."""
    read: list[Any] = [_leave_out_images(one) if has_images(one.get("content")) else one for one in messages]
    try:
        digest = hashlib.sha256(marshal.dumps(list(tools), _NO_REFERENCES)) if known is None else known.copy()
        spelled = [marshal.dumps(one, _NO_REFERENCES) for one in read]
        # A number or an array of numpy is spelled as its bytes, and so is another one of another type or shape.
        if any(marshal.loads(text) != one for text, one in zip(spelled, read, strict=True)):
            return None
    except ValueError:
        return None
    digest.update(b"".join(spelled))
    return digest


def _leave_out_images(message: Message) -> dict[str, Any]:
    parts: Any = message["content"]
    return {**message, "content": [part if part["type"] == "text" else "image" for part in parts]}


class PromptRenderer:
    """Renders whole prompts with one template and one tokenizer.

    The text is rendered a second time with marks around the text from outside: that must not become control tokens.
    """

    def __init__(
        self,
        template: ChatTemplate,
        message_format: MessageFormat,
        encoder: SafeEncoder,
        lock: RendererLock,
        recent: RecentPrompts,
    ) -> None:
        self._lock = lock
        self._template = template
        self._message_format = message_format
        self._encoder = encoder
        self._recent = recent

    def render_prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema],
        images: ImageInputs | None,
        *,
        add_generation_prompt: bool,
        no_images_because: str,
    ) -> RenderedPrompt:
        """Render and encode a conversation; raises the errors of `Renderer.render`."""
        check_conversation(messages)
        check_tools(tools)
        for position, message in enumerate(messages):
            if self._encoder.spells_control(message["role"]):
                raise MessagesError(f"messages[{position}].role must hold no control token, got {message['role']!r}")
        loaded = load_images(messages, images, no_images_because=no_images_because)
        with self._lock:
            if add_generation_prompt and not loaded:
                # The rollouts of a group begin with one prompt, and ask for it one after the other.
                known = self._recent.find(messages, tools)
                if known is not None and known.rendered is not None:
                    return known.rendered
            return self._render_prompt(messages, tools, images, loaded, add_generation_prompt=add_generation_prompt)

    def _render_prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema],
        images: ImageInputs | None,
        loaded: Sequence[MessageImage],
        *,
        add_generation_prompt: bool,
    ) -> RenderedPrompt:
        converted = self._message_format.convert(messages)
        render = functools.partial(self._template.render, add_generation_prompt=add_generation_prompt)
        text = render(converted, tools=tools)
        spans = self._find_spans(text, converted, tools, add_generation_prompt=add_generation_prompt)
        if spans is None:
            self._check_harmless(converted, tools)
        else:
            _check_roles_are_written(messages, spans)
        try:
            encoding = self._encoder.encode(text, spans or [])
        except UnsafeTextError as error:
            raise TemplateError(f"text cannot be encoded without forging a control token: {error}") from None
        try:
            placed = place_images(encoding.token_ids, encoding.message_indices, loaded, images)
        except PlaceholderError as error:
            placeholder = find_placeholder(images, self._encoder.control) or ""
            where = _describe_left_out_images(text, converted, placeholder, functools.partial(render, tools=tools))
            raise TemplateError(f"{error}{where}. Use a template that takes images where they are") from None
        rendered = RenderedPrompt(
            token_ids=placed.token_ids, message_indices=freeze(placed.message_indices), images=placed.images
        )
        if add_generation_prompt:
            self._recent.add(messages, tools, text, converted=converted, rendered=None if loaded else rendered)
        return rendered

    def _find_spans(
        self,
        text: str,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[ToolSchema],
        *,
        add_generation_prompt: bool,
    ) -> list[Span] | None:
        """Find the text from outside in `text`; None if the template treats marked text differently."""
        marks = Marks.absent_from(text, messages)
        render = functools.partial(self._render_marked, messages, tools, add_generation_prompt=add_generation_prompt)
        spans = _read_marks(render(marks), text, marks)
        if spans is None or not any(self._encoder.has_control(text[span.start : span.stop]) for span in spans):
            return spans
        marks = replace(marks, split=self._encoder.split_control)
        return None if _read_marks(render(marks), text, marks) is None else spans

    def _render_marked(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[ToolSchema],
        marks: Marks,
        *,
        add_generation_prompt: bool,
    ) -> str | None:
        may_forge = self._encoder.may_forge
        try:
            return self._template.render(
                marks.mark_messages(messages, may_forge),
                tools=marks.mark_suspicious_strings(tools, may_forge),
                add_generation_prompt=add_generation_prompt,
            )
        except TemplateError:
            return None

    def _check_harmless(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[ToolSchema]) -> None:
        for string in find_outside_strings(messages, tools):
            if self._encoder.may_forge(string):
                raise TemplateError(
                    "the template cuts or rewrites text of the messages or tools, and a text may hold a control token: "
                    f"{string[:80]!r}. Give reasoning as reasoning_content and calls as tool_calls, not inside content"
                )


def _check_roles_are_written(messages: Sequence[Message], spans: Sequence[Span]) -> None:
    """Check that the template writes the messages with unusual roles, which it may skip."""
    written = {span.index for span in spans}
    for position, message in enumerate(messages):
        if (
            message["role"] not in _ALWAYS_WRITTEN
            and position not in written
            and get_text(message.get("content")).strip()
        ):
            raise MessagesError(
                f"messages[{position}].role must be one that the template writes, got {message['role']!r}: it leaves "
                f"the message out. Usual roles are {sorted(_ALWAYS_WRITTEN)}"
            )


def _read_marks(marked: str | None, plain: str, marks: Marks) -> list[Span] | None:
    """Find the spans of marked text in `plain`, in order; None if the template treated marked text differently."""
    read = None if marked is None else marks.remove(marked)
    return read[1] if read is not None and read[0] == plain else None


def _describe_left_out_images(
    text: str, messages: Sequence[Mapping[str, Any]], placeholder: str, render: Callable[[Sequence[Any]], str]
) -> str:
    """Name, for an error, the message with fewer or more placeholders in `text` than images; empty if none is found.

    Each message is rendered again without its images: the placeholders that are missing then are its own.
    """
    with_images = [k for k, message in enumerate(messages) if has_images(message["content"])]
    for position in with_images[:_MAX_RENDERED_AGAIN]:
        content = messages[position]["content"]
        texts = [part for part in content if part["type"] == "text"]
        silent = {**messages[position], "content": texts or [{"type": "text", "text": ""}]}
        try:
            without = render([*messages[:position], silent, *messages[position + 1 :]])
        except TemplateError:
            continue
        num_written = text.count(placeholder) - without.count(placeholder)
        if num_written != len(content) - len(texts):
            return f": {num_written} for the {len(content) - len(texts)} of messages[{position}]"
    return ""
