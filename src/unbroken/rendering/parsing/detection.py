"""Detects the call format of a chat template's models.

The evidence is what the template renders: turns with calls, which a format must read back (`read_back`). The
template's source, which may describe how to call, counts only if it renders no calls. A template that shows no known
format is read without calls, except ChatML that renders no calls: its models are asked to write the Hermes format.
"""

from __future__ import annotations

from unbroken.rendering.jinja.chat_template import ChatTemplate
from unbroken.rendering.message_format import MessageFormat
from unbroken.rendering.parsing.call_format import CallFormat
from unbroken.rendering.parsing.formats.json_calls.hermes import HERMES
from unbroken.rendering.parsing.formats.plain import PLAIN
from unbroken.rendering.parsing.read_back import ReadBackProbe
from unbroken.rendering.parsing.reading.id_stream import CompletionTokens
from unbroken.rendering.parsing.registry import FORMATS
from unbroken.rendering.reasoning import ReasoningDelimiters

_CHATML = "<|im_start|>"


class FormatDetector:
    """Finds the format of one template, whose text is `source`."""

    def __init__(
        self,
        template: ChatTemplate,
        message_format: MessageFormat,
        source: str,
        *,
        tokens: CompletionTokens,
        reasoning: ReasoningDelimiters | None,
    ) -> None:
        self._source = source
        self._probe = ReadBackProbe(template, message_format, tokens, reasoning)

    def detect(self) -> CallFormat:
        """Find the format that the template shows, or the usual one of templates that show none."""
        found = self.find_shown()
        if found is not None:
            return found
        return HERMES if _CHATML in self._source and not self._probe.renders_calls else PLAIN

    def find_shown(self) -> CallFormat | None:
        """Find the format that the template shows; None if it shows none."""
        if self._probe.renders_calls:
            return self._probe.find_best(FORMATS)
        described = (known for known in FORMATS if known.hints and all(hint in self._source for hint in known.hints))
        return next(described, None)
