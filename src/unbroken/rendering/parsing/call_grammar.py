r"""The grammar of a turn that must call tools, derived from calls that the template renders.

    <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n<tool_call>\n{"name": "now", ...{}}\n</tool_call>
    `----- opening ------´   `- middle -----´        `----------------- joint ----------------´          `- closing ---´

It exists for templates that write arguments after the name, in one of `_STYLES`. What the grammar describes is parsed
once, so that a call which obeys it is one that the parser reads. Its form is a structural tag of xgrammar, which vLLM
takes (https://xgrammar.mlc.ai/docs/tutorials/structural_tag): control tokens in it are ids, which text cannot spell.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unbroken.errors import InvalidInputError, TemplateError
from unbroken.messages import Message, ToolSchema, make_call
from unbroken.rendering.base import ToolCallStatus
from unbroken.rendering.chat_template import ChatTemplate
from unbroken.rendering.encoding.safe_encoder import SafeEncoder
from unbroken.rendering.encoding.tokenizer import AddedTokens
from unbroken.rendering.message_format import (
    PROBE_ARGUMENT,
    PROBE_CONTENT,
    PROBE_NAMES,
    PROBE_TOOLS,
    PROBE_USER,
    MessageFormat,
    ReasoningDelimiters,
)
from unbroken.rendering.parsing.parser import FormatParser, ResponseParser

_NAME = re.compile(r"[A-Za-z0-9_.\-]+")
_CALL_IDS = ("callprob1", "callprob2")
_CALL_ID = "[a-zA-Z0-9]{1,9}"
_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_SPACE = "[ \\n]{0,4}"
_PROBE_CALLS = tuple((name, {"value": f"{PROBE_ARGUMENT}{k}"}) for k, name in enumerate(PROBE_NAMES))
"""The calls of the probes: names and arguments."""


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
        self._grammar: _CallGrammar | None = None

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

    def _find_grammar(self) -> _CallGrammar:
        control = self._encoder.control
        grammar = _find_call_grammar(self._template, self._message_format, control, self._turn_ends)
        if grammar is None or not self._is_read(grammar):
            raise InvalidInputError(
                f"calls cannot be required in the format {self._parser.name!r} of this chat template: no grammar is "
                "known for its arguments. Let the model decide (tool_choice 'auto')"
            )
        return grammar

    def _is_read(self, grammar: _CallGrammar) -> bool:
        """Whether the parser reads what the grammar describes as these calls, and nothing else."""
        calls: list[tuple[str, Any]] = list(_PROBE_CALLS if grammar.joint is not None else _PROBE_CALLS[:1])
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
            return _describe_free_reasoning(
                opening_id, closing_id, is_open=is_open, stop_token_ids=self._stop_token_ids
            )
        if is_open:
            raise InvalidInputError("calls cannot be required inside reasoning that no control token ends")
        return ()

    def _find_reasoning_delimiters(self) -> tuple[str, str]:
        """Those of the template, or those that the parser reads; empty if there are none."""
        if self._reasoning is not None:
            return self._reasoning.opening, self._reasoning.closing
        region = self._parser.call_format.reasoning if isinstance(self._parser, FormatParser) else None
        return ("", "") if region is None or not region.closings else (region.opening, region.closings[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class _ArgumentStyle:
    """A way to write arguments that xgrammar knows."""

    name: str
    """Xgrammar's name."""
    write: Callable[[Mapping[str, Any]], str]
    """Writes arguments whose values are texts."""
    delimiters: tuple[str, ...] = ()
    """Xgrammar writes them as text: they must not be control tokens."""


def _write_tags(opening: str, closing: str) -> Callable[[Mapping[str, Any]], str]:
    """Write each argument between tags, on its own lines; `{}` in the opening is the key."""
    return lambda arguments: "\n".join(opening.format(key) + value + closing for key, value in arguments.items())


