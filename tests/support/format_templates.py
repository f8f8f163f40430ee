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
_PYTHON_OR_TEXT = "(v if v is string else v | string)"
_JSON_OR_TEXT = "(v if v is string else v | tojson)"


def _call(opening: str, argument: str, closing: str) -> str:
    """A call whose arguments are written one by one. All three are expressions, with the names `call`, `k` and `v`."""
    return (
        f"{{{{- {opening} -}}}}{{%- for k, v in call.function.arguments | items -%}}"
        f"{{{{- {argument} -}}}}{{%- endfor -%}}{{{{- {closing} -}}}}"
    )


def _dsml(section: str) -> str:
    return _template(
        think="<think>",
        end_of_think="</think>",
        calls=f"\\n\\n<｜DSML｜{section}>\\n",
        call=_call(
            """'<｜DSML｜invoke name="' + call.function.name + '">\\n'""",
            """'<｜DSML｜parameter name="' + k + '" string="' + ('true' if v is string else 'false') + '">' + """
            + _JSON_OR_TEXT
            + """ + '</｜DSML｜parameter>\\n'""",
            """'</｜DSML｜invoke>\\n'""",
        ),
        end_of_calls=f"</｜DSML｜{section}>",
    )


_M3 = "]<]minimax[>["
_VALUE_OF_M3 = """
{%- macro value(v) -%}
{%- if v is mapping -%}{%- for k, w in v | items -%}{{- element(k, w) -}}{%- endfor -%}
{%- elif v is iterable and v is not string -%}{%- for w in v -%}{{- element('item', w) -}}{%- endfor -%}
{%- elif v is string -%}{{- v -}}
{%- else -%}{{- v | tojson -}}{%- endif -%}
{%- endmacro -%}
{%- macro element(k, v) -%}
{{- ']<]minimax[>[<' + k + '>' -}}{{- value(v) -}}{{- ']<]minimax[>[</' + k + '>' -}}
{%- endmacro -%}
"""
_TYPE_OF_K3 = """
{%- macro type_of(v) -%}
{%- if v is boolean -%}boolean{%- elif v is none -%}null{%- elif v is number -%}number
{%- elif v is string -%}string{%- elif v is mapping -%}object{%- else -%}array{%- endif -%}
{%- endmacro -%}
"""
_PYTHON_CALL = (
    "{{- call.function.name + '(' -}}{%- for k, v in call.function.arguments | items -%}"
    "{{- k + '=' + (v | tojson) + (', ' if not loop.last else '') -}}{%- endfor -%}{{- ')' -}}"
)
_OF_M5 = "('<' in v or '&' in v or '\\n' in v)"
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
    "seed": _template(
        think="\\n<seed:think>",
        end_of_think="</seed:think>\\n",
        call=_call(
            "'\\n<seed:tool_call>\\n<function=' + call.function.name + '>\\n'",
            f"'<parameter=' + k + '>' + {_PYTHON_OR_TEXT} + '</parameter>\\n'",
            "'</function>\\n</seed:tool_call>'",
        ),
    ),
    "hunyuan3": _template(
        think="<think:opensource>",
        end_of_think="</think:opensource>",
        calls="<tool_calls:opensource>\\n",
        call=_call(
            "'<tool_call:opensource>' + call.function.name + '<tool_sep:opensource>\\n'",
            "'<arg_key:opensource>' + k + '</arg_key:opensource>\\n<arg_value:opensource>' + "
            + _JSON_OR_TEXT
            + " + '</arg_value:opensource>\\n'",
            "'</tool_call:opensource>\\n'",
        ),
        end_of_calls="</tool_calls:opensource>",
    ),
    "minimax_m2": _template(
        think="<think>\\n",
        end_of_think="\\n</think>\\n\\n",
        calls="\\n<minimax:tool_call>\\n",
        call=_call(
            """'<invoke name="' + call.function.name + '">\\n'""",
            f"""'<parameter name="' + k + '">' + {_JSON_OR_TEXT} + '</parameter>\\n'""",
            "'</invoke>\\n'",
        ),
        end_of_calls="</minimax:tool_call>",
    ),
    "minimax_m3": _VALUE_OF_M3
    + _template(
        think="<mm:think>",
        end_of_think="",
        text="</mm:think>",
        calls=f"{_M3}<tool_call>\\n",
        call=f"""{{{{- '{_M3}<invoke name="' + call.function.name + '">' -}}}}"""
        f"{{{{- value(call.function.arguments) -}}}}{{{{- '{_M3}</invoke>\\n' -}}}}",
        end_of_calls=f"{_M3}</tool_call>",
    ).replace("if message.content else ''", "if message.content or message.reasoning_content else ''"),
    "minicpm5": _template(
        think="<think>\\n",
        end_of_think="\\n</think>\\n\\n",
        call=_call(
            """'\\n<function name="' + call.function.name + '">'""",
            """'<param name="' + k + '">' + ('<![CDATA[' + v + ']]>' if v is string and """
            + f"{_OF_M5} else v | string) + '</param>'",
            "'</function>'",
        ),
    ),
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "kimi_k3": _TYPE_OF_K3
    + _template(
        assistant='<|open|>message role="assistant"<|sep|>',
        user='<|open|>message role="user"<|sep|>',
        tool='<|open|>message role="tool"<|sep|>',
        end="<|close|>message<|sep|><|end_of_msg|>",
        think="<|open|>think<|sep|>",
        end_of_think="<|close|>think<|sep|>",
        text="<|open|>response<|sep|>",
        end_of_text="<|close|>response<|sep|>",
        calls="<|open|>tools<|sep|>",
        call=_call(
            """'<|open|>call tool="' + call.function.name + '" index="' ~ loop.index ~ '"<|sep|>'""",
            """'<|open|>argument key="' + k + '" type="' ~ type_of(v) ~ '"<|sep|>' ~ """
            + _JSON_OR_TEXT
            + " ~ '<|close|>argument<|sep|>'",
            "'<|close|>call<|sep|>'",
        ),
        end_of_calls="<|close|>tools<|sep|>",
    ),
    "solar": _template(
        assistant="<|begin|>assistant",
        user="<|begin|>user<|content|>",
        tool="<|begin|>tool<|content|>",
        end="<|end_of_turn|>",
        think="<|think|>",
        end_of_think="<|end|><|begin|>assistant",
        text="<|content|>",
        end_of_text="<|end|>' + ('<|begin|>assistant' if message.tool_calls else '') + '",
        calls="<|tool_calls|>",
        call="{{- '<|tool_call:begin|>' + call.id + '<|tool_call:name|>' + call.function.name -}}"
        "{{- '<|tool_call:args|>' + " + _ARGUMENTS + " + '<|tool_call:end|>' -}}",
        end_of_calls="<|calls|>",
    ),
    "inkling": _template(
        assistant="<|message_model|>",
        user="<|message_user|><|content_text|>",
        tool="<|message_tool|><|content_text|>",
        end="<|content_model_end_sampling|>",
        think="<|content_thinking|>",
        end_of_think="<|end_message|><|message_model|>",
        text="<|content_text|>",
        end_of_text="<|end_message|>' + ('<|message_model|>' if message.tool_calls else '') + '",
        call="""{{- call.function.name + '<|content_invoke_tool_json|>{"name":' + (call.function.name | tojson) -}}"""
        """{{- ',"args":' + """ + _ARGUMENTS + """ + '}<|end_message|>' -}}""",
        between="<|message_model|>",
    ),
    "functionary": _template(
        assistant="<|assistant|>",
        text=">>>all\\n",
        call="{{- '>>>' + call.function.name + '\\n' + " + _ARGUMENTS + " -}}",
    ).replace("{{- '<|assistant|>' if", "{{- '<|assistant|>>>>' if"),
    "llama4": _template(
        text="<|python_start|>",
        end_of_text="<|python_end|>",
        calls="' + ('' if message.content else '<|python_start|><|python_end|>') + '",
        call=_json_call("name", "parameters"),
    ),
    "apertus": _template(
        think="<|inner_prefix|>",
        end_of_think="<|inner_suffix|>",
        calls="<|tools_prefix|>[",
        call="{{- '{\"' + call.function.name + '\": ' + " + _ARGUMENTS + " + '}' -}}",
        between=", ",
        end_of_calls="]<|tools_suffix|>",
    ),
    "gigachat": _template(
        call="{%- if loop.first -%}{{- '<|function_call|>' -}}" + _json_call("name", "arguments") + "{%- endif -%}",
    ),
    "gigachat3": _template(
        assistant="assistant<|role_sep|>\\n",
        user="user<|role_sep|>\\n",
        tool="function result<|role_sep|>\\n",
        end="<|message_sep|>\\n\\n",
        call="{%- if loop.first -%}{{- '<|message_sep|>\\n\\nfunction call<|role_sep|>\\n' -}}"
        + _json_call("name", "arguments")
        + "{%- endif -%}",
    ),
    "functionary_v31": _template(
        assistant="<|start_header_id|>assistant<|end_header_id|>\\n\\n",
        call="{{- '<function=' + call.function.name + '>' + " + _ARGUMENTS + " + '</function>' -}}",
        end_of_calls="<|eom_id|>",
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
        call=_PYTHON_CALL,
        between=", ",
        end_of_calls="]",
    ),
    "tool_code": _template(
        calls="```tool_code\\n[",
        call=_PYTHON_CALL,
        between=", ",
        end_of_calls="]\\n```",
    ),
    "olmo3": _template(
        think="<think>",
        end_of_think="</think>",
        calls="<function_calls>",
        call=_PYTHON_CALL,
        between="\\n",
        end_of_calls="</function_calls>",
    ),
    "granite": _template(
        calls="<|tool_call|>[",
        call=_json_call("name", "arguments"),
        between=", ",
        end_of_calls="]",
    ),
    "granite, a token before each": _template(
        calls="<|tool_call|> ",
        call=_json_call("name", "arguments"),
        between="\\n<|tool_call|> ",
    ),
    "internlm": _template(
        calls="<|action_start|><|plugin|>\\n",
        call=_json_call("name", "arguments"),
        between="<|action_end|><|action_start|><|plugin|>\\n",
        end_of_calls="<|action_end|>",
    ),
    "xlam": _template(calls="[", call=_json_call("name", "arguments"), between=", ", end_of_calls="]"),
}
"""By the format's name; several templates of one format have a comma and more words after it."""

