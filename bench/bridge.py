"""What a bridge costs, against rendering and tokenising the whole conversation again.

    python bench/bridge.py [--vocabulary 32000]

The history is made of calls and 200-token results; the new message is another such result, or a tiny one. The tokenizer
is a byte-level BPE trained on the standard library's sources, as no model has to be downloaded for that.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from unbroken.messages import Message, ToolSchema
from unbroken.rendering.base import Bridge
from unbroken.rendering.template import TemplateRenderer

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
TEMPLATE = """\
{%- if tools -%}
  {{- '<|im_start|>system\\n<tools>' -}}
  {%- for tool in tools -%}{{- '\\n' -}}{{- tool | tojson -}}{%- endfor -%}
  {{- '\\n</tools><|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == 'tool' -%}
    {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' -}}
  {%- else -%}
    {{- '<|im_start|>' + message.role + '\\n' + message.content -}}
    {%- for call in message.tool_calls or [] -%}
      {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
      {{- call.function.arguments | tojson -}}{{- '}\\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
TOOLS: tuple[ToolSchema, ...] = (
    {
        "type": "function",
        "function": {
            "name": "read",
            "description": "Read a file.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    },
)
NUM_BRIDGES = 300
NUM_RENDERINGS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the bridge against a full rendering.")
    parser.add_argument("--vocabulary", type=int, default=32_000, help="size of the tokenizer's vocabulary")
    tokenizer = train_tokenizer(parser.parse_args().vocabulary)
    print(f"vocabulary {len(tokenizer)}, medians")
    print(f"{'history':>8} {'new message':>12} {'bridge':>10} {'render':>10} {'+ encode':>10} {'ratio':>7}")
    for num_tokens in (1_000, 16_000, 64_000):
        history = make_history(tokenizer, num_tokens)
        for name, num_new in (("tiny", 1), ("200 tokens", 200)):
            print(measure(tokenizer, history, name, text_of_length(tokenizer, num_new)))


def measure(tokenizer: Any, history: list[Message], name: str, result: str) -> str:
    """One line of the table."""
    renderer = TemplateRenderer(tokenizer)
    prompt_ids = renderer.render(history, tools=TOOLS).token_ids
    turn, new = call_turn(len(history)), [tool_result(len(history), result)]
    completion = tokenizer.encode('<tool_call>\n{"name": "read", "arguments": {}}\n</tool_call><|im_end|>')

    def bridge() -> None:
        outcome = renderer.bridge_to_next_turn(prompt_ids, completion, new, assistant=turn, tools=TOOLS)
        assert isinstance(outcome, Bridge), outcome

    whole = [*history, turn, *new]

    def render() -> str:
        text: str = tokenizer.apply_chat_template(whole, tools=list(TOOLS), tokenize=False, add_generation_prompt=True)
        return text

    bridge_s = median_s(bridge, NUM_BRIDGES)
    render_s = median_s(render, NUM_RENDERINGS)
    whole_s = median_s(lambda: tokenizer.backend_tokenizer.encode(render(), add_special_tokens=False), NUM_RENDERINGS)
    return (
        f"{len(prompt_ids):>8} {name:>12} {bridge_s * 1e6:>7.0f} us {render_s * 1e3:>7.2f} ms "
        f"{whole_s * 1e3:>7.2f} ms {whole_s / bridge_s:>6.0f}x"
    )


def median_s(run: Callable[[], object], times: int) -> float:
    """The median wall time of a call in seconds, after one that warms the caches."""
    run()
    durations = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        durations.append(time.perf_counter() - start)
    return statistics.median(durations)


def make_history(tokenizer: Any, num_tokens: int) -> list[Message]:
    """A question, and calls with results of about 200 tokens until the prompt is `num_tokens` long."""
    history: list[Message] = [{"role": "user", "content": "Which file is it?"}]
    result = text_of_length(tokenizer, 200)
    for number in range(num_tokens // 250):
        history += [call_turn(number), tool_result(number, result)]
    return history


def call_turn(number: int) -> Message:
    call: Any = {"name": "read", "arguments": {"path": f"/src/file_{number}.py"}}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": f"call{number:05d}", "type": "function", "function": call}],
    }


def tool_result(number: int, text: str) -> Message:
    return {"role": "tool", "tool_call_id": f"call{number:05d}", "name": "read", "content": text}


def text_of_length(tokenizer: Any, num_tokens: int) -> str:
    """Text of about so many tokens, from a source file."""
    text: str = tokenizer.decode(tokenizer.encode(Path(json.__file__).read_text("utf-8"))[:num_tokens])
    return text


def train_tokenizer(vocabulary: int) -> Any:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(standard_library(), trainer)
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in TAGS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def standard_library() -> Iterator[str]:
    for path in sorted(Path(json.__file__).parent.parent.glob("*.py")):
        yield path.read_text("utf-8", errors="replace")


if __name__ == "__main__":
    main()
