"""Random conversations over templates of every kind, and transformers' own rendering of them."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jinja2

from support import templates
from support.tokenizers import make_tokenizer
from unbroken.messages import Message
from unbroken.rendering.base import BridgeOutcome
from unbroken.rendering.template import TemplateRenderer

WORDS = (
    "the file was not found",
    "Wie geht's? Größe",
    "今天天气",
    "😀🎉",
    "e\u0301a\u0308",
    '{"a": [1, 2.5, null]}',
    "def f(x):\n    return x\n\n",
    "\n",
    "  ",
    "a < b > c | d",
    "</b><i>",
    "[1]",
    "\t",
    "12:30",
    "'quoted'",
    '\\n "x"',
    "user",
    "assistant",
    "system\n",
    "x" * 40,
)
TOOLS: tuple[Any, ...] = tuple(
    {"type": "function", "function": {"name": name, "description": f"It can {name}.", "parameters": {"type": "object"}}}
    for name in ("add", "search")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A history, the turn that ended, and the new messages."""

    history: list[Message]
    assistant: Message
    new_messages: list[Message]


@dataclass(frozen=True, slots=True)
class Family:
    """A template, and the token that ends a turn of its model."""

    template: str
    stop_of: Callable[[Conversation], str] | str = "<|im_end|>"
    control_tokens: Sequence[str] = ()
    has_calls: bool = True

    def stop(self, conversation: Conversation) -> str:
        return self.stop_of if isinstance(self.stop_of, str) else self.stop_of(conversation)

    def tokenizer(self, *, metaspace: bool = False) -> Any:
        return make_tokenizer(self.template, control_tokens=self.control_tokens, metaspace=metaspace)


def _glm_header(conversation: Conversation) -> str:
    role = conversation.new_messages[0]["role"]
    return "<|observation|>" if role == "tool" else f"<|{role}|>"


FAMILIES = {
    "chatml": Family(templates.CHATML, has_calls=False),
    "qwen": Family(templates.QWEN),
    "qwen_thinking": Family(templates.QWEN_THINKING),
    "llama": Family(templates.LLAMA, stop_of="<|eot_id|>"),
    "glm": Family(templates.GLM, stop_of=_glm_header, control_tokens=templates.GLM_CONTROL_TOKENS),
    "two_token_close": Family(templates.TWO_TOKEN_CLOSE, stop_of="<|end_sampling|>"),
    "stand_in": Family(
        templates.STAND_IN, stop_of=lambda c: "<|call|>" if c.assistant.get("tool_calls") else "<|return|>"
    ),
    "parts": Family(templates.PARTS, has_calls=False),
    "string_arguments": Family(templates.STRING_ARGUMENTS),
    "tools_in_prompt": Family(templates.TOOLS_IN_PROMPT),
}


def random_text(rng: random.Random, words: Sequence[str] = WORDS) -> str:
    """Some words, with or without spaces between them; sometimes nothing."""
    return rng.choice(("", " ")).join(rng.choices(words, k=rng.choice((0, 1, 1, 2, 3, 5))))


def random_conversation(rng: random.Random, *, has_calls: bool, words: Sequence[str] = WORDS) -> Conversation:
    """A history of up to 12 exchanges, then a turn and the messages that follow it."""
    messages: list[Message] = []
    if rng.random() < 0.4:
        messages.append({"role": "system", "content": random_text(rng, words)})
    messages.append({"role": "user", "content": random_text(rng, words)})
    numbers = iter(range(1000))
    for _ in range(rng.choice((0, 0, 1, 2, 3, 12))):
        messages += _random_exchange(rng, numbers, has_calls, words)
    mark = f"mark{rng.randrange(10**8)}"
    *turn_and_new, _ = [*_random_exchange(rng, numbers, has_calls, words, mark=mark), None]
    assistant, *new_messages = turn_and_new
    assert assistant is not None
    return Conversation(history=messages, assistant=assistant, new_messages=[m for m in new_messages if m is not None])


