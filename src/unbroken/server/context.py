"""The parts of a server that its routes use, and the roles in which its templates write instructions."""

from __future__ import annotations

import hashlib
from asyncio import wrap_future
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

from starlette.requests import Request

from unbroken.counters import Counters, Event
from unbroken.images.lru_cache import LruCache
from unbroken.messages import Message, ToolSchema, get_text
from unbroken.rendering.base import Renderer
from unbroken.rendering.effects import find_unread_options, shows_tools
from unbroken.rendering.encoding.text_codec import TextCodec
from unbroken.rendering.template import TemplateRenderer
from unbroken.server.config import ServerConfig
from unbroken.server.http.errors import HttpError, check_size
from unbroken.server.http.json import encode_json
from unbroken.server.http.known_bodies import KnownBodies
from unbroken.server.images import ImageIntake
from unbroken.server.metrics import Metrics
from unbroken.server.policies import Policies, PolicySource
from unbroken.server.service import SamplingService
from unbroken.server.turns import OpenTurn, Question, TurnOpener, open_reply
from unbroken.server.weights import WeightLoader
from unbroken.server.wire.answers import KeptAnswers
from unbroken.server.wire.reply import WholeReply
from unbroken.types import SampledSequence

_T = TypeVar("_T")
MakeRenderer = Callable[[Mapping[str, Any]], Renderer]
"""Makes the renderer for template options (`chat_template_kwargs`), which are part of a renderer's identity."""
_MAX_RENDERERS = 32
_MAX_INEFFECTIVE = 256
"""Sets of tools and options whose effect is known."""
_MAX_WRITTEN_ROLES = 1024
_NUM_TEXT_THREADS = 4
"""A long text takes one for seconds; short ones have the others."""
_MAX_SHORT = 256
"""Most ids of a reply that is read at once: a thread has its costs too, and the event loop waits for its end."""
_MAX_OPTIONS = 2**18
"""Characters of template options as JSON: documents fit, and renderers are kept by them."""
_RESERVED = frozenset(
    {
        "messages",
        "tools",
        "add_generation_prompt",
        "continue_final_message",
        "conversation",
        "chat_template",
        "tokenize",
        "return_dict",
        "bos_token",
        "eos_token",
        "unk_token",
        "pad_token",
        "sep_token",
        "cls_token",
        "mask_token",
    }
)
"""Variables of a template that the server sets itself."""