_STYLES = (
    _ArgumentStyle(name="json", write=json.dumps),
    _ArgumentStyle(name="json", write=lambda arguments: json.dumps(arguments, separators=(",", ":"))),
    _ArgumentStyle(
        name="qwen_xml",
        write=_write_tags("<parameter={}>\n", "\n</parameter>"),
        delimiters=("<parameter=", "</parameter>"),
    ),
    _ArgumentStyle(
        name="minimax_xml",
        write=_write_tags('<parameter name="{}">', "</parameter>"),
        delimiters=("<parameter", "</parameter>"),
    ),
    _ArgumentStyle(
        name="glm_xml",
        write=_write_tags("<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>"),
        delimiters=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _CallGrammar:
    """The texts around names and arguments. A call id in them stands for any other."""

    style: _ArgumentStyle
    opening: str
    middle: str
    joint: str | None
    """None if a turn has one call only, or if the others are written differently."""
    closing: str

    def write(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Write calls as the grammar describes them."""
        written = [name + self.middle + self.style.write(arguments) for name, arguments in calls]
        return self.opening + (self.joint or "").join(written) + self.closing

    def to_structural_tag(
        self,
        functions: Sequence[ToolSchema],
        control: AddedTokens,
        *,
        several: bool,
        before: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """The grammar of calls to these functions, as JSON text: one, or with `several` any number from one on.

        `before` are the formats of what may come before the calls.
        """
        around = self.opening + (self.joint or "") + self.closing
        excludes = sorted({match.token for match in control.find(around)})
        calls = [self._describe_call(tool["function"], control, excludes) for tool in functions]
        call = calls[0] if len(calls) == 1 else {"type": "or", "elements": calls}
        more: list[Mapping[str, Any]] = []
        if several and self.joint is not None:
            more = [{"type": "star", "content": _sequence([*_describe_text(self.joint, control), call])}]
        opening, closing = _describe_text(self.opening, control), _describe_text(self.closing, control)
        turn = _sequence([*before, *opening, call, *more, *closing])
        return json.dumps({"type": "structural_tag", "format": turn})

    def _describe_call(
        self, function: Mapping[str, Any], control: AddedTokens, excludes: Sequence[str]
    ) -> Mapping[str, Any]:
        """`excludes` are control tokens that end a call, also within a text."""
        parameters = function.get("parameters") or _ANY_OBJECT
        try:
            schema = _exclude_in_schema(parameters, excludes) if excludes else parameters
        except InvalidInputError as error:
            raise InvalidInputError(f"calls of {function['name']!r} cannot be required: {error}") from None
        arguments = {
            "type": "json_schema",
            "json_schema": schema,
            "style": self.style.name,
            "excludes": list(excludes),
            "max_whitespace_cnt": 1,  # templates write no more, and a model may write white space without end
        }
        return _sequence([*_describe_text(function["name"] + self.middle, control), arguments])


# xgrammar 0.2 forgets minLength and maxLength of a text where it keeps tokens out of it, and keeps none out of texts
# with a pattern or a format (https://xgrammar.mlc.ai/docs/tutorials/structural_tag, `excludes`). So lengths are written
# as patterns, and patterns that keep the tokens out by themselves: a text cannot have one of each token's characters.
_MAX_LENGTH = 1000
"""The largest length that is followed: with 50,000 tokens, such a pattern takes 5 s to compile."""
_BLOCK = 100
"""Patterns repeat at most this many characters at once: xgrammar 0.2.8 fails for 200, and does not for 128."""
_SCHEMAS_BY_NAME = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
_VALUES = frozenset(("enum", "const", "default", "examples"))
"""Keywords whose values are no schemas."""
_POINTER = "(/([^~/]|~[01])*)*"
_FORMATS = {
    "email": "^[A-Za-z0-9.!#$%&'*+/=?^_`{}~-]+@[A-Za-z0-9-]+([.][A-Za-z0-9-]+)+$",
    "json-pointer": f"^{_POINTER}$",
    "relative-json-pointer": f"^(0|[1-9][0-9]*)(#|{_POINTER})$",
}
"""The formats whose texts could spell a control token, as patterns."""
_PIECE = re.compile(r"\\u[0-9a-fA-F]{4}|\\x[0-9a-fA-F]{2}|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
"""An escape, a class of characters or one character of a pattern."""


def _exclude_in_schema(schema: Any, excludes: Sequence[str]) -> Any:
    """A JSON schema whose patterns and lengths keep these tokens out of texts.

        {"type": "string", "maxLength": 40}, ["</tool_call>"]   ->   {"type": "string", "pattern": "^[^>]{0,40}$"}

    Raises:
        InvalidInputError: a length is too large, or nothing shows that a pattern cannot spell a token.
    """
    if isinstance(schema, list):
        return [_exclude_in_schema(each, excludes) for each in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: _exclude_in_keyword(key, value, excludes) for key, value in schema.items()}
    if "enum" in schema or "const" in schema:
        return result  # xgrammar leaves out the values that have a token
    pattern = schema.get("pattern", _FORMATS.get(str(schema.get("format"))))
    if isinstance(pattern, str):
        result["pattern"] = _exclude_in_pattern(pattern, excludes)
        result.pop("format", None)  # xgrammar follows a format rather than a pattern
    elif "format" not in schema and isinstance(schema.get("maxLength"), int):
        # minLength alone is not followed: xgrammar writes no line break and no quote in texts with a pattern or a
        # length, which a limited text can do without and the content of a file cannot.
        result["pattern"] = _limit_length(schema, excludes)
        result = {key: value for key, value in result.items() if key not in ("minLength", "maxLength")}
    return result


def _exclude_in_keyword(keyword: str, value: Any, excludes: Sequence[str]) -> Any:
    """The value of one keyword of a schema, with all schemas in it."""
    if keyword == "patternProperties" and isinstance(value, dict):
        value = {_exclude_in_pattern(name, excludes): each for name, each in value.items()}
    if keyword in _SCHEMAS_BY_NAME and isinstance(value, dict):
        return {name: _exclude_in_schema(each, excludes) for name, each in value.items()}
    return value if keyword in _VALUES else _exclude_in_schema(value, excludes)


def _limit_length(schema: Mapping[str, Any], excludes: Sequence[str]) -> str:
    """The pattern of a text of limited length, which only tokens that fit into it can spoil."""
    maximum = schema["maxLength"]
    fits = [token for token in excludes if len(token) <= maximum]
    return f"^{_repeat(_exclude_in_pattern('.', fits), schema.get('minLength', 0), maximum)}$"


def _exclude_in_pattern(pattern: str, excludes: Sequence[str]) -> str:
    """A pattern that matches what this one does, less texts with one of the characters that spell the tokens."""
    # Of each token a mark, the last one of Unicode: `|` and `｜` are in fewer texts than `<`.
    letters = sorted({max(re.findall(r"\W", token), default=token[0]) for token in excludes})
    if not letters:
        return pattern
    kept_out = "".join(f"\\{letter}" if letter in "\\]^-[" else letter for letter in letters)

    def narrow(match: re.Match[str]) -> str:
        piece = match[0]
        if piece == ".":
            return f"[^{kept_out}]"
        if piece.startswith("[^"):
            return f"[^{kept_out}{piece[2:]}"
        if piece in ("\\S", "\\D", "\\W"):
            return f"[^{kept_out}{piece.lower()}]"
        if len(piece) == 1 and piece in "|()*+?^$":
            return piece  # syntax, which stands for no character
        if _may_match(piece, letters):
            raise InvalidInputError(
                f"the pattern {pattern!r} could spell {' or '.join(excludes)}, which ends the call: write it without "
                f"{' and '.join(letters)} and classes such as [ -~], or let the model decide (tool_choice 'auto')"
            )
        return piece

    return _PIECE.sub(narrow, pattern)


def _may_match(piece: str, letters: Sequence[str]) -> bool:
    """Whether a piece of a pattern matches one of the letters; it may if Python cannot read it."""
    try:
        return any(re.fullmatch(piece if len(piece) > 1 else re.escape(piece), letter) for letter in letters)
    except re.error:
        return True


def _repeat(character: str, minimum: Any, maximum: int) -> str:
    """The pattern of `minimum` to `maximum` characters."""
    if not (isinstance(minimum, int) and 0 <= minimum <= maximum <= _MAX_LENGTH):
        raise InvalidInputError(
            f"a text has minLength {minimum} and maxLength {maximum}, which can be followed from 0 to {_MAX_LENGTH}: "
            "leave them out, or let the model decide (tool_choice 'auto')"
        )
    block = f"(?:{character}{{{_BLOCK}}})"
    required = f"{block}{{{minimum // _BLOCK}}}{character}{{{minimum % _BLOCK}}}"
    blocks, rest = divmod(maximum - minimum, _BLOCK)
    optional = f"{block}{{{blocks}}}{character}{{0,{rest}}}"
    if blocks:  # `x{0,100}` ten times in a row would be the same, and takes ten times as long to compile
        optional = f"(?:{block}{{0,{blocks - 1}}}{character}{{0,{_BLOCK - 1}}}|{optional})"
    return required + optional


def _find_call_grammar(
    template: ChatTemplate, message_format: MessageFormat, control: AddedTokens, turn_ends: Collection[str]
) -> _CallGrammar | None:
    """Find the grammar by rendering one call and two; None if the template writes arguments in another style."""
    one = _render_calls(template, message_format, 1, turn_ends)
    two = _render_calls(template, message_format, 2, turn_ends)
    for style in _STYLES:
        if one is None or (found := _split(one, 0, style)) is None or any(map(control.occurs_in, style.delimiters)):
            continue
        opening, middle, closing = found
        joint = _find_joint(two, found, style)
        return _CallGrammar(style=style, opening=opening, middle=middle, joint=joint, closing=closing)
    return None


def _describe_free_reasoning(
    opening_id: int, closing_id: int, *, is_open: bool, stop_token_ids: Collection[int]
) -> list[Mapping[str, Any]]:
    """The formats of reasoning before the calls, between two control ids; optional unless the prompt opened it."""
    inside = {"type": "exclude_token", "exclude_tokens": sorted({opening_id, closing_id, *stop_token_ids})}
    rest = [{"type": "star", "content": inside}, _token(closing_id), {"type": "regex", "pattern": _SPACE}]
    if is_open:
        return list(rest)
    return [{"type": "optional", "content": _sequence([_token(opening_id), *rest])}]


def _render_calls(
    template: ChatTemplate, message_format: MessageFormat, number: int, turn_ends: Collection[str]
) -> str | None:
    """The text of a turn with this many calls, from the first of them to the turn's end; None if it is not clear."""
    calls = [make_call(_CALL_IDS[k], name, arguments) for k, (name, arguments) in enumerate(_PROBE_CALLS[:number])]
    for content in (PROBE_CONTENT, ""):
        user: Message = {"role": "user", "content": PROBE_USER}
        turn: Message = {"role": "assistant", "content": content, "tool_calls": calls}
        try:
            text = _render(template, message_format, [user, turn])
            prompt = _render(template, message_format, [user], add_generation_prompt=True)
        except TemplateError:
            continue
        after = text.rpartition(content)[2] if content else text.removeprefix(prompt)
        if (content and content not in text) or after == text:
            continue
        end = min((place for stop in turn_ends if (place := after.find(stop)) >= 0), default=len(after))
        body = after[:end].strip()
        if PROBE_NAMES[number - 1] in body:
            return body
    return None


def _render(
    template: ChatTemplate,
    message_format: MessageFormat,
    messages: list[Message],
    *,
    add_generation_prompt: bool = False,
) -> str:
    return template.render(
        message_format.convert(messages), tools=PROBE_TOOLS, add_generation_prompt=add_generation_prompt
    )


def _split(text: str, k: int, style: _ArgumentStyle) -> tuple[str, str, str] | None:
    """Split at the name and the arguments of call `k`: the texts before, between and after; None if not in order."""
    name, arguments = _PROBE_CALLS[k]
    before, found_name, rest = text.partition(name)
    middle, found_arguments, after = rest.partition(style.write(arguments))
    return (before, middle, after) if found_name and found_arguments and name not in after else None


def _find_joint(text: str | None, single: tuple[str, str, str], style: _ArgumentStyle) -> str | None:
    """The text between the arguments of one call and the name of the next; `single` are the texts around one call."""
    if text is None or (first := _split(text, 0, style)) is None:
        return None
    second = _split(first[2], 1, style)
    if second is None:
        return None
    joint, middle, closing = (part.replace(_CALL_IDS[1], _CALL_IDS[0]) for part in second)
    return joint if first[:2] == single[:2] and (middle, closing) == single[1:] else None


def _describe_text(text: str, control: AddedTokens) -> list[Mapping[str, Any]]:
    """Formats of a text: control tokens by id, call ids as a pattern, and the rest as it is."""
    return [piece for part in re.split(f"({_CALL_IDS[0]})", text) for piece in _describe_part(part, control)]


def _describe_part(text: str, control: AddedTokens) -> Iterator[Mapping[str, Any]]:
    if text == _CALL_IDS[0]:
        yield {"type": "regex", "pattern": _CALL_ID}
        return
    position = 0
    for match in control.find(text):
        yield from _constant(text[position : match.start])
        token_id = control.get_id(match.token)
        assert token_id is not None
        yield _token(token_id)
        position = match.stop
    yield from _constant(text[position:])


def _constant(text: str) -> Iterator[Mapping[str, Any]]:
    if text:
        yield {"type": "const_string", "value": text}


def _token(token_id: int) -> Mapping[str, Any]:
    return {"type": "token", "token": token_id}


def _sequence(elements: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": list(elements)}
