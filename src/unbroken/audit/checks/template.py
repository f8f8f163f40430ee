"""What a template and its tokenizer do with messages: what is carried, what is rewritten, and which ids are forged."""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Iterator
from itertools import islice, product
from typing import Any

import jinja2

from unbroken.audit.config import AuditConfig
from unbroken.audit.conversations import TOOL_NAMES, TOOLS, ConversationMaker
from unbroken.audit.report import (
    LIMITS,
    PARALLEL_LIMITS,
    ArgumentsFinding,
    ArgumentSpelling,
    DriftFinding,
    ForgeryFinding,
    FuzzFinding,
    KindFinding,
    RenderingFinding,
    TemplateKind,
    Trait,
)
from unbroken.audit.subject import Subject
from unbroken.errors import MessagesError, TemplateError
from unbroken.messages import Message, make_call
from unbroken.rendering.base import HistoryEffect, Refusal
from unbroken.rendering.effects import shows_tools
from unbroken.retokenising.changes import align

_SYSTEM, _USER, _TEXT, _RESULT = "Zq8System", "Zq8User", "Zq8Text", "Zq8Result"
JsonStyle = dict[str, Any]
"""Keyword arguments of `json.dumps`."""
_VALUE = {"query": "Größe", "limit": 10, "exact": True, "days": [1, 2]}
_SPACED, _COMPACT = (", ", ": "), (",", ":")
_NUM_SEQUENCES, _NUM_IDS = 200, 32
_MAX_TOKENS = 2048
_TOKENS_PER_MESSAGE = 32
_NUM_EXAMPLES = 6


def find_traits(subject: Subject) -> tuple[Trait, ...]:
    """Find the parts of a conversation that the template does not carry, by rendering some test messages."""
    return tuple(_check_traits(subject))


def find_kind(subject: Subject, traits: tuple[Trait, ...], fuzz: FuzzFinding) -> KindFinding:
    """Find the class from the effects on the history (P2) that the bridges of all conversations saw."""
    ends = subject.facts.turn_ends
    after_user, after_results = (fuzz.history.get(follows, {}) for follows in ("user", "tool"))
    if isinstance(ends, Refusal) or not {**after_user, **after_results}:
        details = [ends.detail] if isinstance(ends, Refusal) else [share.detail for share in fuzz.refused]
        detail = _find_error(subject) or next(iter(details), "")
        return KindFinding(kind=TemplateKind.UNDERIVABLE, traits=traits, detail=detail)
    kind = TemplateKind.APPEND_ONLY
    if HistoryEffect.DROPS_REASONING in after_user:
        kind = TemplateKind.STRIPS_REASONING_ON_USER
    if HistoryEffect.DROPS_REASONING in after_results:
        kind = TemplateKind.STRIPS_REASONING
    if HistoryEffect.REWRITTEN in after_user or HistoryEffect.REWRITTEN in after_results:
        kind = TemplateKind.REWRITES_HISTORY
    return KindFinding(kind=kind, traits=traits)


def find_max_calls(traits: tuple[Trait, ...]) -> int:
    """The number of calls in one turn that the template carries; 3 stands for any number."""
    if (LIMITS - PARALLEL_LIMITS) & set(traits):
        return 0
    return 1 if PARALLEL_LIMITS & set(traits) else 3


def _find_error(subject: Subject) -> str:
    """What is wrong with the template's rendering of one short question; empty if it renders it."""
    question: Message = {"role": "user", "content": _USER}
    try:
        text = subject.template_renderer.render_text([question], add_generation_prompt=True)
    except TemplateError as error:
        return str(error)
    return "" if _USER in text else "the template leaves out the text of a question"


def _check_traits(subject: Subject) -> Iterator[Trait]:
    user: Message = {"role": "user", "content": _USER}
    system: Message = {"role": "system", "content": _SYSTEM}
    text: Message = {"role": "assistant", "content": _TEXT}
    renders_calls = subject.facts.message_format.renders_calls
    if not shows_tools(subject.template_renderer, TOOLS):
        yield Trait.IGNORES_TOOLS
    if not renders_calls:
        yield Trait.RENDERS_NO_CALLS
    calls = [_make_turn_of_calls(1), *_make_results(1)] if renders_calls else [text, *_make_results(1)]
    answered = subject.render_text([user, *calls], tools=TOOLS, add_generation_prompt=True)
    if answered is None:
        yield Trait.REFUSES_RESULTS
    elif f"{_RESULT}0" not in answered:
        yield Trait.DROPS_RESULTS
    elif renders_calls:
        yield from _check_turns_of_calls(subject, user)
    yield from _check_system(subject, [system, user], Trait.REFUSES_SYSTEM, Trait.DROPS_SYSTEM)
    late = [user, text, system, user]
    yield from _check_system(subject, late, Trait.REFUSES_LATE_SYSTEM, Trait.DROPS_LATE_SYSTEM)
    if subject.render_text([user, text, user, user]) is None:
        yield Trait.REFUSES_USERS_IN_A_ROW
    if not subject.renders_reasoning:
        yield Trait.RENDERS_NO_REASONING


