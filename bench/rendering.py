"""Measures the cost of rendering: bridges compared with full renderings, prompts, certificates, constructors.

    OMP_NUM_THREADS=1 python bench/rendering.py [--template qwen3 --template mistral] [--quick]

The tokenizer has the real vocabulary of Mistral's Tekken (131,072 ids) with each template's control tokens. Templates
are from the package `trl`, and one is like Mistral's. The history consists of calls and 200-token results; the new
message is another such result, or a tiny one. A full rendering is what a loop without bridges makes in each turn:
`apply_chat_template` over everything, tokenised. Requires the extra `dev`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from unbroken.messages import Message, ToolSchema
from unbroken.rendering.base import Bridge
from unbroken.rendering.template import TemplateRenderer

CORPUS = {"qwen3": "trl/qwen3", "llama3.1": "trl/llama3_1", "gpt-oss": "trl/gptoss", "glm4.5": "trl/glm4moe"}
MISTRAL = """\
{{- bos_token -}}
{%- if tools -%}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' -}}{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}{{- '[INST]' + message.content + '[/INST]' -}}
  {%- elif message.role == 'tool' -%}
    {{- '[TOOL_RESULTS]' + message.tool_call_id + '[TOOL_CONTENT]' + message.content + '[/TOOL_RESULTS]' -}}
  {%- else -%}
    {{- message.content -}}
    {%- for call in message.tool_calls or [] -%}
      {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + (call.function.arguments | tojson) -}}
    {%- endfor -%}
    {{- eos_token -}}
  {%- endif -%}
{%- endfor -%}
"""
MISTRAL_TOKENS = (
    *("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[ARGS]"),
    *("[TOOL_RESULTS]", "[TOOL_CONTENT]", "[/TOOL_RESULTS]"),
)
TEMPLATES = (*CORPUS, "mistral")
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
NUM_BRIDGES = 200
NUM_RENDERINGS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the cost of rendering.")
    parser.add_argument("--template", action="append", choices=TEMPLATES, help="default: all of them")
    parser.add_argument("--quick", action="store_true", help="histories of 1k and 16k tokens only")
    args = parser.parse_args()
    lengths = (1_000, 16_000) if args.quick else (1_000, 16_000, 64_000)
    for name in args.template or TEMPLATES:
        tokenizer = make_tokenizer(name)
        start = time.perf_counter()
        renderer = TemplateRenderer(tokenizer)
        print(f"\n{name}: {len(tokenizer)} ids, renderer built in {time.perf_counter() - start:.2f} s")
        print(f"{'history':>8} {'new message':>12} {'bridge':>9} {'full':>10} {'ratio':>7}")
        for num_tokens in lengths:
            history = make_history(tokenizer, num_tokens)
            for label, num_new in (("tiny", 1), ("200 tokens", 200)):
                print(measure_bridge(renderer, tokenizer, history, label, make_text(tokenizer, num_new)), flush=True)
        print(measure_prompt(renderer, tokenizer, make_history(tokenizer, 16_000)))
        print(measure_certificates(renderer))


def measure_bridge(renderer: TemplateRenderer, tokenizer: Any, history: list[Message], label: str, result: str) -> str:
    """Measure a bridge and a full rendering; returns a line of the table."""
    prompt_ids = renderer.render(history, tools=TOOLS).token_ids
    turn, new = make_call_turn(len(history)), [make_tool_result(len(history), result)]
    completion_ids = np.array(renderer.get_stop_token_ids()[-1:], dtype=np.int32)  # A bridge reads only the last id.

    def bridge() -> None:
        outcome = renderer.bridge_to_next_turn(
            prompt_ids, completion_ids, new, assistant=turn, tools=TOOLS, earlier=history
        )
        assert isinstance(outcome, Bridge), outcome

    whole = [*history, turn, *new]
    bridge_s = measure_s(bridge, NUM_BRIDGES)
    full_s = measure_s(lambda: render_by_transformers(tokenizer, whole), NUM_RENDERINGS)
    return (
        f"{len(prompt_ids):>8} {label:>12} {bridge_s * 1e6:>6.0f} us {full_s * 1e3:>7.2f} ms {full_s / bridge_s:>6.0f}x"
    )


def measure_prompt(renderer: TemplateRenderer, tokenizer: Any, messages: list[Message]) -> str:
    """Measure whole prompts, encoded so that no text forges a control token, against transformers' own."""
    num_ids = len(renderer.render(messages, tools=TOOLS).token_ids)
    ours_s, theirs_s = measure_both_s(
        lambda: renderer.render(messages, tools=TOOLS),
        lambda: render_by_transformers(tokenizer, messages),
        NUM_RENDERINGS,
    )
    return (
        f"prompts of {num_ids} tokens: render {num_ids / ours_s / 1e3:.0f}k tokens/s, apply_chat_template "
        f"{num_ids / theirs_s / 1e3:.0f}k tokens/s, {ours_s / theirs_s:.2f} times its time"
    )


