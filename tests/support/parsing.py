"""Completions of one format, as a local tokenizer writes them."""

from collections.abc import Collection
from typing import Any

from support.tokenizers import make_tokenizer
from unbroken.rendering.base import ParsedResponse
from unbroken.rendering.encoding.safe_encoder import SafeEncoder
from unbroken.rendering.parsing.call_format import CallFormat
from unbroken.rendering.parsing.id_stream import CompletionTokens
from unbroken.rendering.parsing.parser import FormatParser

STOP = "<|im_end|>"


class FormatOnTokenizer:
    """A parser of a format for a tokenizer that has `control` as control tokens, and `stops` to end turns with."""

    def __init__(
        self,
        call_format: CallFormat,
        *,
        control: Collection[str] = (),
        stops: Collection[str] = (STOP,),
        metaspace: bool = False,
        num_stop_ids: int = 1,
    ) -> None:
        tokenizer = make_tokenizer(None, control_tokens=(*control, *stops), metaspace=metaspace)
        self.vocab_size = len(tokenizer)
        self._encoder = SafeEncoder(tokenizer.backend_tokenizer)
        ids = [tokenizer.convert_tokens_to_ids(stop) for stop in stops]
        tokens = CompletionTokens(
            self._encoder.control, self._encoder.decode, stop_token_ids=ids, num_stop_ids=num_stop_ids
        )
        self.parser = FormatParser(call_format, tokens)

    def ids(self, text: str) -> list[int]:
        """The ids of a completion; control tokens in `text` are control ids."""
        return [int(token_id) for token_id in self._encoder.encode_plain(text)]

    def spelled(self, text: str) -> list[int]:
        """The ids of `text`, without control ids."""
        return [token_id for character in text for token_id in self.ids(character)]

    def parse(self, text: str, **options: Any) -> ParsedResponse:
        """Parse a completion with this text."""
        return self.parser.parse(self.ids(text), **options)

    def parts(self, completion: str | list[int], **options: Any) -> list[tuple[str, str]]:
        """The kind and the text of each part of the parsed text or ids."""
        ids = self.ids(completion) if isinstance(completion, str) else completion
        parsed = self.parser.parse(ids, **options)
        return [(part.kind.value, self._encoder.decode(ids[slice(*part.span)])) for part in parsed.parts]


def tool(name: str, **properties: Any) -> Any:
    """A tool's schema with these parameters."""
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