_CONTROL_TOKENS = {
    "function_gemma": ("<start_function_call>", "<end_function_call>", "<escape>"),
    "hunyuan3": tuple(
        f"<{slash}{tag}:opensource>"
        for tag in ("think", "tool_calls", "tool_call", "arg_key", "arg_value", "tool_sep")
        for slash in ("", "/")
    ),
    "minimax_m3": (_M3, "<mm:think>", "</mm:think>"),
    "deepseek_v32": ("｜DSML｜",),
    "mistral": ("[TOOL_CALLS]", "[TOOL_RESULTS]", "[CALL_ID]", "[ARGS]", "[THINK]", "[/THINK]"),
}


_STOPS = {
    "mistral": "</s>",
    "kimi_k3": "<|end_of_msg|>",
    "solar": "<|end_of_turn|>",
    "gigachat3": "</s>",
    "inkling": "<|content_model_end_sampling|>",
}


def stop_of(name: str) -> str:
    """The token that ends a turn of this template."""
    return _STOPS.get(name.partition(",")[0], "<|end|>")


def tokenizer_of(name: str) -> Any:
    """A local tokenizer with this template and its control tokens."""
    control_tokens = _CONTROL_TOKENS.get(name.partition(",")[0], ())
    return make_tokenizer(FORMAT_TEMPLATES[name], control_tokens=control_tokens, eos_token=stop_of(name))
