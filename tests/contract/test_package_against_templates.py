"""Where a renderer of the package `renderers` and the chat template of its family disagree, by name.

Each pair renders random conversations, and bridges their last turn. A difference that no entry of `DISAGREEMENTS`
explains fails, and so does an entry whose example no longer shows it: neither side can change unnoticed. The template's
side is transformers' own rendering for prompts, and `TemplateRenderer`, which the property tests hold against that, for
bridges.
"""

import functools
import itertools
import json
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from support.conversations import TOOLS, Conversation, random_conversation
from support.package_renderers import package_tokenizer
from unbroken.errors import TemplateError
from unbroken.integrations.renderers.loading import load_renderer
from unbroken.messages import Message
from unbroken.rendering.base import Bridge, Renderer

NUM_CONVERSATIONS = 60
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
            pair=pair,
            what=what,
            applies=has_calls_or_results,
            example=example,
            template=template,
            package=package,
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
]


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
        self, renderer: Renderer, prompt: str, completion: str, new_messages: Sequence[Message], assistant: Message
    ) -> list[str]:
        """Ids as text, or `REFUSED`."""
        outcome = renderer.bridge_to_next_turn(
            self.ids(prompt), self.ids(completion), new_messages, assistant=assistant, tools=TOOLS
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


@pytest.mark.parametrize("name", PAIRS)
def test_a_prompt_is_the_templates_or_differs_in_a_way_that_is_listed(name: str) -> None:
    sides = sides_of(name)
    listed = [disagreement for disagreement in DISAGREEMENTS if disagreement.pair == name]
    rng = random.Random(name)
    num_equal = 0
    for _ in range(NUM_CONVERSATIONS):
        conversation = random_conversation(rng, has_calls=True)
        messages = [*conversation.history, conversation.assistant, *conversation.new_messages]
        generation_prompt = rng.random() < 0.5
        theirs = sides.by_package(messages, generation_prompt=generation_prompt)
        expected = sides.by_template(messages, generation_prompt=generation_prompt)
        if theirs == expected:
            num_equal += theirs != REFUSED
        else:
            assert any(d.applies(messages, generation_prompt) for d in listed), difference(expected, theirs)
    assert num_equal >= sides.pair.num_equal


@pytest.mark.parametrize("disagreement", DISAGREEMENTS, ids=lambda d: f"{d.pair}: {d.what}")
def test_a_listed_difference_is_there(disagreement: Disagreement) -> None:
    sides = sides_of(disagreement.pair)
    has_prompt = disagreement.generation_prompt
    theirs = sides.by_package(disagreement.example, generation_prompt=has_prompt)
    expected = sides.by_template(disagreement.example, generation_prompt=has_prompt)
    assert disagreement.applies(disagreement.example, has_prompt)
    assert difference(expected, theirs) == (disagreement.template, disagreement.package)


def test_without_a_date_llama_3_has_a_fixed_one_and_its_template_todays() -> None:
    tokenizer = package_tokenizer("llama-3", template="trl/llama3_2")
    prompt = load_renderer(tokenizer, renderer="pkg:llama-3").render([user("a")])
    assert "Today Date: 26 Jul 2024" in tokenizer.decode(prompt.token_ids)
    assert "26 Jul 2024" not in tokenizer.apply_chat_template([user("a")], tokenize=False)


@pytest.mark.parametrize("name", PAIRS)
def test_i1_a_bridge_is_the_templates_or_differs_in_a_way_that_is_listed(name: str) -> None:
    sides = sides_of(name)
    listed = [disagreement for disagreement in BRIDGE_DISAGREEMENTS if disagreement.pair == name]
    rng = random.Random(name)
    counts: Counter[str] = Counter()
    for _ in range(NUM_CONVERSATIONS // 2):
        conversation = random_conversation(rng, has_calls=True)
        completion = sides.completion(conversation)
        if completion is None:
            continue
        prompt = sides.template_text(conversation.history, generation_prompt=True)
        assert prompt is not None
        theirs, expected = (
            sides.bridge(renderer, prompt, completion, conversation.new_messages, conversation.assistant)
            for renderer in (sides.package, sides.template)
        )
        if REFUSED in (theirs, expected):
            continue  # each may refuse what the other can do
        counts["equal" if theirs == expected else "other"] += 1
        if theirs != expected:
            assert any(d.applies(conversation) for d in listed), difference(expected, theirs)
    assert counts["equal"] >= sides.pair.num_equal_bridges


@pytest.mark.parametrize("disagreement", BRIDGE_DISAGREEMENTS, ids=lambda d: f"{d.pair}: {d.what}")
def test_a_listed_difference_of_bridges_is_there(disagreement: BridgeDisagreement) -> None:
    sides = sides_of(disagreement.pair)
    prompt = sides.template_text([user("hello")], generation_prompt=True)
    assert prompt is not None
    theirs, expected = (
        sides.bridge(renderer, prompt, disagreement.turn, [disagreement.new_message], turn("a"))
        for renderer in (sides.package, sides.template)
    )
    assert difference(expected, theirs) == (disagreement.template, disagreement.package)


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
