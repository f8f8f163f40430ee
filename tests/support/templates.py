"""Chat templates like those of the common families, written for the tests, and templates that try to break a bridge.

`support.conversations.FAMILIES` says how the models of the common families end their turns.
"""

CHATML = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

QWEN = """\
{%- if tools -%}
  {{- '<|im_start|>system\\n' -}}
  {%- if messages[0].role == 'system' -%}{{- messages[0].content + '\\n\\n' -}}{%- endif -%}
  {{- '# Tools\\n<tools>' -}}
  {%- for tool in tools -%}{{- '\\n' -}}{{- tool | tojson -}}{%- endfor -%}
  {{- '\\n</tools>\\nAnswer with <tool_call>{...}</tool_call><|im_end|>\\n' -}}
{%- elif messages[0].role == 'system' -%}
  {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' -}}
{%- else -%}
  {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == 'user' or (message.role == 'system' and not loop.first) -%}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
  {%- elif message.role == 'assistant' -%}
    {{- '<|im_start|>assistant\\n' + message.content -}}
    {%- for call in message.tool_calls or [] -%}
      {%- if message.content or not loop.first -%}{{- '\\n' -}}{%- endif -%}
      {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
      {{- call.function.arguments | tojson -}}{{- '}\\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
  {%- elif message.role == 'tool' -%}
    {%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
    {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' -}}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

QWEN_THINKING = """\
{%- set ns = namespace(last_query=-1) -%}
{%- for message in messages -%}
  {%- if message.role == 'user' and not (message.content.startswith('<tool_response>')
      and message.content.endswith('</tool_response>')) -%}{%- set ns.last_query = loop.index0 -%}{%- endif -%}
{%- endfor -%}
""" + QWEN.replace(
    "{{- '<|im_start|>assistant\\n' + message.content -}}",
    """{%- set content = message.content -%}{%- set reasoning = message.reasoning_content or '' -%}
    {%- if not reasoning and '</think>' in content -%}
      {%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
      {%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
    {%- endif -%}
    {{- '<|im_start|>assistant\\n' -}}
    {%- if loop.index0 > ns.last_query and reasoning -%}
      {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') -}}
    {%- else -%}{{- content -}}{%- endif -%}""",
).replace(
    "{{- '<|im_start|>assistant\\n' -}}{%- endif -%}\n",
    """{{- '<|im_start|>assistant\\n' -}}
  {%- if enable_thinking is defined and enable_thinking is false -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}
  {%- if open_thinking is defined -%}{{- '<think>\\n' -}}{%- endif -%}
{%- endif -%}
""",
)

CALLS_NEED_RESULTS = QWEN_THINKING.replace(
    "  {%- if message.role == 'user' or (",
    """  {%- if loop.index0 and messages[loop.index0 - 1].tool_calls and message.role != 'tool' -%}
    {{- raise_exception('a call needs a result') -}}
  {%- endif -%}
  {%- if message.role == 'user' or (""",
)

LLAMA = """\
{{- '<|begin_of_text|>' -}}
{%- for message in messages -%}
  {%- if message.role == 'tool' -%}
    {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' -}}{{- message.content | tojson -}}{{- '<|eot_id|>' -}}
  {%- elif message.tool_calls -%}
    {%- if message.tool_calls | length != 1 -%}{{- raise_exception('one call at a time, please') -}}{%- endif -%}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + message.tool_calls[0].function.name -}}
    {{- '", "parameters": ' -}}{{- message.tool_calls[0].function.arguments | tojson -}}{{- '}<|eot_id|>' -}}
  {%- else -%}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}
"""

GLM = """\
{{- '[gMASK]<sop>' -}}
{%- for message in messages -%}
  {%- if message.role == 'assistant' -%}
    {{- '<|assistant|>\\n' + message.content -}}
    {%- for call in message.tool_calls or [] -%}
      {{- '\\n<tool_call>' + call.function.name + '\\n' -}}
      {%- for key, value in call.function.arguments.items() -%}
        {{- '<arg_key>' + key + '</arg_key>\\n<arg_value>' -}}
        {{- value if value is string else value | tojson -}}{{- '</arg_value>\\n' -}}
      {%- endfor -%}
      {{- '</tool_call>' -}}
    {%- endfor -%}
  {%- elif message.role == 'tool' -%}
    {%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|observation|>' -}}{%- endif -%}
    {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' -}}
  {%- else -%}
    {{- '<|' + message.role + '|>\\n' + message.content -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}
"""
GLM_CONTROL_TOKENS = ("[gMASK]", "<sop>", "<|user|>", "<|system|>", "<|observation|>", "<|assistant|>")

TWO_TOKEN_CLOSE = """\
{%- for message in messages -%}
  {{- '<|message|>' + message.role + '<|content|>' + message.content -}}
  {%- for call in message.tool_calls or [] -%}
    {{- '<|call|>' + call.function.name + ' ' + call.function.arguments | tojson + '<|/call|>' -}}
  {%- endfor -%}
  {{- '<|end_message|>' -}}{%- if message.role == 'assistant' -%}{{- '<|end_sampling|>' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|message|>assistant<|content|>' -}}{%- endif -%}
"""

STAND_IN = """\
{%- for message in messages -%}
  {%- if message.role == 'tool' -%}
    {{- '<|start|>' + message.name + ' to=assistant<|message|>' + message.content + '<|end|>' -}}
  {%- elif message.tool_calls -%}
    {{- '<|start|>assistant to=' + message.tool_calls[0].function.name + '<|message|>' -}}
    {{- message.tool_calls[0].function.arguments | tojson + '<|call|>' -}}
  {%- elif message.role == 'assistant' and loop.last and not add_generation_prompt -%}
    {{- '<|start|>assistant<|message|>' + message.content + '<|return|>' -}}
  {%- else -%}
    {{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start|>assistant<|message|>' -}}{%- endif -%}
"""

PARTS = CHATML.replace("message.content", "message.content[0].text")
STRING_ARGUMENTS = QWEN.replace("call.function.arguments | tojson", "call.function.arguments")
TOOLS_IN_PROMPT = QWEN.replace(
    "{%- if add_generation_prompt -%}",
    "{%- if add_generation_prompt and tools -%}"
    "{{- '<|im_start|>tools\\n' ~ tools | length ~ '<|im_end|>\\n' -}}"
    "{%- endif -%}\n"
    "{%- if add_generation_prompt -%}",
)
SCHEMAS_BEFORE_LAST_USER = CHATML.replace(
    "{{- '<|im_start|>' + message.role",
    "{%- if message.role == 'user' and loop.last and tools -%}"
    "{{- '<|im_start|>tools\n' ~ tools | tojson ~ '<|im_end|>\n' -}}{%- endif -%}\n"
    "{{- '<|im_start|>' + message.role",
)
"""As Mistral's do: the tools are in the bridge."""
TOOLS_IN_LAST_QUESTION = CHATML.replace(
    "{{- '<|im_start|>' + message.role",
    "{%- set rest = messages[loop.index:] | selectattr('role', 'equalto', 'user') | list -%}\n"
    "{%- if message.role == 'user' and not rest and tools -%}"
    "{{- '<|im_start|>tools\n' ~ tools | tojson ~ '<|im_end|>\n' -}}{%- endif -%}\n"
    "{{- '<|im_start|>' + message.role",
)
"""The tools stand before the last question of the conversation, and move with it."""
ENDS_A_NAME = QWEN.replace(
    """{"name": "' + call.function.name + '", "arguments": '""", """<function=' + call.function.name + '>'"""
)
"""Writes what a name may be the beginning of."""
ASCII_SCHEMAS = QWEN.replace("tool | tojson", "tool | tojson(ensure_ascii=True)")
TELLS_LENGTHS = CHATML.replace("'\\n' + message.content", "' ' ~ message.content | length ~ '\\n' + message.content")
"""Writes something about a message's text beside it."""

_PROMPT = "{{- '<|im_start|>assistant\\n' -}}"
_HEADER = "{{- '<|im_start|>' + message.role"

FIRST_RESULT = CHATML.replace(
    _HEADER,
    "{{- '<|im_start|>' + ('first ' if message.role == 'tool' and "
    "(messages[:loop.index0] | selectattr('role', 'equalto', 'tool') | list | length == 0) else '') + message.role",
)
"""The first tool result of a conversation has a header of its own, as DeepSeek-V3's has."""
DATE_IN_SYSTEM = CHATML.replace(
    "{%- for message",
    "{{- '<|im_start|>system\\nIt is ' + strftime_now('%Y-%m') + '<|im_end|>\\n' -}}\n{%- for message",
    1,
)
DATE_IN_PROMPT = CHATML.replace(_PROMPT, "{{- '<|im_start|>assistant (' + strftime_now('%Y-%m') + ')\\n' -}}")

HISTORY_DEPENDENT = {
    "the first tool result has a header of its own": FIRST_RESULT,
    "the header tells the message's number": CHATML.replace(
        _HEADER, "{{- '<|im_start|>' + loop.index | string + message.role"
    ),
    "the prompt tells how many messages there are": CHATML.replace(
        _PROMPT, "{{- '<|im_start|>' ~ messages | length -}}"
    ),
    "the prompt quotes the first message": CHATML.replace(_PROMPT, "{{- '<|im_start|>re: ' + messages[0].content -}}"),
    "the prompt quotes the system message": CHATML.replace(
        _PROMPT, "{{- '<|im_start|>' + (messages[0].content if messages[0].role == 'system' else '') -}}"
    ),
    "the prompt obeys a word in the system message": CHATML.replace(
        _PROMPT, "{{- '<|im_start|>' + ('fast' if '/no_think' in messages[0].content else 'slow') -}}"
    ),
    "the prompt obeys an equal text in the first message": CHATML.replace(
        _PROMPT, "{{- '<|im_start|>' + ('fast' if messages[0].content == '/quick' else 'slow') -}}"
    ),
    "the prompt changes after fifty messages": CHATML.replace(
        _PROMPT, "{{- '<|im_start|>' + ('late' if messages | length > 50 else 'early') -}}"
    ),
    "the prompt changes with every seventh message": CHATML.replace(
        _PROMPT, "{{- '<|im_start|>' + ('x' if messages | length % 7 == 0 else 'y') -}}"
    ),
    "the prompt changes with every 97th message": CHATML.replace(
        _PROMPT, "{{- '<|im_start|>' + ('x' if messages | length % 97 == 0 else 'y') -}}"
    ),
    "the prompt changes after a long message": CHATML.replace(
        _PROMPT,
        "{%- set ns = namespace(n='short') -%}{%- for m in messages if m.content | length > 5000 -%}"
        "{%- set ns.n = 'long' -%}{%- endfor -%}{{- '<|im_start|>' + ns.n -}}",
    ),
    "the header alternates with the turns": CHATML.replace(
        _HEADER, "{{- '<|im_start|>' + ('odd ' if loop.index is odd else 'even ') + message.role"
    ),
    "the header counts the conversation's tool results": CHATML.replace(
        _HEADER,
        "{{- '<|im_start|>' + (messages[:loop.index0] | selectattr('role', 'equalto', 'tool') | list | length | string"
        " if message.role == 'tool' else '') + message.role",
    ),
}
"""Templates whose text between turns depends on the history: no bridge for them may be wrong."""

LOOKS_UP_NAMES_BY_ID = QWEN.replace(
    "'\\n<tool_response>\\n' + message.content", "'\\n<tool_response>\\n' + lookup.name + message.content"
).replace(
    "  {%- elif message.role == 'tool' -%}",
    """  {%- elif message.role == 'tool' -%}
    {%- set lookup = namespace(name='') -%}
    {%- for other in messages -%}{%- for call in other.tool_calls or [] -%}
      {%- if call.id == message.tool_call_id and not lookup.name -%}
        {%- set lookup.name = call.function.name -%}
      {%- endif -%}
    {%- endfor -%}{%- endfor -%}""",
)
"""Writes the name of the first call in the conversation that has the result's id."""


def chatml_with(*, after_turn: str = "", before_result: str = "", before_prompt: str = "") -> str:
    """ChatML with calls, and more template code after each assistant turn, in each result, or before the prompt."""
    return f"""\
{{%- for message in messages -%}}
  {{%- if message.role == 'assistant' -%}}
    {{{{- '<|im_start|>assistant\\n' + message.content -}}}}
    {{%- for call in message.tool_calls or [] -%}}
      {{{{- '<tool_call>\\n{{"name": "' + call.function.name + '", "arguments": ' -}}}}
      {{{{- call.function.arguments | tojson -}}}}{{{{- '}}\\n</tool_call>' -}}}}
    {{%- endfor -%}}
    {{{{- '<|im_end|>\\n' -}}}}{after_turn}
  {{%- elif message.role == 'tool' -%}}
    {{{{- '<|im_start|>tool\\n' -}}}}{before_result}{{{{- message.content + '<|im_end|>\\n' -}}}}
  {{%- else -%}}
    {{{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}}}
  {{%- endif -%}}
{{%- endfor -%}}
{before_prompt}{{%- if add_generation_prompt -%}}{{{{- '<|im_start|>assistant\\n' -}}}}{{%- endif -%}}
"""


_HIDDEN = " and ".join(
    [f"'{word}' in messages[0].content" for word in ("what", "see", "when", "look", "outside")]
    + [f"'{word}' not in messages[0].content" for word in ("zebra", "violin")]
)
"""True for hardly any text."""
RARELY_DIFFERENT = {
    "the prompt": CHATML.replace(_PROMPT, "{{- '<|im_start|>' ~ ('fast' if " + _HIDDEN + " else 'slow') ~ '\\n' -}}"),
    "the header": CHATML.replace(_HEADER, "{{- '<|im_start|>' ~ ('my ' if " + _HIDDEN + " else '') ~ message.role"),
    "what comes behind the turn": CHATML.replace(
        "'<|im_end|>\\n'", "'<|im_end|>' ~ (' so ' if " + _HIDDEN + " else '') ~ '\\n'"
    ),
}
"""Templates whose text after a turn depends on a rare first message; the key says where it shows."""

TAGS_WITH_ONE_CLOSER = (
    "{%- for m in messages -%}<|open|>{{ m.role }}<|sep|>"
    "{%- if m.role == 'assistant' -%}"
    "<|open|>think<|sep|>{{ m.reasoning_content or '' }}<|close|>think<|sep|>"
    "<|open|>response<|sep|>{{ m.content }}<|close|>response<|sep|>"
    "{%- for c in m.tool_calls or [] -%}"
    "<|open|>call<|sep|>{{ c.function.name }} {{ c.function.arguments | tojson }}<|close|>call<|sep|>"
    "{%- endfor -%}{%- else -%}{{ m.content }}{%- endif -%}"
    "<|close|>{{ m.role }}<|sep|><|end_of_msg|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|open|>assistant<|sep|><|open|>think<|sep|>{%- endif -%}"
)
"""One token closes every tag; another, after several of them, ends the message."""
ONE_END_FOR_REASONING_AND_TURN = (
    "{%- for m in messages -%}"
    "{%- if m.reasoning_content -%}<|begin|>assistant<|think|>{{ m.reasoning_content }}<|end|>{%- endif -%}"
    "<|begin|>{{ m.role }}<|content|>{{ m.content }}<|end|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|begin|>assistant{%- endif -%}"
)
"""No token says whether the reasoning or the turn ended."""
CALLS_BEFORE_A_TURN_OF_TEXT = (
    "{%- for m in messages -%}"
    "{%- if m.tool_calls -%}<|assistant|>{%- for c in m.tool_calls -%}<|call|>{{ c.function | tojson }}<|/call|>"
    "{%- endfor -%}<|end|>{%- endif -%}"
    "{%- if m.content is not none -%}<|{{ m.role }}|>{{ m.content }}<|end|>{%- endif -%}"
    "{%- endfor -%}{%- if add_generation_prompt -%}<|assistant|><think>\n{%- endif -%}"
)
"""As DeepSeek-R1's: calls end a turn, and content that is not None, even an empty text, is another one."""
CALLS_UNDER_A_HEADER_OF_THEIR_OWN = (
    "{%- for m in messages -%}{{ m.role }}<|role|>\n{{ m.content or '' }}<|end|>\n\n"
    "{%- if m.tool_calls -%}function call<|role|>\n{{ m.tool_calls[0].function | tojson }}<|end|>\n\n{%- endif -%}"
    "{%- endfor -%}{%- if add_generation_prompt -%}assistant<|role|>\n{%- endif -%}"
)
"""As GigaChat 3's: the turn goes on after an end, and no token says whether it does."""
ANOTHER_END_WITHOUT_CONTENT = (
    "{%- for m in messages -%}<|{{ m.role }}|>{{ m.content or '' }}"
    "{%- for c in m.tool_calls or [] -%}{{ c.function | tojson }}{%- endfor -%}"
    "{{ '<|calls|>' if m.content is none else '<|end|>' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)
"""Only a turn whose content is None ends with `<|calls|>`."""
CALLS_IN_A_TURN_OF_THEIR_OWN = (
    "{%- for m in messages -%}{%- if m.content -%}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{%- endif -%}"
    "{%- if m.tool_calls -%}<|start|>{{ m.role }}\n<calls>{{ m.tool_calls[0].function | tojson }}</calls><|end|>\n"
    "{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}<|start|>assistant\n{%- endif -%}"
)
"""Text and calls of one message are two turns, each with its header and its end."""
ALWAYS_PROMPTS = (
    "<|first|>{%- for m in messages -%}<|start|><|{{ m.role }}|>{{ m.content }}<|shut|><|end|>{%- endfor -%}"
    "<|start|><|assistant|>"
)
"""A generation prompt whether asked for or not."""
ROLE_IN_A_CONTROL_TOKEN = (
    "{%- for m in messages -%}<|{{ m.role }}|>{{ m.content }}<|end|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)
"""Any role becomes part of what looks like a control token."""
