"""The Jinja environment that chat templates run in.

It is set up like the one in transformers (`transformers.utils.chat_template_utils`): Jinja's immutable sandbox with the
same tags, filters and functions, so that templates write the same text. Three things differ: an attribute that leads
out of the sandbox is an error instead of an empty text, `strftime_now` always gives the same time, and `lipsum`, which
writes random text, is missing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from types import BuiltinMethodType, MethodType
from typing import Any, ClassVar, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, modifies_known_mutable, safe_range
from jinja2.utils import Namespace, missing

_KEYS_THAT_ARE_ATTRIBUTES = frozenset(dir(dict))
_SAFE_ATTRIBUTES: dict[type, frozenset[str]] = {
    **{
        kind: frozenset(name for name in dir(kind) if name[0] != "_" and not modifies_known_mutable(kind(), name))
        for kind in (dict, list)
    },
    str: frozenset(name for name in dir(str) if name[0] != "_") - {"format", "format_map"},
    LoopContext: frozenset({"first", "last", "index", "index0", "length", "revindex", "revindex0", "depth", "depth0"}),
}
"""What Jinja's sandbox gives out as it is. It wraps `format`, with which a text could look into any object."""
_NAMESPACE_VALUES = "_Namespace__attrs"
_METHOD_TYPES = (MethodType, BuiltinMethodType)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles and runs chat templates. `strftime_now` formats `now`, so that no text changes at midnight."""

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
        if not is_usual and not _is_generation_tag(called):
            return super().call(context, called, *args, **kwargs)
        if kwargs:
            kwargs.pop("_loop_vars", None)
            kwargs.pop("_block_vars", None)
        try:
            if kind is not Macro:
                return called(*args, **kwargs)
            if kwargs or context.eval_ctx.autoescape or called.caller or called.catch_kwargs or called.catch_varargs:
                return called(context.eval_ctx, *args, **kwargs)
            num_missing = len(called.arguments) - len(args)  # If there are too many, it raises the same error.
            return called._func(*args, *(missing,) * num_missing) if num_missing >= 0 else called(*args)
        except StopIteration:
            return self.undefined("value was undefined because a callable raised a StopIteration exception")

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        """Refuse an attribute that leads out of the sandbox or changes a value: always raises `SecurityError`."""
        raise SecurityError(f"attribute {attribute!r} of a {type(obj).__name__} must not be used")


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


def _is_generation_tag(called: Any) -> bool:
    return type(called) is MethodType and type(called.__self__) is _GenerationTag


def _make_clock(now: datetime) -> Callable[[str], str]:
    def strftime_now(format: str) -> str:  # noqa: A002
        return now.strftime(format)

    return strftime_now


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Write JSON as transformers does: without HTML's escapes, and with the options of `json.dumps`."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
