"""Python functions as tools that a model can call.

With `@tool` above `async def lookup(key: str) -> dict[str, str]` and a docstring that describes `key`,

    await lookup.call({"key": "raka"})    # ToolOutcome(status=ok, content='{"value": "v"}')
    await lookup.call({"kee": "raka"})    # ToolOutcome(status=invalid_arguments, content="Error: lookup: missing ...")
    await lookup("raka")                  # {"value": "v"}: the function itself

Every call ends with an outcome that can be sent to the model, even after wrong arguments or an exception in the tool.
Only a cancellation of the calling task and the user's interrupt are raised.
"""

from __future__ import annotations

import asyncio
import builtins
import dataclasses
import functools
import inspect
import json
import logging
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Union, overload

from unbroken.errors import ToolDefinitionError
from unbroken.messages import IMAGE_TYPES, ContentPart, Message, ToolSchema, copy_containers, get_image_source
from unbroken.rollout.failures import format_error, must_propagate
from unbroken.rollout.limits import is_duration
from unbroken.threads import run_in_daemon_thread
from unbroken.types import EncodedImage

_logger = logging.getLogger(__name__)
_JSON_TYPES: dict[Any, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    dict: "object",
    type(None): "null",
}
_SUPPORTED = "str, int, float, bool, None, Any, list[...], dict[str, ...], Literal[...] and unions of them"


class ToolStatus(StrEnum):
    """How a tool call ended. The names other than OK are metrics and must stay stable."""

    OK = "ok"
    ERROR = "error"
    """The tool raised, or returned something that can be written neither as JSON nor as text."""
    TIMEOUT = "timeout"
    UNKNOWN_TOOL = "unknown_tool"
    INVALID_ARGUMENTS = "invalid_arguments"
    """The arguments do not match the signature; the tool was not called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOutcome:
    """The answer to a tool call."""

    status: ToolStatus
    content: str | list[ContentPart]
    """For the model: the result as text, JSON or parts, or a description of the error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that a model can call, with its description."""

    function: Callable[..., Any]
    schema: ToolSchema
    timeout_s: float
    checks_arguments: bool = True
    """Whether arguments that do not fit the schema are refused here; False for a function that checks them itself."""
    _warned_of: set[str] = field(default_factory=set, init=False, repr=False, compare=False)
    """Types of results that could not be written: a warning of each is enough."""

    @property
    def name(self) -> str:
        """The name in the schema."""
        return self.schema["function"]["name"]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function itself, as if it had no decorator: for its tests, and from other functions."""
        return self.function(*args, **kwargs)

    async def call(self, arguments: Mapping[str, Any]) -> ToolOutcome:
        """Check the arguments against the signature and call the function, for at most `timeout_s` seconds.

        The function gets a copy of the arguments. A `ToolOutcome` that it returns is the answer as it is. An async
        function runs in this event loop, must not block it, and is cancelled at the timeout. A plain function runs in a
        thread, and continues there after a timeout.
        """
        clock = asyncio.timeout(self.timeout_s)
        try:
            problem = find_problem(self.schema, arguments) if self.checks_arguments else None
            if problem is not None:
                return ToolOutcome(status=ToolStatus.INVALID_ARGUMENTS, content=f"Error: {self.name}: {problem}")
            async with clock:
                return await self._run(copy_containers(dict(arguments)))
        # Any exception of the tool is an answer, even SystemExit (`exit()` in a code interpreter).
        except BaseException as error:
            if must_propagate(error):
                raise
            if isinstance(error, TimeoutError) and clock.expired():
                content = f"Error: {self.name} did not answer within {self.timeout_s:g} s"
                return ToolOutcome(status=ToolStatus.TIMEOUT, content=content)
            content = f"Error: {self.name} failed with {format_error(error)}"
            return ToolOutcome(status=ToolStatus.ERROR, content=content)

    async def _run(self, arguments: Mapping[str, Any]) -> ToolOutcome:
        """Call the function and convert its result, in a thread unless both are quick."""
        if not inspect.iscoroutinefunction(self.function):
            return await run_in_daemon_thread(lambda: self._to_outcome(self.function(**arguments)))
        result = await self.function(**arguments)
        if isinstance(result, (str, ToolOutcome)):
            return self._to_outcome(result)
        return await run_in_daemon_thread(functools.partial(self._to_outcome, result))

    def _to_outcome(self, result: Any) -> ToolOutcome:
        if isinstance(result, ToolOutcome):
            return result
        try:
            return ToolOutcome(status=ToolStatus.OK, content=to_content(result))
        except Exception as error:
            # The tool did its work, and only the model saw the error: training went on with a tool that never answers.
            kind = type(result).__name__
            if kind not in self._warned_of:
                self._warned_of.add(kind)
                _logger.warning(
                    "tool %s: its result of type %s cannot be written for the model, which gets an error in its place: "
                    "%s. Return text or JSON",
                    *(self.name, kind, format_error(error)),
                )
            raise