def _random_exchange(
    rng: random.Random, numbers: Any, has_calls: bool, words: Sequence[str], mark: str = ""
) -> list[Message]:
    """An assistant turn and what follows it."""
    turn: Message = {"role": "assistant", "content": random_text(rng, words)}
    if rng.random() < 0.3:
        turn["reasoning_content"] = "I think " + random_text(rng, words)
    if not (has_calls and rng.random() < 0.6):
        turn["content"] = turn["content"] + mark + "done"
        following: Message = {
            "role": rng.choice(("user", "user", "tool", "system")),
            "content": random_text(rng, words),
        }
        if following["role"] == "tool":
            following["name"] = "search"
        return [turn, following]
    turn["content"] = rng.choice(("", turn["content"]))
    calls = [_random_call(rng, next(numbers), words) for _ in range(rng.choice((1, 1, 2, 3)))]
    calls[-1]["function"]["arguments"]["last"] = mark + "done"
    turn["tool_calls"] = calls
    answers: list[Message] = [
        {
            "role": "tool",
            "tool_call_id": call["id"],
            "name": call["function"]["name"],
            "content": random_text(rng, words),
        }
        for call in calls
    ]
    if rng.random() < 0.15:
        answers.append({"role": "user", "content": random_text(rng, words)})
    return [turn, *answers]


def _random_call(rng: random.Random, number: int, words: Sequence[str]) -> Any:
    arguments = {"text": random_text(rng, words), "n": rng.randrange(99)}
    function = {"name": rng.choice(("add", "search")), "arguments": arguments}
    return {"id": f"call{number:05d}", "type": "function", "function": function}


def with_names_of(rng: random.Random, conversation: Conversation, words: Sequence[str]) -> Conversation:
    """Put these words into the names and ids of a conversation's calls and of their results."""
    named = {name: f"{rng.choice(words)}{name}{rng.choice(words)}" for name in ("add", "search")}
    before, after = rng.choice(words), rng.choice(words)

    def renamed(message: Message) -> Any:
        out: Any = {**message}
        if "tool_calls" in message:
            out["tool_calls"] = [
                {
                    **call,
                    "id": f"{before}{call['id']}{after}",
                    "function": {**call["function"], "name": named[call["function"]["name"]]},
                }
                for call in message["tool_calls"]
            ]
        if "tool_call_id" in message:
            out["tool_call_id"] = f"{before}{message['tool_call_id']}{after}"
        if "name" in message:
            out["name"] = named[message["name"]]
        return out

    return Conversation(
        history=[renamed(message) for message in conversation.history],
        assistant=renamed(conversation.assistant),
        new_messages=[renamed(message) for message in conversation.new_messages],
    )


def tools_of(rng: random.Random, words: Sequence[str]) -> tuple[Any, ...]:
    """Tool schemas with these words in their names, descriptions, keys and values."""
    return tuple(
        {
            "type": "function",
            "function": {
                "name": f"{rng.choice(words)}{name}",
                "description": random_text(rng, words),
                "parameters": {
                    "type": "object",
                    "properties": {
                        f"{k}{rng.choice(words)}": {"type": "string", "enum": [rng.choice(words)]} for k in range(2)
                    },
                },
            },
        }
        for name in ("add", "search")
    )


@dataclass(frozen=True, slots=True)
class Oracle:
    """Text and ids of one family by transformers' own rendering."""

    family: Family
    tokenizer: Any
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Any] = TOOLS

    def text(self, messages: Sequence[Message], *, generation_prompt: bool) -> str | None:
        """Render the text; None if the template refuses the messages."""
        try:
            return self.tokenizer.apply_chat_template(
                self._in_form(messages),
                tools=list(self.tools),
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **self.template_kwargs,
            )
        except (jinja2.TemplateError, TypeError):
            return None

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _in_form(self, messages: Sequence[Message]) -> list[Any]:
        if self.family.template == templates.PARTS:
            return [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
        if self.family.template == templates.STRING_ARGUMENTS:
            return [_with_string_arguments(message) for message in messages]
        return list(messages)


def _with_string_arguments(message: Message) -> Any:
    calls = [
        {**c, "function": {**c["function"], "arguments": json.dumps(c["function"]["arguments"], ensure_ascii=False)}}
        for c in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else message


def bridge_of(
    renderer: TemplateRenderer, tokenizer: Any, stop: str, conversation: Conversation, tools: Sequence[Any] = TOOLS
) -> BridgeOutcome:
    """The bridge after the conversation's turn, sampled whole with this stop."""
    return renderer.bridge_to_next_turn(
        [],
        [tokenizer.convert_tokens_to_ids(stop)],
        conversation.new_messages,
        assistant=conversation.assistant,
        tools=tools,
        earlier=conversation.history,
    )
