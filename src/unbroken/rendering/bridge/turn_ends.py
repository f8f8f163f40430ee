r"""Finds how a template ends an assistant turn, by probing it, and proves where sampling may stop.

Worked through for five templates (A is the turn's text, the next message follows `/`):

                last turn          turn in mid-conversation
    ChatML      A<|im_end|>        A<|im_end|>\n / <|im_start|>user    sequence (<|im_end|>,), stop <|im_end|>
    two tokens  A<|e1|><|e2|>      A<|e1|><|e2|> / <|user|>            sequence (<|e1|>, <|e2|>), stop <|e2|>
    gpt-oss     A<|return|>        A<|end|> / <|start|>user            sequence (), last_turn_ends {<|return|>: <|end|>}
    GLM         A                  A / <|user|>, A / <|observation|>   the next header ends the turn
    Kimi-K3     A<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>          stop <|end_of_msg|>

A stop may not also stand inside a turn of reasoning, text and calls, as Kimi-K3's `<|close|>` does after the reasoning:
sampling would end there. Stops are found for each kind of turn. A kind that ends only with a token that also stands
inside turns, as Solar's text ends like its reasoning, has none: the tokenizer or the caller must name one.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from unbroken.rendering.base import RefusalReason
from unbroken.rendering.bridge.refusal import BridgeRefusedError
from unbroken.rendering.bridge.turn_examples import NEXT_TEXT, USER, TurnExamples, build_turn, count_shared
from unbroken.rendering.encoding.tokenizer import AddedTokens
from unbroken.rendering.jinja.chat_template import ChatTemplate
from unbroken.rendering.message_format import (
    PROBE_ARGUMENT,
    PROBE_CONTENT,
    PROBE_NAMES,
    PROBE_USER,
    MessageFormat,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnEnds:
    """The control tokens that end an assistant turn."""

    tokens: frozenset[str]
    """All of them; the first one after a turn's text begins the end of the turn."""
    stops: frozenset[str]
    """Those that the model samples last, for `SamplingParams.stop_token_ids`: none of them stands inside a turn."""
    without_stop: tuple[str, ...] = ()
    """The kinds of turns that end with none of the stops, such as "text": only a stop from elsewhere ends them."""
    inside: frozenset[str] = frozenset()
    """The control tokens that stand inside turns, before their end."""
    ambiguous: frozenset[str] = frozenset()
    """The ends that begin a longer end and stand inside a turn as well: a turn that was cut there has not ended."""
    endings: frozenset[str] = frozenset()
    """The texts from the first of the tokens to the stop, with all that the template writes between them."""
    sequence: tuple[str, ...]
    """Those of one turn, in order. The sampled stop token may be any of them."""
    last_turn_ends: Mapping[str, str]
    """The end of a conversation's last turn -> the end that replaces it in mid-conversation."""
    headers: frozenset[str]
    """Those that are headers of the next message; empty if turns have their own ends."""