_JSON, _NOW = '{"name": "add", "arguments": {"a": 1}}', '{"name": "now", "arguments": {}}'
_DEEPSEEK = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
_KIMI = "<|tool_call_begin|>functions.{}:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
_HARMONY = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}<|call|>"
_MUSE = ' to={0}<|message|><atem:function_calls>\n<atem:invoke name="{0}">\n{1}</atem:invoke>\n</atem:function_calls>'
_DSML = (
    '<｜DSML｜{0}>\n<｜DSML｜invoke name="add">\n<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>\n'
    '</｜DSML｜invoke>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜{0}>'
)
_HY = "<{0}:opensource>{1}</{0}:opensource>\n"
_M3 = "]<]minimax[>["
_K3 = '<|open|>call tool="{}" index="{}"<|sep|>{}<|close|>call<|sep|>'
_SOLAR = "<|tool_call:begin|>a1<|tool_call:name|>{}<|tool_call:args|>{}<|tool_call:end|>"
_INKLING = '{0}<|content_invoke_tool_json|>{{"name":"{0}","args":{1}}}<|end_message|>'
WRITTEN = {
    "qwen3_coder": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "glm": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
    "minimax_m1": f"<tool_calls>\n{_JSON}\n{_NOW}\n</tool_calls>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">1</parameter>\n</invoke>\n'
    '<invoke name="now">\n</invoke>\n</minimax:tool_call>',
    "harmony": _HARMONY.format("add", '{"a": 1}') + "<|start|>assistant" + _HARMONY.format("now", "{}"),
    "muse": _MUSE.format("add", '<atem:parameter name="a">1</atem:parameter>\n')
    + "<|eom|><|start|>assistant"
    + _MUSE.format("now", "")
    + "<|eot|>",
    "deepseek": "<｜tool▁calls▁begin｜>"
    + _DEEPSEEK.replace("{}", "add", 1).replace("{}", '{"a": 1}', 1)
    + "\n"
    + _DEEPSEEK.replace("{}", "now", 1)
    + "<｜tool▁calls▁end｜>",
    "kimi_k2": "<|tool_calls_section_begin|>"
    + _KIMI.format("add", '{"a": 1}')
    + _KIMI.format("now", "{}")
    + "<|tool_calls_section_end|>",
    "gemma4": "<|tool_call>call:add{a:1}<tool_call|><|tool_call>call:now{}<tool_call|>",
    "function_gemma": "<start_function_call>call:add{a:1}<end_function_call>"
    "<start_function_call>call:now{}<end_function_call>",
    "lfm2": "<|tool_call_start|>[add(a=1), now()]<|tool_call_end|>",
    "pythonic": "[add(a=1), now()]",
    "tool_code": "```tool_code\n[add(a=1), now()]\n```",
    "olmo3": "<function_calls>\nadd(a=1)\nnow()\n</function_calls>",
    "xlam": f"[{_JSON}, {_NOW}]",
    "granite": f"<|tool_call|>[{_JSON}, {_NOW}]",
    "internlm": f"<|action_start|><|plugin|>\n{_JSON}<|action_end|><|action_start|><|plugin|>\n{_NOW}<|action_end|>",
    "llama3": '{"name": "add", "parameters": {"a": 1}}; {"name": "now", "parameters": {}}',
    "mistral": '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]now[ARGS]{}',
    "cohere2": '<|START_ACTION|>[\n{"tool_call_id": "0", "tool_name": "add", "parameters": {"a": 1}},\n'
    '{"tool_call_id": "1", "tool_name": "now", "parameters": {}}\n]<|END_ACTION|>',
    "cohere": 'Action: ```json\n[{"tool_name": "add", "parameters": {"a": 1}},\n'
    '{"tool_name": "now", "parameters": {}}]\n```',
    "nemotron": f"<TOOLCALL>[{_JSON}, {_NOW}]</TOOLCALL>",
    "phi": f"<|tool_call|>[{_JSON}, {_NOW}]<|/tool_call|>",
    "hermes": f"<tool_call>\n{_JSON}\n</tool_call>\n<tool_call>\n{_NOW}\n</tool_call>",
    "seed": "<seed:tool_call>\n<function=add>\n<parameter=a>1</parameter>\n</function>\n</seed:tool_call>\n"
    "<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
    "hunyuan3": "<tool_calls:opensource>\n"
    + _HY.format("tool_call", "add<tool_sep:opensource>\n" + _HY.format("arg_key", "a") + _HY.format("arg_value", "1"))
    + _HY.format("tool_call", "now<tool_sep:opensource>\n")
    + "</tool_calls:opensource>",
    "minimax_m3": f'{_M3}<tool_call>\n{_M3}<invoke name="add">{_M3}<a>1{_M3}</a>{_M3}</invoke>\n'
    f'{_M3}<invoke name="now">{_M3}</invoke>\n{_M3}</tool_call>',
    "minicpm5": '<function name="add"><param name="a">1</param></function>\n<function name="now"></function>',
    "deepseek_v32": _DSML.format("function_calls"),
    "deepseek_v4": _DSML.format("tool_calls"),
    "kimi_k3": "<|open|>tools<|sep|>"
    + _K3.format("add", 1, '<|open|>argument key="a" type="number"<|sep|>1<|close|>argument<|sep|>')
    + _K3.format("now", 2, "")
    + "<|close|>tools<|sep|>",
    "solar": "<|tool_calls|>" + _SOLAR.format("add", '{"a": 1}') + _SOLAR.format("now", "{}") + "<|calls|>",
    "inkling": _INKLING.format("add", '{"a":1}') + "<|message_model|>" + _INKLING.format("now", "{}"),
    "functionary": 'add\n{"a": 1}>>>now\n{}',
    "llama4": '<|python_start|><|python_end|>{"name": "add", "parameters": {"a": 1}}{"name": "now", "parameters": {}}',
    "apertus": '<|tools_prefix|>[{"add": {"a": 1}}, {"now": {}}]<|tools_suffix|>',
    "gigachat": f"<|function_call|>{_JSON}<|function_call|>{_NOW}",
    "gigachat3": f"<|message_sep|>\n\nfunction call<|role_sep|>\n{_JSON}<|message_sep|>\n\n"
    f"function call<|role_sep|>\n{_NOW}",
    "functionary_v31": '<function=add>{"a": 1}</function><function=now>{}</function><|eom_id|>',
    "none": "",
}
"""By the name of a format: the calls `add(a=1)` and `now()` as its models write them."""


def written_calls(call_format: CallFormat) -> str:
    """The calls `add(a=1)` and `now()` in this format."""
    assert call_format.name in WRITTEN, f"add {call_format.name!r} to WRITTEN in tests/support/parsing.py"
    return WRITTEN[call_format.name]
