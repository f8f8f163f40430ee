"""Renderers of the package `renderers`, each beside the chat template of its family, over one tokenizer."""

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from support.conversations import TOOLS, Conversation
from support.package_renderers import package_tokenizer
from unbroken.errors import TemplateError
from unbroken.integrations.renderers.registry import load_renderer
from unbroken.messages import Message
from unbroken.rendering.base import Bridge, Renderer

REFUSED = ["refused"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A renderer of the package and the template that it should agree with."""

    renderer: str
    template: str
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    string_arguments: bool = False
    """The template takes calls' arguments as text."""
    num_equal: int = 10
    """Prompts, and bridges, that are the same at least: less than that would prove little."""
    num_equal_bridges: int = 5


PAIRS = {
    "default": Pair(renderer="default", template="qwen3", num_equal_bridges=0),
    "qwen3": Pair(renderer="qwen3", template="qwen3"),
    "qwen3, not thinking": Pair(renderer="qwen3", template="qwen3", template_kwargs={"enable_thinking": False}),
    "qwen3, 2507": Pair(renderer="qwen3", template="qwen3_instruct_2507"),
    "qwen3-vl": Pair(renderer="qwen3-vl", template="qwen3_vl"),
    "qwen3.5": Pair(renderer="qwen3.5", template="qwen3_5_think"),
    "qwen3.6": Pair(renderer="qwen3.6", template="qwen3_6"),
    "qwen3.8": Pair(renderer="qwen3.8", template="qwen3_8"),
    "gemma4": Pair(renderer="gemma4", template="gemma4_v5"),
    "glm-4.5": Pair(renderer="glm-4.5", template="glm4moe"),
    "llama-3, 3.1": Pair(renderer="llama-3", template="llama3_1"),
    "llama-3, 3.2": Pair(renderer="llama-3", template="llama3_2", template_kwargs={"date_string": "26 Jul 2024"}),
    "nemotron-3": Pair(renderer="nemotron-3", template="nemotron_3_nano"),
    "nemotron-3-ultra": Pair(renderer="nemotron-3-ultra", template="nemotron_3_ultra"),
    "nemotron-3.5": Pair(renderer="nemotron-3.5", template="nemotron_3_5_lightning"),
    "deepseek-v3": Pair(renderer="deepseek-v3", template="deepseekv3", string_arguments=True, num_equal_bridges=0),
    "deepseek-r1": Pair(
        renderer="deepseek-r1", template="deepseekv3", string_arguments=True, num_equal=5, num_equal_bridges=1
    ),
    "deepseek-r1, distilled": Pair(
        renderer="deepseek-r1", template="deepseek_r1_distill", string_arguments=True, num_equal=5, num_equal_bridges=1
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """Both renderers of a pair, over one tokenizer."""

    pair: Pair
    tokenizer: Any
    package: Renderer
    template: Renderer

    def template_text(self, messages: Sequence[Message], *, generation_prompt: bool) -> str | None:
        """What transformers makes of the template, None if it refuses the messages."""
        in_form = [_with_text_arguments(m) for m in messages] if self.pair.string_arguments else list(messages)
        try:
            return self.tokenizer.apply_chat_template(
                in_form,
                tools=list(TOOLS),
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **self.pair.template_kwargs,
            )
        except Exception:  # whatever a template's own code raises
            return None

    def by_template(self, messages: Sequence[Message], *, generation_prompt: bool) -> list[str]:
        """Ids as text, or `REFUSED`."""
        text = self.template_text(messages, generation_prompt=generation_prompt)
        return REFUSED if text is None else self.describe(self.ids(text))

    def by_package(self, messages: Sequence[Message], *, generation_prompt: bool) -> list[str]:
        """Ids as text, or `REFUSED`."""
        try:
            ids = self.package.render_ids(messages, tools=TOOLS, add_generation_prompt=generation_prompt)
        except TemplateError:
            return REFUSED
        return self.describe(ids)

    def ids(self, text: str) -> np.ndarray:
        return np.array(self.tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)

    def describe(self, ids: Sequence[int]) -> list[str]:
        return [self.tokenizer.decode([token_id]) for token_id in ids]

    def bridge(
        self, renderer: Renderer, history: Sequence[Message], turn: Message, completion: str, new: Sequence[Message]
    ) -> list[str]:
        """Ids as text, or `REFUSED`."""
        prompt = self.template_text(history, generation_prompt=True)
        assert prompt is not None
        outcome = renderer.bridge_to_next_turn(
            self.ids(prompt), self.ids(completion), new, assistant=turn, tools=TOOLS, earlier=history
        )
        return self.describe(outcome.bridge_ids) if isinstance(outcome, Bridge) else REFUSED

    def completion(self, conversation: Conversation) -> str | None:
        """The turn as the model samples it; None where the template writes another turn after the prompt."""
        prompt = self.template_text(conversation.history, generation_prompt=True)
        last = self.template_text([*conversation.history, conversation.assistant], generation_prompt=False)
        if prompt is None or last is None or not last.startswith(prompt):
            return None
        body = last[len(prompt) :]
        stops = [self.tokenizer.decode([token_id]) for token_id in self.template.get_stop_token_ids()]
        ends = [body.rfind(stop) + len(stop) for stop in stops if stop in body]
        if ends:
            return body[: max(ends)]
        role = conversation.new_messages[0]["role"]
        return body + ("<|observation|>" if role == "tool" else f"<|{role}|>")  # GLM ends with the next header


@functools.cache
def sides_of(name: str) -> Sides:
    pair = PAIRS[name]
    tokenizer = package_tokenizer(pair.renderer, template=f"trl/{pair.template}")
    return Sides(
        pair=pair,
        tokenizer=tokenizer,
        package=load_renderer(tokenizer, renderer=f"pkg:{pair.renderer}", template_kwargs=pair.template_kwargs),
        template=load_renderer(tokenizer, template_kwargs=pair.template_kwargs),
    )


def difference(left: Sequence[str], right: Sequence[str]) -> tuple[str, str]:
    """What is left of both without what they have in common at the beginning and at the end, ids separated by `|`."""
    if REFUSED in (left, right):
        return tuple("refused" if side == REFUSED else "written" for side in (left, right))
    start = next((k for k, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    left, right = left[start:], right[start:]
    pairs = zip(reversed(left), reversed(right), strict=False)
    num_same = next((k for k, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))
    return "|".join(left[: len(left) - num_same]), "|".join(right[: len(right) - num_same])


def _with_text_arguments(message: Message) -> Any:
    calls = [
        {**c, "function": {**c["function"], "arguments": json.dumps(c["function"]["arguments"], ensure_ascii=False)}}
        for c in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else message
