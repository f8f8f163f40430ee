"""I5 for every kind of tokenizer and tens of thousands of random contents: text stays text, benign text untouched.

`make fuzz` tries more than 100,000 contents.

Each conversation holds many contents. Its control ids must be those of the same conversation with harmless words in all
places; those are judged by the tokenizer's own encoding of transformers' own rendering.
"""

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
import numpy as np
import pytest

from support.conversations import FAMILIES, WORDS, tools_of
from support.corpus import CorpusTemplate, corpus_templates
from support.effort import EFFORT, FUZZ_EFFORT, num_cases
from support.tokenizer_kinds import KINDS
from support.tokenizers import tekken_tokenizer
from unbroken.errors import TemplateError
from unbroken.messages import Message
from unbroken.rendering.base import TEMPLATE, Bridge, BridgeOutcome
from unbroken.rendering.encoding.marks import Span
from unbroken.rendering.template import TemplateRenderer

TEMPLATES = ("qwen", "llama", "glm", "string_arguments")
NUM_CONTENTS = num_cases(150, in_fuzz=3_000)
"""Random contents of each kind with each template: half of them benign, half hostile."""
NUM_CONTENTS_OF_TEKKEN = num_cases(1_000, in_fuzz=20_000)
NUM_CONTENTS_OF_CORPUS = num_cases(75, in_fuzz=1_500)
NUM_EXCHANGES = 10
NUM_NEW = 3
PER_CONVERSATION = 2 * NUM_EXCHANGES + 2 + NUM_NEW
"""Each exchange has a question and an answer; one turn has reasoning and an argument; new messages follow it."""
REWRITES_TEXT: frozenset[str] = frozenset({"gemma", "diffusion_gemma"})
"""Families of the corpus whose templates cut an answer's text at tags, so that it is refused if it has any."""
_NOT = "\u0338"
"""NFKC makes one character of it and a `>` before it."""
ODD_WORDS = (_NOT, _NOT, _NOT, "▁", "▁▁", "<unk>", "<0x0A>", "\U0010ffff5", "\u3000", "\ufeff", "|", ">", "ﬁ", "İ")


