"""A compiled chat template in a sandbox, with limits on its size and on the size of what it writes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from functools import lru_cache
from types import BuiltinMethodType, CodeType, MethodType
from typing import Any, ClassVar, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.compiler import CodeGenerator, Frame, optimizeconst
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, modifies_known_mutable, safe_range
from jinja2.utils import Namespace, missing

from unbroken.errors import InvalidInputError, TemplateError
from unbroken.messages import ToolSchema, iterate_strings

_NUM_PIECES = 256
"""How many pieces of a rendering are joined before its length is compared with the limit."""
_MAX_ROLES_IN_ERROR = 8
_MAX_ERROR_CHARACTERS = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateLimits:
    """Limits on a chat template, far above what a conversation of a million tokens needs.

    They bound neither time nor memory: a template belongs to the operator's own model. `unbroken audit` runs other
    people's templates in a separate process.

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
                f"the chat template does not compile: line {error.lineno}: {str(error.message).rstrip('.')}. "
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
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[ToolSchema] = (), add_generation_prompt: bool
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


_KEYS_THAT_ARE_ATTRIBUTES = frozenset(dir(dict))
_SAFE_ATTRIBUTES: dict[type, frozenset[str]] = {
    **{
        kind: frozenset(name for name in dir(kind) if name[0] != "_" and not modifies_known_mutable(kind(), name))
        for kind in (dict, list)
    },
    str: frozenset(name for name in dir(str) if name[0] != "_") - {"format", "format_map"},
    LoopContext: frozenset({"first", "last", "index", "index0", "length", "revindex", "revindex0", "depth", "depth0"})
    | {"previtem", "nextitem"},
}
"""What Jinja's sandbox gives out as it is. It wraps `format`, with which a text could look into any object."""
_NAMESPACE_VALUES = "_Namespace__attrs"
_METHOD_TYPES = (MethodType, BuiltinMethodType)


class _CodeGenerator(CodeGenerator):
    """Writes code that reads the keys of dictionaries itself: most of what a template does with messages is that."""

    @optimizeconst
    def visit_Getattr(self, node: nodes.Getattr, frame: Frame) -> None:  # noqa: N802
        """Write `message.role` as `message["role"]` for a dictionary that has it, else as Jinja does."""
        if node.attr in _KEYS_THAT_ARE_ATTRIBUTES:
            super().visit_Getattr(node, frame)
            return
        self.write(f"(_d[{node.attr!r}] if type(_d := ")
        self.visit(node.node, frame)
        self.write(f") is dict and {node.attr!r} in _d else environment.getattr(_d, {node.attr!r}))")


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles and runs chat templates. `strftime_now` formats `now`, so that no text changes at midnight.

    It is set up like the one in transformers (`transformers.utils.chat_template_utils`): Jinja's immutable sandbox with
    the same tags, filters and functions, so that templates write the same text. Three things differ: an attribute that
    leads out of the sandbox is an error instead of an empty text, `strftime_now` always gives the same time, and
    `lipsum`, which writes random text, is missing.
    """

    code_generator_class = _CodeGenerator

    def __init__(self, *, now: datetime) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, LoopControlExtension])
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _make_clock(now)
        del self.globals["lipsum"]

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Look an attribute or key up as Jinja's sandbox does; its checks for usual types are tables here.

        The checks take half the time of a rendering.
        """
        kind = type(obj)
        if kind is dict and attribute not in _KEYS_THAT_ARE_ATTRIBUTES:
            try:
                return obj[attribute]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)
        if kind is Namespace and attribute[0] != "_":
            try:
                value = object.__getattribute__(obj, _NAMESPACE_VALUES)[attribute]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)
            if type(value) not in _METHOD_TYPES:
                return value
        elif attribute in _SAFE_ATTRIBUTES.get(kind, ()):
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Look an item up as Jinja's sandbox does; a missing key of a dictionary is found soon."""
        try:
            return obj[argument]
        except KeyError:
            if type(obj) is dict and type(argument) is str and argument not in _KEYS_THAT_ARE_ATTRIBUTES:
                return self.undefined(obj=obj, name=argument)
        except (TypeError, LookupError):
            pass
        return super().getitem(obj, argument)

    def call(self, context: Context, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call as Jinja's sandbox does, without its checks for macros, namespaces and methods of built-in types."""
        kind = type(called)
        is_usual = kind is Macro or kind is BuiltinMethodType or called is Namespace or called is safe_range
        is_generation_tag = type(called) is MethodType and type(called.__self__) is _GenerationTag
        if not is_usual and not is_generation_tag:
            return super().call(context, called, *args, **kwargs)
        if kwargs:  # Jinja's compiled loops and blocks pass these two; none of the usual ones takes them
            kwargs.pop("_loop_vars", None)
            kwargs.pop("_block_vars", None)
        try:
            return _call_macro(called, context, args, kwargs) if kind is Macro else called(*args, **kwargs)
        except StopIteration:
            return self.undefined("value was undefined because a callable raised a StopIteration exception")

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        """Refuse an attribute that leads out of the sandbox or changes a value: always raises `SecurityError`."""
        raise SecurityError(f"attribute {attribute!r} of a {type(obj).__name__} must not be used")


def _call_macro(macro: Macro, context: Context, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a macro; one with nothing but positional arguments without the lookups of Jinja's own call."""
    takes_more = macro.caller or macro.catch_kwargs or macro.catch_varargs
    if kwargs or context.eval_ctx.autoescape or takes_more:
        return macro(context.eval_ctx, *args, **kwargs)
    num_missing = len(macro.arguments) - len(args)
    if num_missing < 0:
        return macro(*args)  # raises Jinja's own error
    return macro._func(*args, *(missing,) * num_missing)


class _GenerationTag(Extension):
    """`{% generation %}..{% endgeneration %}` marks assistant text for training masks; here it is just the text."""

    tags: ClassVar[set[str]] = {"generation"}  # type: ignore[misc]

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_write_body"), [], [], body).set_lineno(line)

    def _write_body(self, caller: Macro) -> str:
        text: str = caller()
        return text


def _make_clock(now: datetime) -> Callable[[str], str]:
    def strftime_now(format: str) -> str:  # noqa: A002
        return now.strftime(format)

    return strftime_now


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


_PLAIN_JSON = json.JSONEncoder(ensure_ascii=False)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Write JSON as transformers does: without HTML's escapes, and with the options of `json.dumps`."""
    if not (ensure_ascii or sort_keys) and indent is None and separators is None:
        return _PLAIN_JSON.encode(value)  # `json.dumps` makes an encoder for each call, which takes longer than a call
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