class TurnEndProbe:
    """Finds the turn ends of one template by rendering probes."""

    def __init__(self, template: ChatTemplate, message_format: MessageFormat, control: AddedTokens) -> None:
        self._control = control
        self._turns = TurnExamples(template, message_format, control)
        self._examples = self._turns.build()
        self._openers = self._turns.find_openers()
        self.tokens_inside = frozenset(token for example in self._examples for token in example.inside)
        """The control tokens that stand inside turns, before their end."""

    def find_turn_ends(self) -> TurnEnds:
        """Find the tokens that end a turn.

        Raises `BridgeRefusedError` if no control token is between an assistant turn and a user message.
        """
        next_tokens = {role: self._find_tokens_before_next(role) for role in ("user", "tool", "system")}
        if not next_tokens["user"]:
            raise BridgeRefusedError(
                RefusalReason.UNDERIVABLE, "no control token between an assistant turn and a user message after it"
            )
        first = next_tokens["user"][0]
        last = self._find_last_turn_end()
        headers = frozenset(tokens[0] for tokens in next_tokens.values() if tokens)
        call_end = self._find_end_of_calls()
        if self._opens_user_message(first) and (not last or len(headers) > 1):
            headers |= call_end
            return self._prove(TurnEnds(tokens=headers, stops=headers, sequence=(), last_turn_ends={}, headers=headers))
        sequence = tuple(last[: count_shared(last, next_tokens["user"])])
        return self._prove(
            TurnEnds(
                tokens=frozenset({first, *last, *call_end}),
                stops=frozenset(({*sequence[-1:], *last[-1:]} or {first}) | call_end),
                sequence=sequence,
                last_turn_ends={} if sequence else dict.fromkeys(last, first),
                headers=frozenset(),
            )
        )

    def find_generation_prompt(self) -> str:
        """The text that opens an assistant turn; empty if the template does not write one on its own."""
        without, with_prompt = self._turns.render([USER]), self._turns.render([USER], add_generation_prompt=True)
        return with_prompt[len(without) :] if with_prompt.startswith(without) else ""

    def _prove(self, found: TurnEnds) -> TurnEnds:
        """Keep the stops that stand only at the end of a turn, and find one for each example that is left without."""
        impossible = self.tokens_inside if found.headers else self.tokens_inside | self._openers
        stops = set(found.stops - impossible)
        without_stop, whole_ends = [], set()
        for example in self._examples:
            at_end, *before_next = [[match.token for match in self._control.find(tail)] for tail in example.tails]
            written = at_end or [token for tail in before_next for token in tail]
            if len(at_end) == 1:
                whole_ends.add(at_end[0])
            if not written or not stops.isdisjoint([*written, *itertools.chain(*before_next)]):
                continue
            possible = next((token for token in written if token not in impossible), None)
            if possible is None:
                without_stop.append(example.description)
            else:
                stops.add(possible)
        tokens = (found.tokens - self._openers if not found.headers else found.tokens) | stops
        return replace(
            found,
            tokens=tokens,
            stops=frozenset(stops),
            without_stop=tuple(dict.fromkeys(without_stop)),
            inside=self.tokens_inside,
            ambiguous=(tokens & self.tokens_inside) - set(found.last_turn_ends.values()) - whole_ends,
            endings=frozenset(self._find_endings(tokens, stops)),
        )

    def _find_endings(self, tokens: Collection[str], stops: Collection[str]) -> Iterator[str]:
        for tail in (tail for example in self._examples for tail in example.tails):
            matches = list(self._control.find(tail))
            stop = next((match.stop for match in matches if match.token in stops), None)
            start = next((match.start for match in matches if match.token in tokens), None)
            if start is not None and stop is not None:
                yield tail[start:stop]

    def _find_last_turn_end(self) -> list[str]:
        """The control tokens after the text of a conversation's last turn, with only white space between them.

        Some templates write a generation prompt after it, though none was asked for.
        """
        text = _get_text_after(self._turns.render([USER, build_turn(has_text=True)]), PROBE_CONTENT)
        found: list[str] = []
        position = 0
        for match in self._control.find(text):
            if (found and text[position : match.start].strip()) or match.token in self._openers:
                break
            found.append(match.token)
            position = match.stop
        return found

    def _find_tokens_before_next(self, role: str) -> list[str]:
        """The control tokens between a turn's text and the text of a next message with this role."""
        following: dict[str, Any] = {"role": role, "content": NEXT_TEXT}
        if role == "tool":
            following |= {"tool_call_id": "callprob1", "name": PROBE_NAMES[0]}
        messages = [USER, build_turn(has_text=True), following]
        text = _get_text_after(self._turns.render(messages, add_generation_prompt=True), PROBE_CONTENT)
        stop = text.find(NEXT_TEXT)
        return [match.token for match in self._control.find(text, 0, stop)] if stop >= 0 else []

    def _opens_user_message(self, token: str) -> bool:
        text = self._turns.render([USER])
        position = text.rfind(PROBE_USER)
        before = {match.token for match in self._control.find(text, 0, max(position, 0))}
        after = {match.token for match in self._control.find(text, max(position, 0))}
        return token in before - after

    def _find_end_of_calls(self) -> set[str]:
        """The last control token of a turn that makes a call, unless it only ends each single call."""
        text = _get_text_after(self._turns.render([USER, build_turn(num_calls=1)]), f"{PROBE_ARGUMENT}0")
        text = text[: next((match.start for match in self._control.find(text) if match.token in self._openers), None)]
        matches = list(self._control.find(text))
        if not matches or text[matches[-1].stop :].strip():
            return set()
        end = matches[-1].token
        two_calls = _get_text_after(self._turns.render([USER, build_turn(num_calls=2)]), f"{PROBE_ARGUMENT}0")
        between, found, _ = two_calls.partition(f"{PROBE_ARGUMENT}1")
        return set() if found and end in between else {end}


def _get_text_after(text: str, sentinel: str) -> str:
    position = text.rfind(sentinel)
    return text[position + len(sentinel) :] if position >= 0 else ""
