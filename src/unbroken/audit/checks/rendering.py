"""Whether our rendering, on which the other checks rely, equals transformers' own, character for character."""

from __future__ import annotations

import hashlib
from itertools import islice
from typing import Any

import jinja2

from unbroken.audit.config import AuditConfig
from unbroken.audit.conversations import TOOLS, ConversationMaker
from unbroken.audit.report import RenderingFinding
from unbroken.audit.subject import Subject
from unbroken.messages import Message


def find_rendering(subject: Subject, config: AuditConfig, *, max_calls: int, with_system: bool) -> RenderingFinding:
    """Compare the renderings of random conversations that the template accepts."""
    maker = ConversationMaker(
        seed=config.seed, max_calls=max_calls, with_reasoning=subject.renders_reasoning, with_system=with_system
    )
    num_compared = num_same = 0
    example, texts = "", hashlib.sha256()
    for conversation in islice(maker.draw_conversations(), config.num_conversations):
        ours = subject.render_text(conversation.messages, tools=TOOLS, add_generation_prompt=True)
        texts.update(f"{ours}\0".encode())
        if ours is None:
            continue
        theirs = _render_with_transformers(subject, conversation.messages)
        num_compared += 1
        num_same += ours == theirs
        if ours != theirs and not example:
            example = _describe_difference(ours, theirs)
    return RenderingFinding(
        num_compared=num_compared, num_same=num_same, text_sha256=texts.hexdigest(), example=example
    )


def _render_with_transformers(subject: Subject, messages: list[Message]) -> str:
    converted: Any = subject.facts.message_format.convert(messages)
    try:
        text: str = subject.tokenizer.apply_chat_template(
            converted,
            chat_template=subject.facts.source,
            tools=list(TOOLS),
            tokenize=False,
            add_generation_prompt=True,
            **subject.options,
        )
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return text


def _describe_difference(ours: str, theirs: str) -> str:
    """Quote both texts around the first character that differs."""
    place = next((k for k, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    start = max(place - 20, 0)
    return f"ours has {ours[start : place + 40]!r}, transformers' {theirs[start : place + 40]!r}"
