"""Judge and count the bridges of random conversations over one generated template."""

import random
from collections import Counter
from collections.abc import Sequence

import jinja2
import numpy as np

from support.corpus_oracle import Judgement
from support.template_generator import OPTION, GeneratedTemplate, conversations_of, random_template, random_tools
from support.tokenizers import make_tokenizer
from unbroken.messages import Message
from unbroken.rendering.base import Bridge
from unbroken.rendering.template import TemplateRenderer

END = "<|im_end|>"
EXTRA_TEXT = "<|im_start|>system\nextra<|im_end|>\n"


def judge_seed(seed: int, num_conversations: int) -> tuple[GeneratedTemplate, Counter[Judgement], list[str]]:
    """The template of a seed, what became of the bridges of random conversations, and the wrong ones described."""
    template = random_template(random.Random(seed))
    return template, *judge_template(template, seed, num_conversations)


def judge_template(
    template: GeneratedTemplate, seed: int, num_conversations: int
) -> tuple[Counter[Judgement], list[str]]:
    """Count what became of the bridges of random conversations, and describe the wrong ones."""
    rng = random.Random(seed)
    options = {OPTION: "option"}
    tokenizer = make_tokenizer(template.source)
    renderer = TemplateRenderer(tokenizer, template_kwargs=options)
    stop = [tokenizer.convert_tokens_to_ids(END)]
    counts: Counter[Judgement] = Counter()
    wrong: list[str] = []
    tools = random_tools(rng)
    for history, turn, new, mark in conversations_of(rng, num_conversations):
        tools = random_tools(rng) if rng.random() < 0.2 else tools
        try:
            full = tokenizer.apply_chat_template(
                [*history, turn, *new], tools=list(tools) or None, tokenize=False, add_generation_prompt=True, **options
            )
        except (jinja2.TemplateError, TypeError):
            counts[Judgement.NOT_ACCEPTED] += 1
            continue
        outcome = renderer.bridge_to_next_turn([], stop, new, assistant=turn, tools=tools, earlier=history)
        rest = full[full.index(END, full.index(mark)) + len(END) :] if mark in full else ""
        is_possible = _shows_in_order(new, rest)
        if not isinstance(outcome, Bridge):
            counts[Judgement.REFUSED if is_possible else Judgement.IMPOSSIBLE] += 1
            continue
        text = tokenizer.decode(outcome.bridge_ids.tolist())
        ids = tokenizer(full, add_special_tokens=False)["input_ids"]
        is_same = text == rest and np.array_equal(ids[len(ids) - len(outcome.bridge_ids) :], outcome.bridge_ids)
        counts[Judgement.EXACT if is_possible and is_same else Judgement.WRONG] += 1
        if not (is_possible and is_same):
            wrong.append(f"{[*history, turn, *new]}, {len(tools)} tools: {text!r} for {rest!r}")
    return counts, wrong


def _shows_in_order(new_messages: Sequence[Message], rest: str) -> bool:
    """Whether the text after the turn is each new message once, in order, and the next prompt; `EXTRA` anywhere."""
    written = "".join(f"<|im_start|>{message['role']}\n{message['content']}{END}\n" for message in new_messages)
    return rest.replace(EXTRA_TEXT, "") == f"\n{written}<|im_start|>assistant\n"