def _check_system(subject: Subject, messages: list[Message], refuses: Trait, drops: Trait) -> Iterator[Trait]:
    rendered = subject.render_text(messages, add_generation_prompt=True)
    if rendered is None:
        yield refuses
    elif _SYSTEM not in rendered:
        yield drops


def _check_turns_of_calls(subject: Subject, user: Message) -> Iterator[Trait]:
    """What a template that carries one call and its result does not carry: a second call, or text beside calls."""
    two = [user, _make_turn_of_calls(2), *_make_results(2)]
    answered = subject.render_text(two, tools=TOOLS, add_generation_prompt=True)
    if answered is None:
        yield Trait.REFUSES_PARALLEL_CALLS
    elif f"{_RESULT}1" not in answered or "Zq8Argument1" not in answered:
        yield Trait.DROPS_PARALLEL_CALLS
    beside: Message = {**_make_turn_of_calls(1), "content": _TEXT}
    rendered = subject.render_text([user, beside, *_make_results(1)], tools=TOOLS)
    if rendered and _TEXT not in rendered:
        yield Trait.DROPS_TEXT_BESIDE_CALLS


def _make_turn_of_calls(num: int) -> Message:
    calls = [make_call(f"callzqe{k}z", TOOL_NAMES[k], {"value": f"Zq8Argument{k}"}) for k in range(num)]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _make_results(num: int) -> list[Message]:
    return [
        {"role": "tool", "content": f"{_RESULT}{k}", "name": TOOL_NAMES[k], "tool_call_id": f"callzqe{k}z"}
        for k in range(num)
    ]


def find_arguments(subject: Subject) -> ArgumentsFinding:
    """Find the template's JSON style, and which other spellings it rewrites to that style."""
    form = subject.facts.message_format.arguments.value
    style = find_json_style(subject)
    if style is None:
        return ArgumentsFinding(form=form, is_json=False, spellings=())
    return ArgumentsFinding(
        form=form,
        is_json=True,
        spellings=tuple(_check_spelling(subject, style, name, sampled) for name, sampled in _make_spellings(style)),
    )


def find_json_style(subject: Subject) -> JsonStyle | None:
    """Find how the template writes an object; None if it writes no JSON, or no calls."""
    if not subject.facts.message_format.renders_calls:
        return None
    rendered = _render(subject, _VALUE)
    for separators, ensure_ascii, sort_keys, indent in product(
        (_SPACED, _COMPACT), (False, True), (False, True), (None, 2, 4)
    ):
        style: JsonStyle = {
            "separators": separators if indent is None else (",", ": "),
            "ensure_ascii": ensure_ascii,
            "sort_keys": sort_keys,
            "indent": indent,
        }
        if json.dumps(_VALUE, **style) in rendered:
            return style
    return None


def _make_spellings(style: JsonStyle) -> Iterator[tuple[str, str]]:
    """Make arguments in the template's style with one thing changed, each with its name."""
    plain: JsonStyle = {**style, "indent": None, "sort_keys": False}
    words = {"query": "Oslo", "limit": 10}
    yield "spaced", json.dumps(words, **{**plain, "separators": _SPACED})
    yield "compact", json.dumps(words, **{**plain, "separators": _COMPACT})
    yield "order of keys", json.dumps({"query": "Oslo", "limit": 10, "exact": True}, **plain)
    yield "unicode as it is", json.dumps({"query": "Größe"}, **{**plain, "ensure_ascii": False})
    yield "unicode escaped", json.dumps({"query": "Größe"}, **{**plain, "ensure_ascii": True})
    for name, number in (("trailing zero", "1.50"), ("exponent", "1e3")):
        yield name, json.dumps({"limit": 0}, **plain).replace("0", number)
    yield "escaped slash", json.dumps({"query": "a/b"}, **plain).replace("/", "\\/")


