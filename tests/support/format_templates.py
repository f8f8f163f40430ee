"""Small templates with call formats that no template of the installed packages has."""

from typing import Any

from support.tokenizers import make_tokenizer

_TURNS = """\
{%%- if tools %%}{{- '%(tools)s' + (tools | tojson) + '%(end)s' }}{%% endif -%%}
{%%- for message in messages -%%}
{%%- if message.role == 'assistant' -%%}
{{- '%(assistant)s' -}}
{%%- if message.reasoning_content and '%(think)s' -%%}
{{- '%(think)s' + message.reasoning_content + '%(end_of_think)s' -}}
{%%- endif -%%}
{{- '%(text)s' + message.content + '%(end_of_text)s' if message.content else '' -}}
{%%- for call in message.tool_calls or [] -%%}
{{- '%(calls)s' if loop.first else '%(between)s' -}}
%(call)s
{{- '%(end_of_calls)s' if loop.last -}}
{%%- endfor -%%}
{{- '%(end)s' -}}
{%%- elif message.role == 'tool' -%%}
{{- '%(tool)s' + message.content + '%(end)s' -}}
{%%- else -%%}
{{- '%(user)s' + message.content + '%(end)s' -}}
{%%- endif -%%}
{%%- endfor -%%}
{{- '%(assistant)s' if add_generation_prompt -}}
"""
_ARGUMENTS = "(call.function.arguments | tojson)"


def _template(**texts: str) -> str:
    defaults = dict.fromkeys(
        ("think", "end_of_think", "text", "end_of_text", "calls", "between", "end_of_calls", "tools"), ""
    )
    roles = {"assistant": "<|assistant|>", "user": "<|user|>", "tool": "<|tool|>", "end": "<|end|>"}
    return _TURNS % {**defaults, **roles, **texts}


def _json_call(name: str, arguments: str, call_id: str = "") -> str:
    identity = f"""'"{call_id}": "' + call.id + '", ' + """ if call_id else ""
    named = f"""'"{name}": "' + call.function.name + '", '"""
    return f"""{{{{- '{{' + {identity}{named} + '"{arguments}": ' + {_ARGUMENTS} + '}}' -}}}}"""


_VALUE_OF_GEMMA = """
{%- macro value(v) -%}
{%- if v is string -%}{{- '<escape>' + v + '<escape>' -}}
{%- elif v is mapping -%}{{- '{' -}}{{- members(v) -}}{{- '}' -}}
{%- elif v is iterable -%}{{- '[' -}}
{%- for x in v -%}{{- value(x) -}}{{- ',' if not loop.last -}}{%- endfor -%}{{- ']' -}}
{%- else -%}{{- v | tojson -}}{%- endif -%}
{%- endmacro -%}
{%- macro members(m) -%}
{%- for k, v in m | items -%}{{- k + ':' -}}{{- value(v) -}}{{- ',' if not loop.last -}}{%- endfor -%}
{%- endmacro -%}
"""
_MISTRAL = {"assistant": " [/INST]", "user": "[INST]", "tool": "[TOOL_RESULTS]", "end": "</s>"}

FORMAT_TEMPLATES = {
    "cohere": _template(
        calls="Action: ```json\\n[", call=_json_call("tool_name", "parameters"), between=",\\n", end_of_calls="]\\n```"
    ),
    "cohere2": _template(
        think="<|START_THINKING|>",
        end_of_think="<|END_THINKING|>",
        text="<|START_RESPONSE|>",
        end_of_text="<|END_RESPONSE|>",
        calls="<|START_ACTION|>[\\n",
        call=_json_call("tool_name", "parameters", "tool_call_id"),
        between=",\\n",
        end_of_calls="\\n]<|END_ACTION|>",
    ),
    "deepseek": _template(
        think="<think>",
        end_of_think="</think>",
        calls="<｜tool▁calls▁begin｜>",
        call="{{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' + "
        + _ARGUMENTS
        + " + '<｜tool▁call▁end｜>' -}}",
        end_of_calls="<｜tool▁calls▁end｜>",
    ),
    "function_gemma": _VALUE_OF_GEMMA
    + _template(
        call="{{- '<start_function_call>call:' + call.function.name + '{' -}}"
        "{{- members(call.function.arguments) -}}{{- '}<end_function_call>' -}}",
    ),
    "kimi_k2": _template(
        think="<think>",
        end_of_think="</think>",
        calls="<|tool_calls_section_begin|>",
        call="{{- '<|tool_call_begin|>functions.' + call.function.name + ':' ~ loop.index0 -}}"
        "{{- '<|tool_call_argument_begin|>' + " + _ARGUMENTS + " + '<|tool_call_end|>' -}}",
        end_of_calls="<|tool_calls_section_end|>",
    ),
    "mistral": _template(
        **_MISTRAL, calls="[TOOL_CALLS] [", call=_json_call("name", "arguments", "id"), between=", ", end_of_calls="]"
    ),
    "mistral, a call behind each": _template(
        **_MISTRAL,
        think="[THINK]",
        end_of_think="[/THINK]",
        call="{{- '[TOOL_CALLS]' + call.function.name + '[CALL_ID]' + call.id + '[ARGS]' + " + _ARGUMENTS + " -}}",
    ),
    "nemotron": _template(
        think="<think>",
        end_of_think="</think>",
        calls="<TOOLCALL>[",
        call=_json_call("name", "arguments"),
        between=", ",
        end_of_calls="]</TOOLCALL>",
    ),
    "phi": _template(
        calls="<|tool_call|>[", call=_json_call("name", "arguments"), between=", ", end_of_calls="]<|/tool_call|>"
    ),
    "pythonic": _template(
        calls="[",
        call="{{- call.function.name + '(' -}}{%- for k, v in call.function.arguments | items -%}"
        "{{- k + '=' + (v | tojson) + (', ' if not loop.last else '') -}}{%- endfor -%}{{- ')' -}}",
        between=", ",
        end_of_calls="]",
    ),
}
"""By the format's name; what follows a comma tells templates of one format apart."""

_CONTROL_TOKENS = {
    "function_gemma": ("<start_function_call>", "<end_function_call>", "<escape>"),
    "mistral": ("[TOOL_CALLS]", "[TOOL_RESULTS]", "[CALL_ID]", "[ARGS]", "[THINK]", "[/THINK]"),
}


def stop_of(name: str) -> str:
    """The token that ends a turn of this template."""
    return "</s>" if name.startswith("mistral") else "<|end|>"


def tokenizer_of(name: str) -> Any:
    """A local tokenizer with this template and its control tokens."""
    control_tokens = _CONTROL_TOKENS.get(name.partition(",")[0], ())
    return make_tokenizer(FORMAT_TEMPLATES[name], control_tokens=control_tokens, eos_token=stop_of(name))
