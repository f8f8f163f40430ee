"""Whether the parser reads back random turns that the template writes."""

from __future__ import annotations

import json
from collections import Counter

from unbroken.audit.completions import CompletionText, make_completion
from unbroken.audit.conversations import TOOLS, ConversationMaker
from unbroken.audit.report import RoundTripFinding
from unbroken.audit.subject import Subject
from unbroken.messages import Message
from unbroken.rendering.base import ParsedResponse, ToolCallStatus
from unbroken.types import token_ids

NUM_TURNS = 60
_HISTORY: tuple[Message, ...] = ({"role": "user", "content": "What is known?"},)


def find_round_trip(subject: Subject, *, seed: int, max_calls: int) -> RoundTripFinding:
    """Parse turns of text and of calls, with and without reasoning."""
    maker = ConversationMaker(seed=seed, max_calls=max_calls, with_reasoning=subject.renders_reasoning)
    differences: Counter[str] = Counter()
    num_same = num_not_comparable = 0
    example = ""
    for k in range(NUM_TURNS):
        turn = maker.make_turn(min((0, 1, 1, 2)[k % 4], max_calls), with_reasoning=k % 3 == 0)
        sampled = make_completion(
            subject, _HISTORY, turn, tools=TOOLS, next_role="tool" if "tool_calls" in turn else "user"
        )
        if sampled is None:
            num_not_comparable += 1
            continue
        found = _find_differences(turn, sampled, _parse(subject, sampled))
        num_same += not found
        differences.update(found.keys())
        example = example or "; ".join(found.values())
    return RoundTripFinding(
        parser=getattr(subject.renderer, "parser_name", subject.renderer_name),
        num_turns=NUM_TURNS,
        num_same=num_same,
        num_not_comparable=num_not_comparable,
        differences=dict(sorted(differences.items())),
        example=example,
    )


def _parse(subject: Subject, sampled: CompletionText) -> ParsedResponse:
    return subject.renderer.parse_response(
        token_ids(subject.encode(sampled.body + sampled.stop)),
        prompt_ids=token_ids(subject.encode(sampled.prompt)),
        tools=TOOLS,
    )


def _find_differences(turn: Message, sampled: CompletionText, parsed: ParsedResponse) -> dict[str, str]:
    """Describe each part that is read differently. The template may trim white space at the ends of texts."""
    found = {}
    content, reasoning = str(turn["content"]).strip(), turn.get("reasoning_content", "").strip()
    if parsed.content.strip() != content:
        found["content"] = f"content {content!r} is read as {parsed.content.strip()!r}"
    if reasoning in sampled.body and parsed.reasoning.strip() != reasoning:
        found["reasoning"] = f"reasoning {reasoning!r} is read as {parsed.reasoning.strip()!r}"
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in turn.get("tool_calls", [])]
    read = [(call.name, call.arguments) for call in parsed.tool_calls if call.status is ToolCallStatus.OK]
    if calls != read:
        written = [f"{call.status.value} {call.raw!r}" for call in parsed.tool_calls] or [f"content {parsed.content!r}"]
        found["calls"] = f"the calls {json.dumps(calls, ensure_ascii=False)} are read as {', '.join(written)}"
    return found
