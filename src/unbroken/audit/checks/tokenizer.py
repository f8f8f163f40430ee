"""What the tokenizer does: ids that change when decoded and encoded again, and control tokens that messages forge."""

from __future__ import annotations

import random
from collections import Counter

from unbroken.audit.conversations import TOOLS, make_call
from unbroken.audit.report import DriftFinding, ForgeryFinding
from unbroken.audit.subject import Subject
from unbroken.errors import MessagesError, TemplateError
from unbroken.messages import Message
from unbroken.retokenising.changes import align

_NUM_SEQUENCES, _NUM_IDS = 200, 32
_MAX_TOKENS = 2048
_TOKENS_PER_MESSAGE = 32
_NUM_EXAMPLES = 6


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
        {"role": "assistant", "content": "", "tool_calls": [make_call("search", "callzqe0z", {"query": "x"})]},
        {"role": "tool", "content": content, "name": "search", "tool_call_id": "callzqe0z"},
    ]
