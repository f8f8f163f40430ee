"""Makes a turn call tools: the constraint on what may be sampled, for one renderer."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

from unbroken.errors import InvalidInputError
from unbroken.messages import ToolSchema
from unbroken.rendering.base import ToolCallStatus
from unbroken.rendering.encoding.safe_encoder import SafeEncoder
from unbroken.rendering.jinja.chat_template import ChatTemplate
from unbroken.rendering.message_format import MessageFormat
from unbroken.rendering.parsing.base import ResponseParser
from unbroken.rendering.parsing.call_grammar import PROBE_CALLS, CallGrammar, describe_reasoning, find_call_grammar
from unbroken.rendering.parsing.parser import FormatParser
from unbroken.rendering.reasoning import ReasoningDelimiters

_NAME = re.compile(r"[A-Za-z0-9_.\-]+")


class CallConstraint:
    """Derives the grammar of calls at its first use, and writes constraints for tools."""

    def __init__(
        self,
        *,
        template: ChatTemplate,
        message_format: MessageFormat,
        parser: ResponseParser,
        encoder: SafeEncoder,
        reasoning: ReasoningDelimiters | None,
        turn_ends: Collection[str],
        stop_token_ids: Collection[int],
    ) -> None:
        self._template = template
        self._message_format = message_format
        self._parser = parser
        self._encoder = encoder
        self._reasoning = reasoning
        control = encoder.control
        self._turn_ends = {*turn_ends, *(text for i in stop_token_ids if (text := control.get_text(i)))}
        self._stop_token_ids = frozenset(stop_token_ids)
        self._grammar: CallGrammar | None = None

    def write(self, functions: Sequence[ToolSchema], *, prompt_end: str, several: bool) -> str:
        """Write the constraint; see `ConstrainsCalls.constrain_calls`."""
        for tool in functions:
            if not _NAME.fullmatch(tool["function"]["name"]):
                raise InvalidInputError(
                    f"a function that must be called needs a name of letters, digits and _.-, got "
                    f"{tool['function']['name']!r}"
                )
        if self._grammar is None:
            self._grammar = self._find_grammar()
        before = self._describe_reasoning(prompt_end)
        return self._grammar.to_structural_tag(functions, self._encoder.control, several=several, before=before)

    def _find_grammar(self) -> CallGrammar:
        control = self._encoder.control
        grammar = find_call_grammar(self._template, self._message_format, control, self._turn_ends)
        if grammar is None or not self._is_read(grammar):
            raise InvalidInputError(
                f"calls cannot be required in the format {self._parser.name!r} of this chat template: no grammar is "
                "known for its arguments. Let the model decide (tool_choice 'auto')"
            )
        return grammar

    def _is_read(self, grammar: CallGrammar) -> bool:
        """Whether the parser reads what the grammar describes as these calls, and nothing else."""
        calls: list[tuple[str, Any]] = list(PROBE_CALLS if grammar.joint is not None else PROBE_CALLS[:1])
        parsed = self._parser.parse(self._encoder.encode_plain(grammar.write(calls)))
        read = [(call.name, call.arguments) for call in parsed.tool_calls if call.status is ToolCallStatus.OK]
        return read == calls and len(parsed.tool_calls) == len(calls) and not parsed.content and not parsed.reasoning

    def _describe_reasoning(self, prompt_end: str) -> Sequence[Any]:
        """What comes before the calls: nothing if the prompt has the reasoning already, e.g. an empty one."""
        is_open = self._parser.opens_reasoning(prompt_end)
        opening, closing = self._find_reasoning_delimiters()
        if closing and prompt_end.rstrip().endswith(closing):
            return ()
        opening_id, closing_id = self._encoder.control.get_id(opening), self._encoder.control.get_id(closing)
        if opening_id is not None and closing_id is not None:
            return describe_reasoning(opening_id, closing_id, is_open=is_open, stop_token_ids=self._stop_token_ids)
        if is_open:
            raise InvalidInputError("calls cannot be required inside reasoning that no control token ends")
        return ()

    def _find_reasoning_delimiters(self) -> tuple[str, str]:
        """Those of the template, or those that the parser reads; empty if there are none."""
        if self._reasoning is not None:
            return self._reasoning.opening, self._reasoning.closing
        region = self._parser.call_format.reasoning if isinstance(self._parser, FormatParser) else None
        return ("", "") if region is None or not region.closings else (region.opening, region.closings[0])
