"""Judge and count the bridges of random conversations over one generated template."""

import random
from collections import Counter

import jinja2
import numpy as np

from support.template_generator import OPTION, GeneratedTemplate, conversations_of, random_template, random_tools
from support.tokenizers import make_tokenizer
from unbroken.rendering.base import Bridge
from unbroken.rendering.template import TemplateRenderer

END = "<|im_end|>"


def judge_seed(seed: int, num_conversations: int) -> tuple[GeneratedTemplate, Counter[str], list[str]]:
    """The template of a seed, what became of the bridges of random conversations, and the wrong ones described."""
    template = random_template(random.Random(seed))
    return template, *judge_template(template, seed, num_conversations)


def judge_template(template: GeneratedTemplate, seed: int, num_conversations: int) -> tuple[Counter[str], list[str]]:
    """Count what became of the bridges of random conversations, and describe the wrong ones."""
    rng = random.Random(seed)
    options = {OPTION: "option"}
    tokenizer = make_tokenizer(template.source)
    renderer = TemplateRenderer(tokenizer, template_kwargs=options)
    stop = [tokenizer.convert_tokens_to_ids(END)]
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    tools = random_tools(rng)
    for history, turn, new, mark in conversations_of(rng, num_conversations):
        tools = random_tools(rng) if rng.random() < 0.2 else tools
        try:
            full = tokenizer.apply_chat_template(
                [*history, turn, *new], tools=list(tools) or None, tokenize=False, add_generation_prompt=True, **options
            )
        except (jinja2.TemplateError, TypeError):
            counts["not accepted"] += 1
            continue
        earlier = history if rng.random() < 0.6 else None
        outcome = renderer.bridge_to_next_turn([], stop, new, assistant=turn, tools=tools, earlier=earlier)
        if not isinstance(outcome, Bridge):
            counts[outcome.reason.value] += 1
            continue
        start = full.index(END, full.index(mark)) + len(END)
        text = tokenizer.decode(outcome.bridge_ids.tolist())
        ids = tokenizer(full, add_special_tokens=False)["input_ids"]
        if text == full[start:] and np.array_equal(ids[len(ids) - len(outcome.bridge_ids) :], outcome.bridge_ids):
            counts["exact"] += 1
            continue
        counts["wrong"] += 1
        wrong.append(f"{[*history, turn, *new]}, {len(tools)} tools: {text!r} for {full[start:]!r}")
    return counts, wrong
