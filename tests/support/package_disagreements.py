"""The differences between renderers of the package and the templates of `package_pairs`, each with an example."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from support.conversations import Conversation
from unbroken.messages import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement:
    """One difference between the two of a pair, shown by an example."""

    pair: str
    what: str
    applies: Callable[[Sequence[Message], bool], bool]
    """Whether a conversation, with (True) or without generation prompt, has what it takes to differ in this way."""
    example: tuple[Any, ...]
    template: str
    """What the template writes between what both write before it and after it, ids separated by `|`."""
    package: str
    generation_prompt: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeDisagreement:
    """One difference between the bridges of a pair."""

    pair: str
    what: str
    applies: Callable[[Conversation], bool]
    turn: str
    """The sampled turn of the example, stop included."""
    new_message: Any
    template: str
    package: str


def user(text: str) -> Any:
    return {"role": "user", "content": text}


def turn(text: str, *names: str, **more: str) -> Any:
    calls = [
        {"id": f"call{k:05d}", "type": "function", "function": {"name": name, "arguments": {"n": 1}}}
        for k, name in enumerate(names)
    ]
    message = {"role": "assistant", "content": text, **more}
    return {**message, "tool_calls": calls} if calls else message


def result(text: str) -> Any:
    return {"role": "tool", "tool_call_id": "call00000", "name": "add", "content": text}


def system(text: str) -> Any:
    return {"role": "system", "content": text}


def turns(messages: Sequence[Message]) -> list[Message]:
    return [message for message in messages if message["role"] == "assistant"]


def has_turn_without_reasoning(messages: Sequence[Message], generation_prompt: bool) -> bool:
    return any(not message.get("reasoning_content") for message in turns(messages))


def has_reasoning(messages: Sequence[Message], generation_prompt: bool) -> bool:
    return any(message.get("reasoning_content") for message in turns(messages))


def calls_after_punctuation(messages: Sequence[Message], generation_prompt: bool) -> bool:
    said = [str(m["content"]).strip() for m in turns(messages) if m.get("tool_calls")]
    return any(text and not text[-1].isalnum() for text in said)


def has_parallel_calls(messages: Sequence[Message], generation_prompt: bool) -> bool:
    return any(len(message.get("tool_calls", ())) > 1 for message in turns(messages))


def has_late_system_message(messages: Sequence[Message], generation_prompt: bool) -> bool:
    return any(message["role"] == "system" for message in messages[1:])


def has_calls_or_results(messages: Sequence[Message], generation_prompt: bool) -> bool:
    return any(message["role"] == "tool" or message.get("tool_calls") for message in messages)


def has_generation_prompt(messages: Sequence[Message], generation_prompt: bool) -> bool:
    return generation_prompt


def has_result_without_call(messages: Sequence[Message], generation_prompt: bool) -> bool:
    pairs = itertools.pairwise(messages)
    return any(b["role"] == "tool" and a["role"] != "tool" and not a.get("tool_calls") for a, b in pairs)


def says_and_calls(messages: Sequence[Message], generation_prompt: bool) -> bool:
    return any(message["content"] and message.get("tool_calls") for message in turns(messages))


NEMOTRON_SYSTEM = "a system message that is not the first is refused"
QWEN_LINE_BREAK = "the line breaks before a call are encoded apart from the punctuation before them"
DEEPSEEK_SYSTEM = "a system message that is not the first is written as a user's"
DEEPSEEK_CALL = (
    '<｜tool▁call▁begin｜>|f|unction|<｜tool▁sep｜>|a|dd|\n|`|`|`|j|s|on|\n|{"|n|":| |1|}\n|`|`|`|<｜tool▁call▁end｜>'
    "|<｜tool▁calls▁end｜>"
)

DISAGREEMENTS = [
    Disagreement(
        pair="qwen3, not thinking",
        what="a turn without reasoning keeps the empty reasoning that its generation prompt wrote",
        applies=has_turn_without_reasoning,
        example=(user("a"), turn("b"), user("c")),
        template="",
        package="<think>|\n|\n|</think>|\n|\n",
    ),
    Disagreement(
        pair="qwen3, 2507",
        what="reasoning is written, which the template of models that do not reason leaves out",
        applies=has_reasoning,
        example=(user("a"), turn("b", reasoning_content="c")),
        template="",
        package="<|th|ink|>\n|c|\n|</think>|\n|\n",
    ),
    *(
        Disagreement(
            pair=pair,
            what=QWEN_LINE_BREAK,
            applies=calls_after_punctuation,
            example=(user("a"), turn("</b>", "add"), result("1")),
            template=">\n",
            package=">|\n",
        )
        for pair in ("qwen3.5", "qwen3.6", "qwen3.8")
    ),
    Disagreement(
        pair="gemma4",
        what="a result that no call came before is refused",
        applies=has_result_without_call,
        example=(user("a"), turn("b"), result("1")),
        template="written",
        package="refused",
    ),
    Disagreement(
        pair="gemma4",
        what="text beside a call, which stands after the results, is encoded apart from the next turn's",
        applies=says_and_calls,
        example=(user("a"), turn("there", "add"), result("1"), turn("mark")),
        template="em",
        package="e|m",
    ),
    Disagreement(
        pair="glm-4.5",
        what="no line break between parallel calls",
        applies=has_parallel_calls,
        example=(user("a"), turn("b", "add", "search"), result("1")),
        template="\n",
        package="",
    ),
    *(
        Disagreement(
            pair=pair,
            what=NEMOTRON_SYSTEM,
            applies=has_late_system_message,
            example=(user("a"), system("b")),
            template="written",
            package="refused",
        )
        for pair in ("nemotron-3", "nemotron-3-ultra", "nemotron-3.5")
    ),
    Disagreement(
        pair="deepseek-v3",
        what="the generation prompt opens no reasoning",
        applies=has_generation_prompt,
        generation_prompt=True,
        example=(user("a"),),
        template="<think>|\n",
        package="",
    ),
    *(
        disagreement
        for pair in ("deepseek-v3", "deepseek-r1", "deepseek-r1, distilled")
        for disagreement in (
            Disagreement(
                pair=pair,
                what=DEEPSEEK_SYSTEM,
                applies=has_late_system_message,
                example=(user("a"), system("b")),
                template="b|<｜User｜>|a",
                package="<｜User｜>|a|<｜User｜>|b",
            ),
        )
    ),
    *(
        Disagreement(
            pair=pair, what=what, applies=has_calls_or_results, example=example, template=template, package=package
        )
        for pair in ("deepseek-v3", "deepseek-r1")
        for what, example, template, package in (
            ("no line break between parallel calls", (user("a"), turn("", "add", "search"), result("1")), "\n", ""),
            (
                "a second round of calls is opened as the first is",
                (user("a"), turn("", "add"), result("1"), turn("", "add"), result("2")),
                f"\n|{DEEPSEEK_CALL}|<｜end▁of▁sentence｜>",
                f"<｜tool▁outputs▁end｜>|<｜tool▁calls▁begin｜>|{DEEPSEEK_CALL}|<｜end▁of▁sentence｜>|<｜tool▁outputs▁begin｜>",
            ),
        )
    ),
    Disagreement(
        pair="deepseek-r1, distilled",
        what="calls are written beside text too, which the template leaves out",
        applies=has_calls_or_results,
        example=(user("a"), turn("b", "add")),
        template="",
        package=f"<｜tool▁calls▁begin｜>|{DEEPSEEK_CALL}",
    ),
]

BRIDGE_DISAGREEMENTS = [
    BridgeDisagreement(
        pair="glm-4.5",
        what="a turn that ended with the header of a system message is closed once more",
        applies=lambda conversation: conversation.new_messages[0]["role"] == "system",
        turn="\n<think></think>\na<|system|>",
        new_message=system("b"),
        template="",
        package="<|endoftext|>|<|system|>",
    ),
    BridgeDisagreement(
        pair="deepseek-v3",
        what="the generation prompt opens no reasoning",
        applies=lambda conversation: True,
        turn="</think>a<｜end▁of▁sentence｜>",
        new_message=user("b"),
        template="<think>|\n",
        package="",
    ),
    BridgeDisagreement(
        pair="deepseek-r1, distilled",
        what="reasoning is opened after the result of a tool",
        applies=lambda conversation: conversation.new_messages[-1]["role"] == "tool",
        turn="</think>a<｜end▁of▁sentence｜>",
        new_message={"role": "tool", "content": "b"},
        template="",
        package="<think>|\n",
    ),
]