class ServerContext:
    """The parts of one server."""

    def __init__(
        self,
        *,
        service: SamplingService,
        make_renderer: MakeRenderer,
        codec: TextCodec,
        images: ImageIntake,
        weights: WeightLoader,
        config: ServerConfig,
        metrics: Metrics,
        make_turns: Callable[[ServerContext], TurnOpener],
        policy_source: PolicySource | None = None,
    ) -> None:
        """`make_turns` makes the opener of this server's turns; `policy_source` has policies besides the engine's."""
        self.service = service
        self.codec = codec
        self.images = images
        self.weights = weights
        self.config = config
        self.metrics = metrics
        self.policies = Policies(service.engine, config, policy_source)
        self._make_renderer = make_renderer
        self._renderers: LruCache[str, Renderer] = LruCache(_MAX_RENDERERS)
        self._written_roles: LruCache[tuple[str, tuple[str, ...]], bool] = LruCache(_MAX_WRITTEN_ROLES)
        self._ineffective: LruCache[str, tuple[str, ...]] = LruCache(_MAX_INEFFECTIVE)
        self.text_threads = _make_text_threads()
        self.answers = KeptAnswers()
        self.bodies = KnownBodies()
        self.turns = make_turns(self)

    async def read_reply(
        self, turn: OpenTurn, question: Question, sequence: SampledSequence, *, index: int = 0
    ) -> WholeReply:
        """Read a whole reply, or get it from the turn if that has read it; a long one is read in a text thread."""
        if (known := turn.replies.get(index)) is not None:
            return known
        reader = open_reply(turn, question, self.codec, self.metrics.events, index=index)
        if len(sequence.completion_ids) <= _MAX_SHORT:
            pieces = reader.read(sequence)
        else:
            pieces = await wrap_future(self.text_threads.submit(reader.read, sequence))
        return WholeReply(reader=reader, pieces=pieces)

    def get_renderer(self, options: Mapping[str, Any] | None = None, settings: str = "{}") -> Renderer:
        """Return the renderer with these `chat_template_kwargs` and image settings (as in `ImageSpan`).

        Call this in a text thread. The last 32 are kept.

        Raises:
            HttpError: an option is a variable that the server sets, or the renderer takes text only.
        """
        renderer = self._get_renderer(options)
        if settings == "{}":
            return renderer
        if not isinstance(renderer, TemplateRenderer):
            raise HttpError(
                400,
                f"mm_processor_kwargs must be left out, got {settings}: the server's renderer takes text only",
                param="mm_processor_kwargs",
            )
        return renderer.with_image_settings(settings)

    def _get_renderer(self, options: Mapping[str, Any] | None) -> Renderer:
        key = self.check_options(options)
        renderer = self._renderers.get(key)
        if renderer is None:
            renderer = self._make_renderer(dict(options or {}))
        self._renderers.put(key, renderer)
        return renderer

    def check_options(self, options: Mapping[str, Any] | None, *, name: str = "chat_template_kwargs") -> str:
        """Return template options, the field `name`, as JSON.

        Raises:
            HttpError: an option is a variable that the server sets, or they are too long: renderers are kept by them.
        """
        if reserved := sorted(_RESERVED & set(options or {})):
            raise HttpError(400, f"{name} must not have {reserved}: the server sets these variables itself", param=name)
        return check_size(options or {}, name=name, most=_MAX_OPTIONS)

    async def adapt_roles(self, messages: Sequence[Message], options: Mapping[str, Any]) -> Sequence[Message]:
        """Give instructions a role in which the template writes them; see `roles`.

        Raises:
            HttpError: an option is a variable that the server sets.
        """
        self.check_options(options)
        if not _needs_adapting(messages):
            return messages
        return await wrap_future(self.text_threads.submit(self._adapt_roles, messages, options))

    def _adapt_roles(self, messages: Sequence[Message], options: Mapping[str, Any]) -> Sequence[Message]:
        renderer = self.get_renderer(options)
        if not isinstance(renderer, TemplateRenderer):
            return messages
        template = renderer

        def writes(roles: tuple[str, ...]) -> bool:
            key = (self.check_options(options), roles)
            known = self._written_roles.get(key)
            if known is None:
                known = template.writes_roles(roles)
                self._written_roles.put(key, known)
            return known

        return adapt_roles(messages, writes=writes, events=self.metrics.events)

    def reads_option(self, name: str) -> bool:
        """Whether the template reads this variable. Call this in a text thread."""
        renderer = self.get_renderer()
        return isinstance(renderer, TemplateRenderer) and name in renderer.find_variables()

    async def find_ineffective(self, tools: Sequence[ToolSchema], options: Mapping[str, Any]) -> tuple[str, ...]:
        """The fields of a question that do not change its prompt: `tools` that the template does not show, and options
        that it does not read. The same tools and options are looked at once.

        Raises:
            HttpError: an option is a variable that the server sets.
        """
        if not tools and not options:
            return ()
        self.check_options(options)

        def find() -> tuple[str, ...]:
            encoded = encode_json([tools, options])
            if len(encoded) > 4 * self.service.engine.context_length * self.codec.longest_token:
                return ()  # longer than the context (a character has 4 bytes at most): the prompt is refused
            key = hashlib.sha256(encoded).hexdigest()
            found = self._ineffective.get(key)
            if found is None:
                renderer = self.get_renderer(options)
                shown = not tools or shows_tools(renderer, tools)
                unread = find_unread_options(renderer, options)
                found = (*([] if shown else ["tools"]), *(f"chat_template_kwargs.{name}" for name in unread))
                self._ineffective.put(key, found)
            return found

        return await wrap_future(self.text_threads.submit(find))

    def reads_key(self, name: str) -> bool:
        """Whether the template may read this key of a message. Call this in a text thread."""
        renderer = self.get_renderer()
        return isinstance(renderer, TemplateRenderer) and renderer.mentions(name)

    def get_stop_token_ids(self) -> tuple[int, ...]:
        """The ids that end a turn."""
        return self.get_renderer().get_stop_token_ids()

    async def close(self) -> None:
        """End turns and threads; later calls start new ones."""
        await self.turns.close()
        self.images.close()
        self.text_threads.shutdown(wait=False, cancel_futures=True)
        self.text_threads = _make_text_threads()


