"""What probing finds of a chat template with a tokenizer's control tokens is found once in a process of tests.

A renderer compiles its template and probes it in 15 ms, and tests make thousands of a few hundred kinds. What is found
depends on the template's source and variables, on the control tokens, and on the ids that end a turn; that is compared
here. A template that reads the time is always probed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache, wraps
from typing import Any

from unbroken.rendering import chat_template, template
from unbroken.rendering.chat_template import ChatTemplate
from unbroken.rendering.encoding.tokenizer import AddedTokens, TokenizerFacts
from unbroken.rendering.parsing import detection
from unbroken.rendering.parsing.detection import _ReadBackProbe

_NUM_TEMPLATES = 2_000


def remember_probes() -> None:
    """From now on, in this process."""
    chat_template._compile = lru_cache(_NUM_TEMPLATES)(chat_template._compile.__wrapped__)
    template.probe_template = _remembered(template.probe_template, _describe_given)
    detection._detect_format = _remembered(detection._detect_format, _describe_probe)
    _ReadBackProbe.adapt = _remembered(_ReadBackProbe.adapt, _describe_probe)


def _remembered(find: Callable[..., Any], describe: Callable[..., Hashable | None]) -> Callable[..., Any]:
    known: dict[Hashable, Any] = {}

    @wraps(find)
    def look_up(*given: Any, **named: Any) -> Any:
        kind = describe(*given, **named)
        if kind is None:
            return find(*given, **named)
        if kind not in known:
            known[kind] = find(*given, **named)
        return known[kind]

    return look_up


def _describe_given(
    of: ChatTemplate, tokenizer: TokenizerFacts, control: AddedTokens, stop_token_ids: Any
) -> Hashable | None:
    if (kind := _describe_template(of)) is None:
        return None
    return kind, _describe_control(control), tokenizer.eos_token_id, tokenizer.vocab_size, tuple(stop_token_ids)


def _describe_probe(probe: _ReadBackProbe, *given: Hashable, **named: Hashable) -> Hashable | None:
    if (kind := _describe_template(probe._template)) is None:
        return None
    tokens = probe._tokens
    stops = tuple(tokens.stops), tokens.num_stop_ids
    control = _describe_control(tokens.control)
    return kind, control, stops, probe._message_format, probe._reasoning, given, *named.items()


def _describe_template(of: ChatTemplate) -> Hashable | None:
    if "strftime_now" in of.source:
        return None
    return of.source, repr(of._variables), of._limits


def _describe_control(control: AddedTokens) -> Hashable:
    return tuple(control._ids.items()), control._all