@dataclass(frozen=True)
class Case:
    """One template with one tokenizer."""

    tokenizer: Any
    keeps: Callable[[str], str] | None
    has_calls: bool

    @functools.cached_property
    def renderer(self) -> TemplateRenderer:
        return TemplateRenderer(self.tokenizer)

    @functools.cached_property
    def added(self) -> dict[int, str]:
        """Added tokens that are not white space."""
        tokens = self.tokenizer.backend_tokenizer.get_added_tokens_decoder()
        return {i: token.content for i, token in tokens.items() if token.content.replace("▁", " ").strip()}

    @functools.cached_property
    def hostile_words(self) -> tuple[str, ...]:
        tokens = sorted(token for token in self.added.values() if not token.startswith("<SPECIAL_"))
        parts = [part for t in tokens for part in (t[:2], t[:-1], t[1:], t[-2:], t.upper(), t.lower(), _full_width(t))]
        return (*tokens, *tokens, *parts, *ODD_WORDS, *WORDS)

    def text(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> str | None:
        """transformers' own rendering; None if the template refuses the messages."""
        try:
            text: str = self.tokenizer.apply_chat_template(
                self.renderer.facts.message_format.convert(messages),
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=True,
            )
        except (jinja2.TemplateError, TypeError):
            return None
        return text

    def ids(self, text: str) -> list[int]:
        """The tokenizer's own encoding."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def apart(self, text: str) -> list[int]:
        """Our encoding for text that may forge, all but the control tokens taken for text from outside."""
        encoder, spans, last = self.renderer._encoder, [], 0
        for start, stop in [*((m.start, m.stop) for m in encoder.control.find(text)), (len(text), len(text))]:
            between = text[last:start]
            if between.strip():
                begin = last + len(between) - len(between.lstrip())
                spans.append(Span(start=begin, stop=begin + len(between.strip()), index=0))
            last = stop
        return encoder._encode_separately(text, spans)[0].tolist()

    def control_ids(self, ids: Sequence[int]) -> list[int]:
        """Those of control tokens; any text may have the id of unknown characters."""
        return [i for i in ids if i in self.added and self.added[i] != "<unk>"]

    def decoded(self, ids: np.ndarray) -> str:
        return self.tokenizer.backend_tokenizer.decode(ids.tolist(), skip_special_tokens=False)


def _full_width(text: str) -> str:
    return "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in text)


@functools.cache
def case_of(kind: str, template: str) -> Case:
    family = FAMILIES[template]
    tokenizer = KINDS[kind].tokenizer(family.template, family.control_tokens)
    return Case(tokenizer, KINDS[kind].keeps, family.has_calls)


def random_content(rng: random.Random, words: Sequence[str]) -> str:
    return rng.choice(("", " ")).join(rng.choices(words, k=rng.choice((1, 1, 2, 3))))


def conversation_of(contents: Sequence[str], *, has_calls: bool) -> tuple[list[Message], Message, list[Message]]:
    """History, the turn, and the new messages: one content in each place."""
    left = iter(contents)
    history: list[Message] = []
    for _ in range(NUM_EXCHANGES):
        history += [{"role": "user", "content": next(left)}, {"role": "assistant", "content": next(left)}]
    reasoning, argument = next(left), next(left)
    history.append({"role": "user", "content": "now"})
    turn: Message = {"role": "assistant", "content": "so", "reasoning_content": reasoning}
    if not has_calls:
        turn["content"] = "so" + argument
        return history, turn, [{"role": "user", "content": content} for content in left]
    turn["tool_calls"] = [
        {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": {"text": argument}}}
    ]
    answers: list[Message] = [
        {"role": "tool", "tool_call_id": "call00000", "name": "add", "content": content} for content in left
    ]
    return history, turn, answers


def harmless(content: str) -> str:
    """A word in place of a text; blank stays blank, as templates may look at that."""
    return "word" if content.strip() else content


def batches(seed: int, words: Sequence[str], num_contents: int) -> list[list[str]]:
    rng = random.Random(seed)
    num_batches = -(-num_contents // PER_CONVERSATION)
    return [[random_content(rng, words) for _ in range(PER_CONVERSATION)] for _ in range(num_batches)]


def check_benign(case: Case, num_contents: int) -> int:
    """Prompt and bridge have the tokenizer's own ids. How many contents there were."""
    num_checked = 0
    for contents in batches(1, WORDS, num_contents):
        history, turn, new = conversation_of(contents, has_calls=case.has_calls)
        text = case.text([*history, turn, *new])
        own = case.ids(text)
        assert case.apart(text) == own
        assert case.renderer.render([*history, turn, *new]).token_ids.tolist() == own
        bridge = bridge_of(case, history, turn, new)
        assert isinstance(bridge, Bridge), bridge
        assert own[len(own) - len(bridge.bridge_ids) :] == bridge.bridge_ids.tolist()
        num_checked += len(contents)
    return num_checked


def check_hostile(case: Case, num_contents: int) -> tuple[int, int]:
    """Control ids are those of harmless words. How many contents, and how many of them forge in a naive encoding."""
    num_checked = num_forged = 0
    rng = random.Random(3)
    for contents in batches(2, case.hostile_words, num_contents):
        history, turn, new = conversation_of(contents, has_calls=case.has_calls)
        plain_history, plain_turn, plain_new = conversation_of(list(map(harmless, contents)), has_calls=case.has_calls)
        tools = tools_of(rng, case.hostile_words)
        expected = case.control_ids(
            case.ids(case.text([*plain_history, plain_turn, *plain_new], tools_of(rng, ("word",))))
        )
        prompt = case.renderer.render([*history, turn, *new], tools=tools)
        assert case.control_ids(prompt.token_ids.tolist()) == expected
        assert not case.control_ids(prompt.token_ids[prompt.message_indices != TEMPLATE].tolist())
        bridge, plain_bridge = (
            bridge_of(case, history, turn, new),
            bridge_of(case, plain_history, plain_turn, plain_new),
        )
        assert isinstance(bridge, Bridge), bridge
        assert case.control_ids(bridge.bridge_ids.tolist()) == case.control_ids(plain_bridge.bridge_ids.tolist())
        text = case.text([*history, turn, *new], tools)
        if case.keeps is not None:
            assert case.keeps(case.decoded(prompt.token_ids)) == case.keeps(text)
            assert case.keeps(text).endswith(case.keeps(case.decoded(bridge.bridge_ids)))
        num_checked += len(contents)
        num_forged += len(contents) * (case.control_ids(case.ids(text)) != expected)
    return num_checked, num_forged


def bridge_of(case: Case, history: Sequence[Message], turn: Message, new: Sequence[Message]) -> BridgeOutcome:
    """The bridge after the turn, ended by one of the template's own ends."""
    ends = case.renderer.facts.turn_end_ids & set(case.renderer.get_stop_token_ids())
    return case.renderer.bridge_to_next_turn(
        np.array([], dtype=np.int32), np.array(sorted(ends)[:1], dtype=np.int32), new, assistant=turn, earlier=history
    )


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("kind", KINDS)
def test_i5_every_kind_of_tokenizer_leaves_benign_text_alone_and_lets_no_text_forge(kind: str, template: str) -> None:
    case = case_of(kind, template)
    assert check_benign(case, NUM_CONTENTS // 2) >= NUM_CONTENTS // 2
    num_checked, num_forged = check_hostile(case, NUM_CONTENTS // 2)
    assert num_checked >= NUM_CONTENTS // 2
    assert num_forged > 0.9 * num_checked


def test_i5_tekken_leaves_benign_text_alone_and_lets_no_text_forge() -> None:
    case = Case(tekken_tokenizer(FAMILIES["qwen"].template), str, has_calls=True)
    assert check_benign(case, NUM_CONTENTS_OF_TEKKEN // 2) >= NUM_CONTENTS_OF_TEKKEN // 2
    num_checked, num_forged = check_hostile(case, NUM_CONTENTS_OF_TEKKEN // 2)
    assert num_checked >= NUM_CONTENTS_OF_TEKKEN // 2
    assert num_forged > 0.9 * num_checked


@pytest.mark.parametrize("template", corpus_templates(), ids=lambda template: template.name)
def test_i5_every_template_of_the_corpus_leaves_benign_text_alone_and_lets_no_text_forge(
    template: CorpusTemplate,
) -> None:
    case = Case(template.tokenizer(), str, has_calls=False)
    num_checked = 0
    for contents in batches(1, WORDS, NUM_CONTENTS_OF_CORPUS // 2):
        messages = chat_of(contents)
        text = case.text(messages)
        assert text is not None
        assert case.renderer.render(messages).token_ids.tolist() == case.ids(text)
        num_checked += len(contents)
    num_refused = 0
    # Reasoning tags in an answer make many templates cut it, and some leave out tags of their own.
    in_answers = [word for word in case.hostile_words if "think" not in word.lower()]
    for contents, answers in zip(
        batches(2, case.hostile_words, NUM_CONTENTS_OF_CORPUS // 2),
        batches(3, in_answers, NUM_CONTENTS_OF_CORPUS // 2),
        strict=True,
    ):
        contents[1::2] = answers[1::2]
        messages = chat_of(contents)
        expected = case.control_ids(case.ids(case.text(chat_of(list(map(harmless, contents))))))
        num_checked += len(contents)
        if (prompt_ids := rendered_or_refused(case, messages)) is None:
            num_refused += 1
            continue
        assert case.control_ids(prompt_ids.tolist()) == expected
        assert case.decoded(prompt_ids) == case.text(messages)
    assert num_checked >= NUM_CONTENTS_OF_CORPUS
    assert num_refused == 0 or template.family in REWRITES_TEXT


def rendered_or_refused(case: Case, messages: Sequence[Message]) -> np.ndarray | None:
    """The prompt, None if the template cuts text that may forge."""
    try:
        return case.renderer.render(messages).token_ids
    except TemplateError as error:
        if "cuts or rewrites text" not in str(error):
            raise
        return None


def chat_of(contents: Sequence[str]) -> list[Message]:
    """Questions and answers in turn, as every template takes them."""
    chat: list[Message] = [
        {"role": "user" if k % 2 == 0 else "assistant", "content": content} for k, content in enumerate(contents)
    ]
    return chat[: len(chat) - 1 + len(chat) % 2]


def test_i5_more_than_a_hundred_thousand_random_contents_are_encoded_here_by_make_fuzz() -> None:
    num_pairs = len(KINDS) * len(TEMPLATES)
    num_contents = num_pairs * NUM_CONTENTS + NUM_CONTENTS_OF_TEKKEN + len(corpus_templates()) * NUM_CONTENTS_OF_CORPUS
    assert num_contents * FUZZ_EFFORT >= 100_000 * EFFORT