def _make_text_threads() -> ThreadPoolExecutor:
    """Make a few threads for rendering, parsing and encoding, so that other requests continue.

    `await wrap_future(text_threads.submit(work))` drops what waits for a thread when its caller is cancelled.
    """
    return ThreadPoolExecutor(max_workers=_NUM_TEXT_THREADS, thread_name_prefix="unbroken-text")


def get_context(request: Request) -> ServerContext:
    """Return the context of the server that received a request."""
    return cast(ServerContext, request.app.state.context)


_INSTRUCTIONS = ("system", "developer")
_MAX_TRIED = 4
"""How many messages in a row are tried: more of the same are written like these."""
WritesRoles = Callable[[tuple[str, ...]], bool]
"""Whether a template writes the text of every message of a conversation with these roles."""


def adapt_roles(messages: Sequence[Message], *, writes: WritesRoles, events: Counters) -> Sequence[Message]:
    """Give instructions a role and a place in which the template writes them; each change is counted.

    Agents send instructions as `developer` messages, as several system messages, and between the turns. Many templates
    leave such messages out, or refuse them:

        developer, user             Qwen3 and others leave it out       ->  system, user
        system, system, user        Qwen3.5 refuses it                  ->  system (both texts), user
        system, user, system        Qwen3.5 refuses it                  ->  system, user, user

    What the template writes stays as it is. A change depends on the roles alone, so a conversation that grows keeps its
    beginning. Messages that are malformed pass unchanged: rendering refuses them.
    """
    if not _needs_adapting(messages):
        return messages
    num_leading = next((k for k, one in enumerate(messages) if not _is_instruction(one)), len(messages))
    leading = _adapt_leading(messages[:num_leading], writes, events)
    begin = tuple(message["role"] for message in leading[:1])
    later = [_adapt_later(message, begin, writes, events) for message in messages[num_leading:]]
    return [*leading, *later]


def _needs_adapting(messages: Sequence[Message]) -> bool:
    """Whether there are instructions besides a system message at the beginning."""
    return any(
        message.get("role") in _INSTRUCTIONS and (k > 0 or message["role"] != "system") and _is_instruction(message)
        for k, message in enumerate(messages)
    )


def _adapt_leading(messages: Sequence[Message], writes: WritesRoles, events: Counters) -> list[Message]:
    roles = tuple(message["role"] for message in messages[:_MAX_TRIED])
    if roles in ((), ("system",)) or writes((*roles, "user")):
        return list(messages)
    if "developer" in roles:
        events.count(Event.ADAPTED_ROLE, "developer_as_system")
    as_system = [_with_role(message, "system") for message in messages]
    if len(messages) == 1 or writes((*(["system"] * len(roles)), "user")):
        return as_system
    events.count(Event.ADAPTED_ROLE, "joined_system")
    joined: Message = {**as_system[0], "content": "\n\n".join(get_text(one.get("content")) for one in messages)}
    return [joined]


def _adapt_later(message: Message, begin: tuple[str, ...], writes: WritesRoles, events: Counters) -> Message:
    if not _is_instruction(message) or writes((*begin, "user", message["role"])):
        return message
    if message["role"] == "developer" and writes((*begin, "user", "system")):
        events.count(Event.ADAPTED_ROLE, "developer_as_system")
        return _with_role(message, "system")
    events.count(Event.ADAPTED_ROLE, "system_as_user")
    return _with_role(message, "user")


def _is_instruction(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    is_text = isinstance(content, str) or (
        isinstance(content, list)
        and all(
            isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
            for part in content
        )
    )
    return is_text and message.get("role") in _INSTRUCTIONS


def _with_role(message: Message, role: str) -> Message:
    return {**message, "role": role}
