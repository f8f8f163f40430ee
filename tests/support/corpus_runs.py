"""Judge and count the bridges of random conversations over one template of the corpus."""

import random
import re
from collections import Counter
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from support.conversations import WORDS
from support.corpus import TEKKEN, CorpusTemplate
from support.corpus_conversations import JudgedConversation, judged_conversations, random_pool, small_pool
from support.corpus_oracle import CorpusOracle, Judgement, facts_of
from unbroken.rendering.base import Bridge, BridgeOutcome, HistoryEffect, Refusal
from unbroken.rendering.template import TemplateRenderer

Damage = Callable[[TemplateRenderer, CorpusOracle, JudgedConversation, BridgeOutcome], BridgeOutcome]
TOOLS: tuple[Any, ...] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"It can {name}.",
            "parameters": {"type": "object", "properties": {"a_text": {"type": "string", "description": "any"}}},
        },
    }
    for name in ("add", "search", "get_weather")
)
_NUM_RARE = 6
_MAX_ROUNDS = 4


@dataclass(slots=True)
class Tally:
    """The counted results for one template."""

    judgements: Counter[Judgement] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    num_extended: int = 0
    """Bridges that also passed the end-to-end check."""
    bridged: Counter[str] = field(default_factory=Counter)
    """Exact bridges by what they had to do with; see `_describe`."""
    wrong: list[str] = field(default_factory=list)
    """Descriptions of wrong bridges."""
    history: Counter[tuple[HistoryEffect, bool]] = field(default_factory=Counter)
    """Exact bridges by what they say of the history (P2) and whether the template kept it."""

    @property
    def num_possible(self) -> int:
        """Turns that can be bridged."""
        return sum(self.judgements[kind] for kind in (Judgement.EXACT, Judgement.REFUSED, Judgement.WRONG))

    @property
    def exact_share(self) -> float:
        return self.judgements[Judgement.EXACT] / max(self.num_possible, 1)


def run_until_bridged(template: CorpusTemplate, num_conversations: int, kinds: Set[str]) -> Tally:
    """Like `run_template`, in more rounds until bridges of all these `kinds` (`Tally.bridged`) were exact."""
    tally = Tally()
    for round_number in range(_MAX_ROUNDS):
        run_template(template, num_conversations, round_number=round_number, tally=tally)
        if kinds <= tally.bridged.keys():
            break
    return tally


def kinds_of(template: CorpusTemplate) -> frozenset[str]:
    """The kinds of bridges (`Tally.bridged`) that a template of these facts has if it has any."""
    facts = facts_of(template)
    kinds = {"tools", "no tools", "text", "cut", "reasoning", "earlier turns"}
    kinds |= {"calls", "results"} if facts.most_calls else set()
    return frozenset(kinds | ({"options"} if len(facts.options) > 1 else set()))


def run_template(
    template: CorpusTemplate,
    num_conversations: int,
    damage: Damage | None = None,
    *,
    round_number: int = 0,
    tally: Tally | None = None,
    kind: str = "bytes",
) -> Tally:
    """Judge so many turns that can be bridged, with all options, with and without tools, and add them to the tally.

    Where the template takes few conversations, there are fewer: at most four times as many are tried. They are seeded
    by the template's name and the round. `damage` may return another outcome in place of the renderer's, to see it
    noticed; the first options only then.
    """
    tally, facts = tally or Tally(), facts_of(template)
    tokenizer = template.tokenizer(kind=kind) if kind != "bytes" else template.tokenizer()
    variants = [(options, TOOLS) for options in facts.options] + [({}, ())] if damage is None else [({}, TOOLS)]
    for number, (options, tools) in enumerate(variants):
        rng = random.Random(f"{template.name} {number} {round_number}")
        renderer = TemplateRenderer(tokenizer, template_kwargs=options)
        oracle = CorpusOracle(template, tokenizer, options, tools, keeps_text=kind in ("bytes", TEKKEN))
        most = facts.most_calls
        is_main = number == 0
        pool = random_pool(rng, num_rare=_NUM_RARE, most_calls=most) if is_main else small_pool(most_calls=most)
        num = num_conversations if damage else num_conversations * 6 // 10
        num = num if is_main else -(-num_conversations * 4 // 10 // (len(variants) - 1))
        num_literal = -(-num // 8) if is_main else num // 8
        for words, count in ((WORDS, num - num_literal), ((*WORDS, *_literals(template)), num_literal)):
            conversations = judged_conversations(rng, pool, words, most_calls=most)
            wanted = tally.num_possible + count
            for conversation in islice(conversations, 4 * count):
                if tally.num_possible == wanted:
                    break
                _judge(tally, renderer, oracle, conversation, words is WORDS, damage)
    return tally


def _judge(
    tally: Tally,
    renderer: TemplateRenderer,
    oracle: CorpusOracle,
    conversation: JudgedConversation,
    is_benign: bool,
    damage: Damage | None,
) -> None:
    outcome = renderer.bridge_to_next_turn(
        [],
        oracle.sampled_ids_of(conversation),
        conversation.new_messages,
        assistant=conversation.assistant,
        tools=oracle.tools,
        earlier=conversation.history,
    )
    if damage is not None:
        outcome = damage(renderer, oracle, conversation, outcome)
    judgement = oracle.judge(conversation, outcome, is_benign=is_benign)
    is_whole = isinstance(outcome, Bridge) and not conversation.is_cut and oracle.keeps_text
    if judgement is Judgement.EXACT and is_whole and tally.judgements[judgement] % 4 == 0:
        extends = oracle.extends(conversation, outcome)
        judgement = Judgement.WRONG if extends is False else judgement
        tally.num_extended += extends is True
    tally.judgements[judgement] += 1
    if judgement is Judgement.EXACT:
        tally.bridged.update(_describe(oracle, conversation))
        assert isinstance(outcome, Bridge)
        if outcome.history is not None and (keeps := oracle.keeps_history(conversation)) is not None:
            tally.history[outcome.history, keeps] += 1
    if judgement is Judgement.REFUSED and isinstance(outcome, Refusal):
        tally.refusals[outcome.reason] += 1
    if judgement is Judgement.WRONG and isinstance(outcome, Bridge):
        text = oracle.tokenizer.decode(outcome.bridge_ids.tolist())
        tally.wrong.append(f"{oracle.options} {conversation.everything}\nbridge {text!r}")


def _describe(oracle: CorpusOracle, conversation: JudgedConversation) -> list[str]:
    """What a bridge has to do with: options, tools, calls, results, a cut turn, reasoning, an earlier turn."""
    turns = [message for message in conversation.everything if message["role"] == "assistant"]
    found = {
        "options": bool(oracle.options),
        "tools": bool(oracle.tools),
        "no tools": not oracle.tools,
        "calls": "tool_calls" in conversation.assistant,
        "results": conversation.new_messages[0]["role"] == "tool",
        "cut": conversation.is_cut,
        "text": conversation.new_messages[0]["role"] == "user",
        "reasoning": any("reasoning_content" in turn for turn in turns),
        "earlier turns": len(turns) > 1,
    }
    return [name for name, is_there in found.items() if is_there]


def _literals(template: CorpusTemplate) -> list[str]:
    """Some of what the template holds between quotes, and tags."""
    quoted = re.findall(r"""['"]([^'"\n\\]{2,30})['"]""", template.source)
    texts = sorted({text for text in quoted if text.strip()})
    return [*random.Random(template.name).sample(texts, min(len(texts), 16)), "<think>", "</think>", "/no_think"]
