"""A compiled chat template, with limits on its size and on the size of what it writes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from functools import lru_cache
from types import CodeType
from typing import Any

import jinja2
from jinja2 import meta

from unbroken.errors import InvalidInputError, TemplateError
from unbroken.messages import ToolSchema, iterate_strings
from unbroken.rendering.jinja.environment import TemplateEnvironment

_NUM_PIECES = 256
"""How many pieces of a rendering are joined before its length is compared with the limit."""
_MAX_ROLES_IN_ERROR = 8
_MAX_ERROR_CHARACTERS = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateLimits:
    """Limits on a chat template, far above what a conversation of a million tokens needs.

    They bound neither time nor memory: a template belongs to the operator's own model. `unbroken audit` runs other
    people's templates in a process of its own.

    Raises:
        InvalidInputError: a limit is not positive.
    """

    max_source_characters: int = 100_000
    max_output_characters: int = 16_000_000
    """In one rendering."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                raise InvalidInputError(
                    f"TemplateLimits.{field.name} must be positive, got {getattr(self, field.name)!r}"
                )


class TemplateLimitError(TemplateError):
    """A rendering is larger than `TemplateLimits` or the memory allow."""


_NUM_SOURCES = 32
"""Remembered: a server has a template for each set of options that its clients ask for, all of one source."""


@lru_cache(maxsize=_NUM_SOURCES)
def _compile(source: str) -> CodeType:
    """The code of a template, which is the same for all variables and times."""
    environment = TemplateEnvironment(now=datetime.min)
    return environment.compile(environment.parse(source))


class ChatTemplate:
    """A compiled chat template with the variables that every rendering gets (special tokens, template arguments)."""

    def __init__(
        self,
        source: str,
        variables: Mapping[str, Any],
        *,
        limits: TemplateLimits | None = None,
        now: datetime | None = None,
    ) -> None:
        """Compile the template, and render one message to see that it stays within the limits.

        `variables` are for every rendering. `strftime_now` formats `now`, by default the time of this call.

        Raises:
            TemplateError: it does not compile, or goes over a limit.
        """
        self._limits = limits or TemplateLimits()
        self._variables = dict(variables)
        if len(source) > self._limits.max_source_characters:
            raise TemplateError(
                f"the chat template must have at most {self._limits.max_source_characters} characters "
                f"(TemplateLimits.max_source_characters), got {len(source)}: is this a template?"
            )
        self.source = source
        self._environment = TemplateEnvironment(now=now or datetime.now())
        try:
            code = _compile(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(
                f"the chat template does not compile: line {error.lineno}: {error.message}. "
                "Correct it, or pass another one as chat_template="
            ) from None
        # Parser and compiler fail on deeply nested or huge expressions in many ways, most often with RecursionError.
        except Exception as error:
            raise TemplateError(
                f"the chat template does not compile: {type(error).__name__}: {error}. "
                "Nest its expressions and blocks less, or pass another one as chat_template="
            ) from None
        self._program = _make_program(self._environment, code)
        self._check_one_message()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[ToolSchema] = (),
        add_generation_prompt: bool,
    ) -> str:
        """Render a conversation.

        Raises:
            TemplateError: the template refuses the messages, fails on them, goes over a limit, or writes something that
                is not Unicode text.
        """
        variables = {
            "messages": messages,
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **self._variables,
        }
        try:
            text = self._run(variables)
        except MemoryError:
            raise self._limit_error("it needs more memory than there is", messages, tools) from None
        # A template may raise anything, as its answer to these messages.
        except Exception as error:
            raise TemplateError(_describe_refusal(error, messages)) from None
        if text is None:
            limit = f"{self._limits.max_output_characters} characters (TemplateLimits.max_output_characters)"
            raise self._limit_error(f"it writes more than {limit}", messages, tools)
        return text

    def find_variables(self) -> frozenset[str]:
        """Find the names of the variables that the template reads and does not set itself."""
        return frozenset(meta.find_undeclared_variables(self._environment.parse(self.source)))

    def _run(self, variables: dict[str, Any]) -> str | None:
        """The rendering; None as soon as it is longer than the limit."""
        max_length = self._limits.max_output_characters
        stream = self._program.root_render_func(self._program.new_context(variables))
        texts: list[str] = []
        length = 0
        while pieces := list(itertools.islice(stream, _NUM_PIECES)):
            texts.append("".join(pieces))
            length += len(texts[-1])
            if length > max_length:
                return None
        text = "".join(texts)
        if not text.isascii():
            text.encode()
        return text

    def _limit_error(
        self, problem: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[ToolSchema]
    ) -> TemplateLimitError:
        length = sum(map(len, iterate_strings([messages, tools])))
        return TemplateLimitError(
            f"the chat template goes over a limit on messages and tools of {length} characters: {problem}. "
            "Shorten them, raise the limit, or pass another template as chat_template="
        )

    def _check_one_message(self) -> None:
        """Find a template that goes over a limit with any messages. It may refuse one message in any other way."""
        try:
            self.render([{"role": "user", "content": "hi"}], add_generation_prompt=True)
        except TemplateLimitError:
            raise
        except TemplateError:
            pass


def _make_program(environment: TemplateEnvironment, code: CodeType) -> jinja2.Template:
    # Each rendering copies the globals, which a chain of maps does slowly.
    return jinja2.Template.from_code(environment, code, dict(environment.make_globals(None)))


def _describe_refusal(error: Exception, messages: Sequence[Mapping[str, Any]]) -> str:
    roles = ", ".join(str(message.get("role")) for message in messages[:_MAX_ROLES_IN_ERROR])
    num_more = len(messages) - _MAX_ROLES_IN_ERROR
    more = f", and {num_more} more" if num_more > 0 else ""
    kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
    return (
        f"the chat template refuses these messages (roles: {roles}{more}): {kind}{str(error)[:_MAX_ERROR_CHARACTERS]}. "
        "Give it the roles in an order it knows, or pass another template as chat_template="
    )
