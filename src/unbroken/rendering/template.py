"""A renderer for any Hugging Face chat template: what the template does is probed, proven, or refused.

renderer = TemplateRenderer(tokenizer)
prompt = renderer.render([{"role": "user", "content": "What is 6 x 7?"}])
parsed = renderer.parse_response(completion_ids, prompt_ids=prompt.token_ids)
bridge = renderer.bridge_to_next_turn(
    prompt.token_ids, completion_ids, [{"role": "user", "content": "And 6 x 8?"}], assistant=parsed.to_message([])
)
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from unbroken.errors import InvalidInputError, MessagesError, TemplateError
from unbroken.images.inputs import ImageInputs
from unbroken.messages import (
    KNOWN_ROLES,
    Message,
    ToolSchema,
    check_conversation,
    check_messages,
    check_tools,
    get_text,
)
from unbroken.rendering.base import (
    BridgeOutcome,
    HistoryPolicy,
    ParsedResponse,
    Refusal,
    RenderedPrompt,
    ResponseReader,
    parse_history_policy,
)
from unbroken.rendering.bridge.builder import BridgeBuilder
from unbroken.rendering.bridge.certificate import CertificateRecord
from unbroken.rendering.bridge.refusal import BridgeRefusedError
from unbroken.rendering.bridge.turn_ends import TurnEndProbe, TurnEnds
from unbroken.rendering.encoding.marks import (
    Span,
    find_outside_strings,
    mark_messages,
    mark_suspicious_strings,
    read_marks,
)
from unbroken.rendering.encoding.safe_encoder import SafeEncoder, UnsafeTextError
from unbroken.rendering.facts import TemplateFacts
from unbroken.rendering.images import (
    MessageImage,
    PlaceholderError,
    describe_left_out_images,
    find_placeholder,
    load_images,
    place_images,
    replace_images_by_files,
)
from unbroken.rendering.jinja.chat_template import ChatTemplate, TemplateLimits
from unbroken.rendering.jinja.source import template_source
from unbroken.rendering.message_format import find_message_format
from unbroken.rendering.parsing.choosing import choose_parser
from unbroken.rendering.reasoning import find_reasoning_delimiters, find_reasoning_markup
from unbroken.types import TokenIds

_MAX_LOADING = 4


class TemplateRenderer:
    """Implements `Renderer` for a transformers fast tokenizer with a chat template."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat_template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        stop_token_ids: Sequence[int] = (),
        history: HistoryPolicy | str = HistoryPolicy.EXACT,
        parser: str | None = None,
        limits: TemplateLimits | None = None,
        now: datetime | None = None,
        images: ImageInputs | None = None,
        no_images_because: str = "the model takes none",
    ) -> None:
        """Probe the template, which takes milliseconds (and a few tenths of a second for a tokenizer of 130k entries).

        Args:
            tokenizer: a `PreTrainedTokenizerFast`.
            chat_template: the template, or the name of one of the tokenizer's, in place of the tokenizer's own; of
                several that is the one named `default`, with tools too.
            template_kwargs: variables for the template, such as `enable_thinking`.
            stop_token_ids: ids that end a turn beside those the template shows, such as a generation config's.
            history: "exact" bridges wherever the bridge is exact; "template" only where the template keeps what came
                before as it is.
            parser: the name of the format that the model writes reasoning and calls in (`parsing.registry`), or
                `response_template` for the tokenizer's own; found as `parsing.choosing` says if not given.
            limits: what a rendering may take.
            now: what the template is told the time is, always; by default the time of this call, so that what it writes
                does not change in the middle of a conversation.
            images: how images come in and what becomes of them; None for a text model.
            no_images_because: what an image is told where there is no `images`.

        Raises:
            TemplateError: there is no chat template, it does not compile, or it goes over a limit.
            InvalidInputError: the tokenizer is no fast one, a stop id is not in its vocabulary, the placeholder of
                images is none of its control tokens, or there is no such history policy or parser.
        """
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise InvalidInputError(
                f"tokenizer must be a fast tokenizer of transformers, got {type(tokenizer).__name__}: load it with "
                "AutoTokenizer, or wrap a tokenizers.Tokenizer in PreTrainedTokenizerFast(tokenizer_object=...)"
            )
        policy = parse_history_policy(history)
        self._encoder = SafeEncoder(backend)
        self._images = images
        self._loading = threading.Semaphore(_MAX_LOADING)
        self._no_images_because = no_images_because
        self._placeholder = find_placeholder(images, self._encoder.control)
        variables = {**tokenizer.special_tokens_map, **(template_kwargs or {})}
        source = template_source(tokenizer, chat_template)
        self._template = ChatTemplate(source, variables, limits=limits, now=now)
        self._message_format = find_message_format(self._template)
        probe = TurnEndProbe(self._template, self._message_format, self._encoder.control)
        self._generation_prompt = probe.find_generation_prompt()
        self._num_generation_ids = len(self._encoder.encode_plain(self._generation_prompt))
        reasoning = find_reasoning_delimiters(self._template, self._message_format, self._encoder.control)
        self._ends = _ends_or_refusal(probe)
        self._stop_token_ids = self._find_stop_token_ids(tokenizer, stop_token_ids)
        self._parser = choose_parser(
            parser,
            template=self._template,
            message_format=self._message_format,
            source=source,
            response_template=getattr(tokenizer, "response_template", None),
            reasoning=reasoning,
            control=self._encoder.control,
            decode=self._encoder.decode,
            stop_token_ids={*self._stop_token_ids, *self.get_turn_end_ids()},
            num_stop_ids=max(len(self._ends.sequence), 1) if isinstance(self._ends, TurnEnds) else 1,
        )
        self._bridges: BridgeBuilder | Refusal = (
            self._ends
            if isinstance(self._ends, Refusal)
            else BridgeBuilder(
                template=self._template,
                message_format=self._message_format,
                ends=self._ends,
                encoder=self._encoder,
                reasoning=reasoning,
                stop_token_ids=frozenset(self._stop_token_ids),
                policy=policy,
                placeholder=self._placeholder,
            )
        )
        self._facts = TemplateFacts(
            source=source,
            variables=self._template.find_variables(),
            message_format=self._message_format,
            control_tokens=self._encoder.control,
            turn_ends=self._ends,
            stop_token_ids=self._stop_token_ids,
            generation_prompt=self._generation_prompt,
            reasoning_markup=find_reasoning_markup(self._template, self._message_format, self._encoder.control),
            parser_name=self._parser.name,
        )

    @property
    def facts(self) -> TemplateFacts:
        """What was found out about the template."""
        return self._facts

    def render(self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] = ()) -> RenderedPrompt:
        """A whole conversation with the generation prompt; see `Renderer.render`.

        Raises:
            MessagesError: the messages are malformed, have parts that are neither text nor images, or images for a text
                model.
            ImageError: an image is of no form that is taken, broken, beyond the limits, or refused by the processor.
            ToolDefinitionError: the tools are no list of schemas.
            TemplateError: the template refuses them, rewrites text that has control tokens in it, or does not write
                each image once in its message.
        """
        return self._render(messages, tools, add_generation_prompt=True)

    def render_ids(
        self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] = (), add_generation_prompt: bool = False
    ) -> TokenIds:
        """Like `render`, ids only, with the generation prompt left to the caller."""
        return self._render(messages, tools, add_generation_prompt=add_generation_prompt).token_ids

    def render_text(
        self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] = (), add_generation_prompt: bool = False
    ) -> str:
        """Render the template's own text, before it is encoded.

        Whether the messages are a conversation is not checked, and text in them may spell control tokens: encode it
        only if you trust them.

        Raises:
            TemplateError: the template refuses the messages, or goes over a limit.
        """
        return self._template.render(
            self._message_format.convert(messages), tools=tools, add_generation_prompt=add_generation_prompt
        )

    def with_image_settings(self, settings: str) -> TemplateRenderer:
        """The same renderer with other settings for its images (`ImageSpan.settings`), e.g. those of one request.

        It costs next to nothing: all that was probed and proven is shared.

        Raises:
            InvalidInputError: the renderer takes no images.
        """
        if self._images is None:
            raise InvalidInputError(f"there must be no image settings, got {settings}: {self._no_images_because}")
        other = copy.copy(self)
        other._images = replace(self._images, settings=settings)
        return other

    def load_images(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with each image replaced by its file; see `rendering.base.LoadsImages`.

        Of calls from many threads four are at work at a time: a picture may take hundreds of megabytes.

        Raises:
            MessagesError: the messages are malformed, or there are images and the model takes none.
            ImageError: as `render`.
        """
        check_messages(messages)
        with self._loading:
            images = self._load_images(messages)
            for image in images:
                if self._images is not None:  # the processor remembers what it makes of it
                    self._images.processor.expand(image.image, self._images.settings, name=image.place)
        return replace_images_by_files(messages, images)

    @property
    def images(self) -> ImageInputs | None:
        """How images come in and what becomes of them, e.g. the processor to give a trainer; None for a text model."""
        return self._images

    @property
    def parser_name(self) -> str:
        """The format that completions are read in."""
        return self._parser.name

    def parse_response(
        self, completion_ids: TokenIds, *, prompt_ids: TokenIds | None = None, tools: Sequence[ToolSchema] = ()
    ) -> ParsedResponse:
        """Read a completion; without `prompt_ids` the template's usual generation prompt is assumed."""
        reader = self.open_response(prompt_ids=prompt_ids, tools=tools)
        reader.feed(completion_ids)
        return reader.finish()

    def open_response(self, *, prompt_ids: TokenIds | None = None, tools: Sequence[ToolSchema] = ()) -> ResponseReader:
        """Read a completion while it is sampled; see `Renderer.open_response`."""
        if prompt_ids is None:
            before = self._generation_prompt
        else:
            tail = prompt_ids[max(len(prompt_ids) - self._num_generation_ids, 0) :]
            before = self._encoder.decode([int(token_id) for token_id in tail])
        return self._parser.open_reader(reasoning_opened=self._parser.opens_reasoning(before), tools=tools)

    def get_stop_token_ids(self) -> tuple[int, ...]:
        """The ids that end a turn: the template's, the tokenizer's end of text, and those given."""
        return self._stop_token_ids

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
        """The ids between a sampled turn and the next completion; see `Renderer.bridge_to_next_turn`."""
        if isinstance(self._bridges, Refusal):
            return self._bridges
        return self._bridges.build(
            int(completion_ids[-1]) if len(completion_ids) else -1,
            new_messages,
            assistant=assistant,
            tools=tools,
            earlier=earlier,
            ends_in_reasoning=lambda: not self.parse_response(completion_ids, prompt_ids=prompt_ids).reasoning_complete,
            images=self._images,
            no_images_because=self._no_images_because,
        )

    def get_turn_end_ids(self) -> frozenset[int]:
        """Every id that the end of an assistant turn may be rendered with; see `RevocableRenderer`."""
        tokens = self._ends.tokens if isinstance(self._ends, TurnEnds) else ()
        return frozenset(i for token in tokens if (i := self._encoder.control.get_id(token)) is not None)

    def certificates(self) -> tuple[CertificateRecord, ...]:
        """What was found, and at what cost, for each kind of turn bridged so far: for audits and logs."""
        return () if isinstance(self._bridges, Refusal) else self._bridges.certificates()

    def revoke_bridge(
        self, new_messages: Sequence[Message], *, assistant: Message, tools: Sequence[ToolSchema] = (), detail: str
    ) -> None:
        """Refuse bridges like the one between these messages from now on; see `RevocableRenderer`."""
        if isinstance(self._bridges, BridgeBuilder):
            self._bridges.revoke(new_messages, assistant=assistant, tools=tools, detail=detail)

    def _render(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], *, add_generation_prompt: bool
    ) -> RenderedPrompt:
        check_conversation(messages)
        check_tools(tools)
        for position, message in enumerate(messages):
            if self._encoder.spells_control(message["role"]):
                raise MessagesError(f"messages[{position}].role must hold no control token, got {message['role']!r}")
        images = self._load_images(messages)
        converted = self._message_format.convert(messages)
        text = self._template.render(converted, tools=tools, add_generation_prompt=add_generation_prompt)
        spans = self._find_spans(text, converted, tools, add_generation_prompt=add_generation_prompt)
        if spans is None:
            self._check_harmless(converted, tools)
        else:
            _check_unknown_roles(messages, spans)
        try:
            encoding = self._encoder.encode(text, spans or [])
        except UnsafeTextError as error:
            raise TemplateError(f"text cannot be encoded without forging a control token: {error}") from None
        try:
            placed = place_images(encoding.token_ids, encoding.message_indices, images, self._images)
        except PlaceholderError as error:
            render = functools.partial(self._template.render, tools=tools, add_generation_prompt=add_generation_prompt)
            where = describe_left_out_images(text, converted, self._placeholder or "", render)
            raise TemplateError(f"{error}{where}. Use a template that takes images where they are") from None
        return RenderedPrompt(token_ids=placed.token_ids, message_indices=placed.message_indices, images=placed.images)

    def _load_images(self, messages: Sequence[Message]) -> list[MessageImage]:
        return load_images(messages, self._images, no_images_because=self._no_images_because)

    def _find_spans(
        self,
        text: str,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[ToolSchema],
        *,
        add_generation_prompt: bool,
    ) -> list[Span] | None:
        """Where text from outside stands in `text`; None if the template treats marked text in another way."""
        may_forge = self._encoder.may_forge
        try:
            marked = self._template.render(
                mark_messages(messages, may_forge),
                tools=mark_suspicious_strings(tools, may_forge),
                add_generation_prompt=add_generation_prompt,
            )
        except TemplateError:
            return None
        return read_marks(marked, text)

    def _check_harmless(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[ToolSchema]) -> None:
        for leaf in find_outside_strings(messages, tools):
            if self._encoder.may_forge(leaf):
                raise TemplateError(
                    "the template cuts or rewrites text of the messages or tools, and one may hold a control token: "
                    f"{leaf[:80]!r}. Give reasoning as reasoning_content and calls as tool_calls, not inside content"
                )

    def _find_stop_token_ids(self, tokenizer: Any, given: Sequence[int]) -> tuple[int, ...]:
        for token_id in given:
            if not 0 <= token_id < len(tokenizer):
                raise InvalidInputError(
                    f"stop_token_ids must lie in the vocabulary [0, {len(tokenizer)}), got {token_id}"
                )
        ids = set(given)
        if tokenizer.eos_token_id is not None:
            ids.add(tokenizer.eos_token_id)
        if isinstance(self._ends, TurnEnds):
            ids |= {i for token in self._ends.stops if (i := self._encoder.control.get_id(token)) is not None}
        return tuple(sorted(ids))


def _check_unknown_roles(messages: Sequence[Message], spans: Sequence[Span]) -> None:
    """A template may write nothing of a message whose role it does not know, and say nothing."""
    shown = {span.index for span in spans}
    for position, message in enumerate(messages):
        if message["role"] not in KNOWN_ROLES and position not in shown and get_text(message.get("content")).strip():
            raise MessagesError(
                f"messages[{position}].role must be one that the template writes, got {message['role']!r}: it leaves "
                f"the message out. Usual ones are {sorted(KNOWN_ROLES)}"
            )


def _ends_or_refusal(probe: TurnEndProbe) -> TurnEnds | Refusal:
    try:
        return probe.find_turn_ends()
    except BridgeRefusedError as error:
        return error.refusal
