"""Measures the cost of rendering: prompts, constructors, and bridges beside those that a package has by hand.

    OMP_NUM_THREADS=1 python bench/rendering.py [--template qwen3 --template mistral] [--quick]

The tokenizer has the real vocabulary of Mistral's Tekken (131,072 ids) with each template's control tokens. Templates
are from the package `trl`, and one is like Mistral's. The history consists of calls and 200-token results; the new
message is another such result, or a tiny one. The floor is the plain encoding of the new message's text, which any
bridge has to do. `renderers` is the bridge that the package of that name has written by hand for the family.
`bench/bridges.py` has bridges of all templates beside full renderings. Times are medians of CPU times; bridge and floor
alternate. Requires the extra `dev`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from unbroken.messages import Message, ToolSchema
from unbroken.rendering.base import Bridge, Closing
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
HAND_WRITTEN = {"qwen3": "qwen3", "llama3.1": "llama-3", "glm4.5": "glm-4.5"}
"""Templates and the names of the package's renderers. Its renderer of gpt-oss downloads a vocabulary of its own."""
NUM_BRIDGES = 40
"""In each round."""
NUM_ROUNDS = 7


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the cost of rendering.")
    parser.add_argument("--template", action="append", choices=TEMPLATES, help="default: all of them")
    parser.add_argument("--quick", action="store_true", help="histories of 1k and 16k tokens only")
    args = parser.parse_args()
    lengths = (1_000, 16_000) if args.quick else (1_000, 16_000, 64_000)
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    for name in args.template or TEMPLATES:
        tokenizer = make_tokenizer(name)
        start = time.perf_counter()
        renderer = TemplateRenderer(tokenizer)
        print(f"\n{name}: {len(tokenizer)} ids, renderer built in {time.perf_counter() - start:.2f} s")
        hand_written, problem = load_hand_written(name, tokenizer)
        print(problem, end="\n" * bool(problem))
        print(f"{'history':>8} {'new message':>12} {'bridge':>9} {'floor':>9} {'renderers':>10}")
        for num_tokens in lengths:
            history = make_history(tokenizer, num_tokens)
            for label, num_new in (("tiny", 1), ("200 tokens", 200)):
                new = make_text(tokenizer, num_new)
                print(measure_bridge(renderer, hand_written, tokenizer, history, label, new), flush=True)
        print(measure_prompt(renderer, tokenizer, make_history(tokenizer, 16_000)))


def load_hand_written(name: str, tokenizer: Any) -> tuple[Any, str]:
    """Load the hand-written renderer of a family of the package `renderers`; or return why that fails."""
    if name not in HAND_WRITTEN:
        return None, ""
    try:
        from renderers import config_from_name, create_renderer

        return create_renderer(tokenizer, config_from_name(HAND_WRITTEN[name])), ""
    except (ImportError, AssertionError, ValueError) as error:  # AssertionError: a control token is missing
        return None, f"renderers: {error}"


def measure_bridge(
    renderer: TemplateRenderer, hand_written: Any, tokenizer: Any, history: list[Message], label: str, result: str
) -> str:
    """Measure the bridge, the floor and the hand-written bridge; returns a line of the table."""
    prompt_ids = renderer.render(history, tools=TOOLS).token_ids
    turn, new = make_call_turn(len(history)), [make_tool_result(len(history), result)]
    before = prompt_ids.tolist()

    def bridge(stop_id: int) -> Bridge:
        completion_ids = np.array([stop_id], dtype=np.int32)  # A bridge reads only the last id.
        outcome = renderer.bridge_to_next_turn(
            prompt_ids, completion_ids, new, assistant=turn, tools=TOOLS, earlier=history
        )
        assert isinstance(outcome, Bridge), outcome
        return outcome

    stop_ids = (stop_id for stop_id in renderer.get_stop_token_ids() if is_usual_end(bridge(stop_id)))
    stop_id = next(stop_ids)
    reasoning_end = tokenizer.get_added_vocab().get("</think>")  # The hand-written bridge of GLM parses the turn too.
    sampled = [*([] if reasoning_end is None else [reasoning_end]), stop_id]

    def bridge_by_hand() -> Any:
        return None if hand_written is None else hand_written.bridge_to_next_turn(before, sampled, new, tools=TOOLS)

    bridges_by_hand = bridge_by_hand() is not None
    bridge_s, floor_s = measure_in_turns_s(
        (lambda: bridge(stop_id), NUM_BRIDGES),
        (lambda: tokenizer.backend_tokenizer.encode(result, add_special_tokens=False).ids, NUM_BRIDGES),
    )
    [by_hand_s] = measure_in_turns_s((bridge_by_hand, NUM_BRIDGES))
    by_hand = f"{by_hand_s * 1e6:>7.0f} us" if bridges_by_hand else f"{'none':>10}"
    return f"{len(prompt_ids):>8} {label:>12} {bridge_s * 1e6:>6.0f} us {floor_s * 1e6:>6.0f} us {by_hand}"


def is_usual_end(bridge: Bridge) -> bool:
    """Whether the turn before the bridge ended as the template ends it before such a message."""
    return bridge.closing is Closing.NONE and bridge.num_taken_back == 0


def measure_prompt(renderer: TemplateRenderer, tokenizer: Any, messages: list[Message]) -> str:
    """Compare whole prompts, encoded so that no text forges a control token, with those of transformers."""
    num_ids = len(renderer.render(messages, tools=TOOLS).token_ids)
    ours_s, theirs_s = measure_in_turns_s(
        (lambda: renderer.render(messages, tools=TOOLS), 1),
        (lambda: render_by_transformers(tokenizer, messages), 1),
    )
    return (
        f"prompts of {num_ids} tokens: render {num_ids / ours_s / 1e3:.0f}k tokens/s, apply_chat_template "
        f"{num_ids / theirs_s / 1e3:.0f}k tokens/s, {ours_s / theirs_s:.2f} times its time"
    )


def render_by_transformers(tokenizer: Any, messages: list[Message]) -> Any:
    """Encode a conversation and the generation prompt with transformers."""
    return tokenizer.apply_chat_template(messages, tools=list(TOOLS), tokenize=True, add_generation_prompt=True)


def measure_in_turns_s(*calls: tuple[Callable[[], object], int]) -> tuple[float, ...]:
    """Measure the median CPU time of each call in seconds; a call comes with its number of repetitions in a round.

    A loaded machine interrupts longer calls more often, which the process's clock does not count. The calls alternate,
    so that caches are as cold for each of them.
    """
    durations: list[list[float]] = [[] for _ in calls]
    for round_number in range(NUM_ROUNDS + 1):
        for repetition in range(max(times for _, times in calls)):
            for (run, times), own in zip(calls, durations, strict=True):
                if repetition < times:
                    start = time.process_time()
                    run()
                    if round_number:  # The first round warms the caches.
                        own.append(time.process_time() - start)
    return tuple(map(statistics.median, durations))


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
    return tekken_tokenizer(corpus_template(CORPUS[name]).source, control_tokens=find_control_tokens(name))


def find_control_tokens(name: str) -> tuple[str, ...]:
    """Find the control tokens that the family's hand-written renderer looks up, if the package is installed."""
    if name not in HAND_WRITTEN or importlib.util.find_spec("renderers") is None:
        return ()
    from support.package_renderers import package_tokenizer

    return tuple(package_tokenizer(HAND_WRITTEN[name], template=CORPUS[name]).get_added_vocab())


if __name__ == "__main__":
    main()