@overload
def tool(function: Callable[..., Any], *, timeout_s: float = 30.0) -> Tool: ...
@overload
def tool(function: None = None, *, timeout_s: float = 30.0) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(
    function: Callable[..., Any] | None = None, *, timeout_s: float = 30.0
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Make a tool from a function: `@tool`, `@tool(timeout_s=5)` or `tool(function)`.

    Each parameter needs a type annotation and a description in a Google-style docstring. A returned string is the
    answer; pictures and lists with pictures become parts (`to_content`); anything else becomes JSON.

    Raises:
        ToolDefinitionError: the function cannot be described, or `timeout_s` is not a positive number.
    """
    if not is_duration(timeout_s):
        raise ToolDefinitionError(f"timeout_s must be a finite number of seconds > 0, got {timeout_s!r}")
    if function is None:
        return functools.partial(tool, timeout_s=timeout_s)
    return Tool(function=function, schema=describe_function(function), timeout_s=timeout_s)


def to_content(result: Any) -> str | list[ContentPart]:
    """Convert a tool's result to message content.

        "42"                                       text, as it is
        {"value": 42}, ["a", "b"], None            JSON
        np.float32(1.5), {"mean": nan}             1.5 and {"mean": NaN}: arrays and tensors as their lists
        b"42", Decimal("4.2"), a date, a table     text, as it is or as `str` writes it
        picture                                    [{"type": "image", "image": picture}]
        ["The chart:", picture]                    [{"type": "text", "text": "The chart:"}, {"type": "image", ...}]
        [{"type": "text", ..}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,.."}}]    the parts

    A picture is a PIL image, an `EncodedImage`, or a part that contains one, a file's bytes or a data URL. Text that
    only names a file or a URL stays text: text from outside must not cause files to be read.

    Raises:
        TypeError, ValueError: it is neither JSON, images nor text, or has characters that no tokenizer can encode.
    """
    if _is_picture(result):
        return [{"type": "image", "image": result}]
    if isinstance(result, (list, tuple)) and all(map(_is_part, result)) and any(map(_is_image, result)):
        return [_to_part(item) for item in result]
    text = result if isinstance(result, str) else _write(result)
    text.encode()
    return text


def _write(result: Any) -> str:
    """Write a result as JSON where that is possible, and as text otherwise."""
    written = _to_json(result)
    return written if isinstance(written, str) else json.dumps(written, ensure_ascii=False)


def _to_json(value: Any) -> Any:
    """Make a value of the types that `json` writes, with text for the rest; a `TypeError` if it is no text either."""
    if value is None or isinstance(value, (str, bool, int)) or type(value) is float:
        return value
    if isinstance(value, Mapping):
        return {_to_key(key): _to_json(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_to_json(inner) for inner in value]
    if isinstance(value, (bytes, bytearray)):
        return value.decode()  # of what is not UTF-8, such as a picture's file, a model could read nothing
    if not _is_picture(value) and not isinstance(value, type):
        return _object_to_json(value)
    raise _refuse_type(value)


def _object_to_json(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {each.name: _to_json(getattr(value, each.name)) for each in dataclasses.fields(value)}
    convert = getattr(value, "tolist", None)  # of arrays, tensors and their scalars
    if callable(convert) and type(plain := convert()) is not type(value):  # a longdouble stays one
        return _to_json(plain)
    text = str(value)
    # "<object object at 0x7f..>" tells a model nothing, and is another text in each run.
    if re.search(r" at 0x[0-9A-Fa-f]+", text):
        raise _refuse_type(value)
    return text


def _refuse_type(value: Any) -> TypeError:
    return TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _to_key(key: Any) -> Any:
    return key if key is None or isinstance(key, (str, bool, int, float)) else str(_to_json(key))


def _is_part(item: Any) -> bool:
    is_text = isinstance(item, Mapping) and item.get("type") == "text" and isinstance(item.get("text"), str)
    return isinstance(item, str) or is_text or _is_image(item)


def _is_image(item: Any) -> bool:
    if _is_picture(item):
        return True
    if not isinstance(item, Mapping) or item.get("type") not in IMAGE_TYPES:
        return False
    source = get_image_source(item)
    is_file = isinstance(source, (bytes, bytearray)) or (isinstance(source, str) and source.startswith("data:image/"))
    return is_file or _is_picture(source)


def _is_picture(value: Any) -> bool:
    return isinstance(value, EncodedImage) or (hasattr(value, "save") and hasattr(value, "getbands"))


def _to_part(item: Any) -> ContentPart:
    if _is_picture(item):
        return {"type": "image", "image": item}
    text = item if isinstance(item, str) else item.get("text", "") if item["type"] == "text" else None
    if text is None:
        return {"type": "image", "image": get_image_source(item)}
    text.encode()
    return {"type": "text", "text": text}


def cut_tool_result(message: Message, max_chars: int | None) -> bool:
    """Cut the text of a tool message to `max_chars` characters, in place; returns whether that was needed.

    The message must be well-formed, and `max_chars` None cuts nothing. Text parts are cut one after the other, until
    the rest of them has no room; images stay. Other messages stay as they are.
    """
    if max_chars is None or message["role"] != "tool":
        return False
    content = message["content"]
    if isinstance(content, str):
        message["content"] = _cut_text(content, max_chars)
        return len(content) > max_chars
    num_left = max_chars
    is_cut = False
    for part in content or ():
        if part["type"] == "text":
            num_chars = len(part["text"])
            part["text"] = _cut_text(part["text"], num_left)
            is_cut |= num_chars > num_left
            num_left = max(num_left - num_chars, 0)
    return is_cut


def _cut_text(text: str, max_chars: int) -> str:
    r"""Keep the first and the last characters of a text, `max_chars` in all, with a mark between them if any is cut.

    _cut_text("abcdefghij", 4)    # "ab\n[... 6 of 10 characters were cut ...]\nij"
    """
    num_cut = len(text) - max_chars
    if num_cut <= 0:
        return text
    num_first = max_chars - max_chars // 2
    mark = f"\n[... {num_cut} of {len(text)} characters were cut ...]\n"
    return f"{text[:num_first]}{mark}{text[num_first + num_cut :]}"


def describe_function(function: Callable[..., Any]) -> ToolSchema:
    """Describe a function that has typed parameters and a Google-style docstring as the JSON schema of a tool.

    The schema has the form of `transformers.utils.get_json_schema`, which chat templates expect. That function itself
    loads torch, and describes every unknown class as an object instead of refusing it.

    Raises:
        ToolDefinitionError: the function has no docstring, a parameter without a type or a description, a type that
            JSON cannot describe, or parameters that cannot be passed by name (`*args`, `**kwargs`, positional-only).
    """
    if not (inspect.isroutine(function) and function.__name__.isidentifier()):
        raise ToolDefinitionError(f"a tool must be a function with a name, got {function!r}: define it with def")
    name = function.__name__
    description, documented = _read_docstring(name, inspect.getdoc(function) or "")
    signature, hints = _read_signature(name, function)
    properties: dict[str, Any] = {}
    required: list[str] = []
    for parameter in signature.parameters.values():
        _check_parameter(name, parameter, hints, documented)
        schema = _describe_type(hints[parameter.name], where=f"tool {name}, parameter {parameter.name}")
        properties[parameter.name] = schema | {"description": documented[parameter.name]}
        if parameter.default is inspect.Parameter.empty:
            required.append(parameter.name)
    unknown = [p for p in documented if p not in properties]
    if unknown:
        raise ToolDefinitionError(f"tool {name}: the docstring's Args describe {unknown}, which are not parameters")
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def find_problem(schema: ToolSchema, arguments: Mapping[str, Any]) -> str | None:
    """Describe for the model the first argument that does not fit the schema; None if all fit."""
    parameters = schema["function"]["parameters"]
    properties: dict[str, Any] = parameters["properties"]
    missing = [p for p in parameters.get("required", ()) if p not in arguments]
    if missing:
        return f"missing argument {missing[0]!r}"
    for name, value in arguments.items():
        if name not in properties:
            return f"unexpected argument {name!r}; the arguments are {list(properties)}"
        if not _fits(value, properties[name]):
            return f"argument {name!r} must be {_format_schema(properties[name])}, got {value!r}"
    return None


def _read_signature(name: str, function: Callable[..., Any]) -> tuple[inspect.Signature, dict[str, Any]]:
    try:
        return inspect.signature(function), typing.get_type_hints(function)
    except Exception as error:  # annotations are user code: `np.nothing` is an AttributeError
        raise ToolDefinitionError(f"tool {name}: the signature cannot be read: {error}") from error


def _check_parameter(
    name: str, parameter: inspect.Parameter, hints: Mapping[str, Any], documented: Mapping[str, str]
) -> None:
    where = f"tool {name}, parameter {parameter.name}"
    if parameter.kind not in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY):
        raise ToolDefinitionError(f"{where}: must be passed by name, got {parameter.kind.description}")
    if parameter.name not in hints:
        raise ToolDefinitionError(f"{where}: needs a type annotation")
    if parameter.name not in documented:
        raise ToolDefinitionError(f"{where}: needs a line `{parameter.name}: ...` under Args: in the docstring")


def _read_docstring(name: str, docstring: str) -> tuple[str, dict[str, str]]:
    """Read the description before the first section, and each parameter's in the Args section."""
    sections = re.split(r"^(Args|Arguments|Returns|Yields|Raises|Examples?|Notes?):[ \t]*$", docstring, flags=re.M)
    description = sections[0].strip()
    if not description:
        raise ToolDefinitionError(f"tool {name}: needs a docstring that begins with what the tool does")
    bodies = dict(zip(sections[1::2], sections[2::2], strict=True))
    body = inspect.cleandoc(_take_indented_lines(bodies.get("Args", bodies.get("Arguments", ""))))
    # An entry starts at the margin; its continuation lines are indented.
    entries = re.findall(r"^(\w+)(?:[ \t]*\([^)\n]*\))?:[ \t]*(.*(?:\n[ \t]+.*|\n(?=\n))*)", body, flags=re.M)
    return description, {parameter: " ".join(text.split()) for parameter, text in entries}


def _take_indented_lines(text: str) -> str:
    match = re.match(r"(?:[ \t]*\n|[ \t]+.*\n?)*", text)
    return match.group() if match else ""


def _describe_type(hint: Any, *, where: str) -> dict[str, Any]:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return {}
    if origin in (Union, types.UnionType):
        return _describe_union(args, where=where)
    match origin, args:
        case None, _ if isinstance(hint, type) and hint in _JSON_TYPES:
            return {"type": _JSON_TYPES[hint]}
        case builtins.list, (item,):
            return {"type": "array", "items": _describe_type(item, where=where)}
        case builtins.dict, (builtins.str, item):
            return {"type": "object", "additionalProperties": _describe_type(item, where=where)}
        case typing.Literal, _ if all(type(arg) in _JSON_TYPES for arg in args):
            return {"type": _one_or_list([_JSON_TYPES[type(arg)] for arg in args]), "enum": list(args)}
    raise ToolDefinitionError(f"{where}: type {hint!r} cannot be described in JSON; use {_SUPPORTED}")


def _describe_union(args: tuple[Any, ...], *, where: str) -> dict[str, Any]:
    options = [_describe_type(arg, where=where) for arg in args if arg is not type(None)]
    if len(options) == 1:
        schema = options[0]
    elif all(option.keys() == {"type"} for option in options):
        schema = {"type": _one_or_list(sorted(option["type"] for option in options))}
    else:
        schema = {"anyOf": options}
    return schema | {"nullable": True} if type(None) in args else schema


def _one_or_list(names: list[str]) -> str | list[str]:
    distinct = list(dict.fromkeys(names))
    return distinct[0] if len(distinct) == 1 else distinct


def _fits(value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether a value fits a schema of `_describe_type`."""
    if value is None and schema.get("nullable"):
        return True
    if "anyOf" in schema:
        return any(_fits(value, option) for option in schema["anyOf"])
    if "enum" in schema:  # 1 == True == 1.0
        return any(type(value) is type(option) and value == option for option in schema["enum"])
    return "type" not in schema or _fits_type(value, schema)


def _fits_type(value: Any, schema: Mapping[str, Any]) -> bool:
    names = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
    if not any(_is_json_type(value, name) for name in names):
        return False
    if isinstance(value, list) and "items" in schema:
        return all(_fits(item, schema["items"]) for item in value)
    if isinstance(value, dict) and "additionalProperties" in schema:
        return all(_fits(item, schema["additionalProperties"]) for item in value.values())
    return True


def _is_json_type(value: Any, name: str) -> bool:
    if name == "number":
        return type(value) in (int, float)
    return _JSON_TYPES.get(type(value)) == name


def _format_schema(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        words = f"one of {schema['enum']}"
    elif "anyOf" in schema:
        words = " or ".join(_format_schema(option) for option in schema["anyOf"])
    elif "type" not in schema:
        words = "anything"
    else:
        names = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
        words = " or ".join(names)
        if "items" in schema:
            words += f" of {_format_schema(schema['items'])}"
        if "additionalProperties" in schema:
            words += f" with values of type {_format_schema(schema['additionalProperties'])}"
    return f"{words} or null" if schema.get("nullable") else words