def _check_spelling(subject: Subject, style: JsonStyle, name: str, sampled: str) -> ArgumentSpelling:
    value = json.loads(sampled)
    rendered = _render(subject, value)
    is_kept = sampled in rendered
    canonical = json.dumps(value, **style)
    return ArgumentSpelling(
        name=name, sampled=sampled, is_kept=is_kept, rendered="" if is_kept or canonical not in rendered else canonical
    )


def _render(subject: Subject, value: dict[str, Any]) -> str:
    turn: Message = {"role": "assistant", "content": "", "tool_calls": [make_call("callzqe0z", "search", value)]}
    return subject.render_text([{"role": "user", "content": "hi"}, turn], tools=TOOLS) or ""


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


def find_drift(subject: Subject, *, seed: int) -> DriftFinding:
    """Decode and encode random sequences of ordinary ids."""
    rng = random.Random(seed)
    control = subject.facts.control_tokens.ids
    vocabulary = subject.tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False)
    ids = sorted(set(vocabulary.values()) - control)
    num_sequences = num_ids = 0
    for _ in range(_NUM_SEQUENCES):
        before = rng.choices(ids, k=_NUM_IDS)
        after = subject.encode(subject.decode(before))
        num_sequences += before != after
        num_ids += sum(gap.before[1] - gap.before[0] for gap in align(before, after).gaps)
    return DriftFinding(
        num_sequences=_NUM_SEQUENCES,
        num_ids=_NUM_SEQUENCES * _NUM_IDS,
        num_sequences_changed=num_sequences,
        num_ids_changed=num_ids,
    )


def find_forgery(subject: Subject, *, max_calls: int) -> ForgeryFinding:
    """Put the texts of control tokens into tools' answers, or into user messages where the template has no tools."""
    role = "tool" if max_calls else "user"
    control = subject.facts.control_tokens
    tried = sorted(control.texts, key=lambda text: control.get_id(text) or 0)[:_MAX_TOKENS]
    naive: list[str] = []
    ours: list[str] = []
    num_refused = 0
    for start in range(0, len(tried), _TOKENS_PER_MESSAGE):
        tokens = tried[start : start + _TOKENS_PER_MESSAGE]
        naive += _find_forged(
            subject, tokens, _encode_naively(subject, role, tokens), _encode_naively(subject, role, [])
        )
        found, expected = _encode_by_us(subject, role, tokens), _encode_by_us(subject, role, [])
        if found is None or expected is None:
            num_refused += len(tokens)
        else:
            ours += _find_forged(subject, tokens, found, expected)
    return ForgeryFinding(
        role=role,
        num_tried=len(tried),
        num_forged_naively=len(naive),
        num_forged_by_us=len(ours),
        num_refused_by_us=num_refused,
        # Tokens that the template itself writes come first.
        examples=tuple(sorted(naive, key=lambda token: token not in subject.facts.source)[:_NUM_EXAMPLES]),
    )


def _find_forged(subject: Subject, tokens: list[str], found: list[int], expected: list[int]) -> list[str]:
    """The tokens whose ids occur more often in `found`."""
    counts, usual = Counter(found), Counter(expected)
    return [token for token in tokens if counts[i := subject.facts.control_tokens.get_id(token) or 0] > usual[i]]


def _encode_naively(subject: Subject, role: str, tokens: list[str]) -> list[int]:
    tools = TOOLS if role == "tool" else ()
    text = subject.render_text(_make_messages(role, tokens), tools=tools, add_generation_prompt=True)
    return subject.encode(text or "")


def _encode_by_us(subject: Subject, role: str, tokens: list[str]) -> list[int] | None:
    try:
        prompt = subject.renderer.render(_make_messages(role, tokens), tools=TOOLS if role == "tool" else ())
    except (MessagesError, TemplateError):
        return None
    ids: list[int] = prompt.token_ids.tolist()
    return ids


def _make_messages(role: str, tokens: list[str]) -> list[Message]:
    content = f"It says {' and '.join(tokens)} here."
    if role == "user":
        return [{"role": "user", "content": content}]
    return [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [make_call("callzqe0z", "search", {"query": "x"})]},
        {"role": "tool", "content": content, "name": "search", "tool_call_id": "callzqe0z"},
    ]