def measure_certificates(renderer: TemplateRenderer) -> str:
    """List the cost of the proofs behind the bridges above, one for each shape of a turn and the messages after it."""
    records = renderer.certificates()
    costs = ", ".join(f"{record.duration_s * 1e3:.0f} ms ({record.num_renderings} renderings)" for record in records)
    return f"certificates: {costs}"


def render_by_transformers(tokenizer: Any, messages: list[Message]) -> Any:
    """Encode a conversation and the generation prompt with transformers."""
    return tokenizer.apply_chat_template(messages, tools=list(TOOLS), tokenize=True, add_generation_prompt=True)


def measure_s(run: Callable[[], object], times: int) -> float:
    """Measure the median wall time of a call in seconds, after a first call that warms the caches."""
    return measure_both_s(run, lambda: None, times)[0]


def measure_both_s(left: Callable[[], object], right: Callable[[], object], times: int) -> tuple[float, float]:
    """Measure two alternating calls, so that a busy machine slows both alike."""
    durations: tuple[list[float], list[float]] = ([], [])
    for repetition in range(times + 1):
        for run, own in zip((left, right), durations, strict=True):
            start = time.perf_counter()
            run()
            if repetition:
                own.append(time.perf_counter() - start)
    return statistics.median(durations[0]), statistics.median(durations[1])


def make_history(tokenizer: Any, num_tokens: int) -> list[Message]:
    """Make a question, and calls with results of about 200 tokens until the prompt is `num_tokens` long."""
    history: list[Message] = [{"role": "user", "content": "Which file is it?"}]
    result = make_text(tokenizer, 200)
    for number in range(num_tokens // 250):
        history += [make_call_turn(number), make_tool_result(number, result)]
    return history


def make_call_turn(number: int) -> Message:
    call: Any = {"name": "read", "arguments": {"path": f"/src/file_{number}.py"}}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": f"call{number:05d}", "type": "function", "function": call}],
    }


def make_tool_result(number: int, text: str) -> Message:
    return {"role": "tool", "tool_call_id": f"call{number:05d}", "name": "read", "content": text}


def make_text(tokenizer: Any, num_tokens: int) -> str:
    """Take text of about `num_tokens` tokens from a source file."""
    ids = tokenizer.encode(Path(json.__file__).read_text("utf-8"), add_special_tokens=False)
    text: str = tokenizer.decode(ids[:num_tokens])
    return text


def make_tokenizer(name: str) -> Any:
    """Make a tokenizer with Tekken's vocabulary and a template with its control tokens, using the tests' helpers."""
    sys.path.append(str(Path(__file__).parent.parent / "tests"))
    from support.corpus import corpus_template
    from support.tokenizers import tekken_tokenizer

    if name == "mistral":
        return tekken_tokenizer(MISTRAL, control_tokens=MISTRAL_TOKENS)
    return tekken_tokenizer(corpus_template(CORPUS[name]).source)


if __name__ == "__main__":
    main()
