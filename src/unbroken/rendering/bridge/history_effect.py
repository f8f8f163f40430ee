r"""Finds what a fresh rendering would have kept of everything before a bridge (P2): `HistoryEffect`.

An exact bridge (P1) leaves that open (R is reasoning, A the turn's text):

    prompt and turn                      the same, once a user message follows           effect
    ..assistant\nA                       ..assistant\nA<|im_end|>\n<|im_start|>user..    KEPT
    ..assistant\n<think>\nR\n</think>A   ..assistant\nA<|im_end|>\n<|im_start|>user..    DROPS_REASONING

The rendering of the conversation up to the end of the turn is compared with the one of the messages before the turn,
which was rendered when the last bridge was built, and with the turn as it was sampled. Only where that differs (a model
that writes `{"a":1}` where the template writes `{"a": 1}`), the turn is rendered too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unbroken.errors import TemplateError
from unbroken.messages import REASONING_KEYS, ToolSchema, get_reasoning
from unbroken.rendering.base import HistoryEffect
from unbroken.rendering.message_format import says_something

_MAX_OPENING = 200
"""How many characters at the end of a prompt may open reasoning."""
_Render = Callable[..., str]
"""`ChatTemplate.render`."""


class HistoryEffects:
    """Finds what a fresh rendering would have kept of everything before a bridge, for one template (P2)."""

    def __init__(self, render: _Render, end_pattern: re.Pattern[str], reasoning_markup: tuple[str, str]) -> None:
        self._render = render
        self._end_pattern = end_pattern
        opening, closing = map(re.escape, reasoning_markup)
        self._empty_reasoning = re.compile(rf"{opening}\s*(?:{closing}\s*)?")
        self._reasoning = re.compile(rf"{opening}(?:(?!{opening}).)*?{closing}\s*|{opening}\s*", re.DOTALL)
        self._open_reasoning = re.compile(rf"{opening}\s*\Z")
        self._opening = re.compile(rf"{opening}\s*(?:{closing}\s*)?\Z")

    def cut_opening(self, prompt: str, text: str) -> str | None:
        """The prompt, or the prompt before reasoning that it opens, with which a text begins; None if with neither."""
        if text.startswith(prompt):
            return prompt
        opened = self._opening.search(prompt, max(len(prompt) - _MAX_OPENING, 0))
        before = "" if opened is None else prompt[: opened.start()]
        return before if before and text.startswith(before) else None

    def find(
        self,
        messages: list[dict[str, Any]],
        turn: int,
        full: str,
        *,
        prompt: str | None,
        tools: Sequence[ToolSchema],
        glue: str,
        writes_calls: bool,
        sampled_text: Callable[[], str],
    ) -> HistoryEffect | None:
        """The effect on `messages` up to the `turn`, whose rendering as part of all of them is `full` + `glue`.

        `prompt` is the rendering of the messages before the turn, if that is known.
        None if the template refuses to render the messages before the turn alone. If not all calls of the turn stand
        in it (`writes_calls`), they are lost in each rendering of it, so that two are equal.
        """
        try:
            if prompt is None:
                prompt = self._render(messages[:turn], tools=tools, add_generation_prompt=True)
            if (effect := self._compare_sampled(prompt, full, sampled_text)) is not None:
                return effect
            if not writes_calls or self._is_lost(messages[turn], sampled_text()):
                return HistoryEffect.REWRITTEN
            return self._compare_rendered(prompt, full, messages, turn, tools=tools, glue=glue)
        except TemplateError:
            return None

    def _is_lost(self, turn: Mapping[str, Any], sampled: str) -> bool:
        """Whether the turn says nothing, though something was sampled: a call that failed is in no message."""
        return not says_something(turn) and bool(
            self._end_pattern.sub("", self._empty_reasoning.sub("", sampled)).strip()
        )

    def _compare_sampled(self, prompt: str, full: str, sampled_text: Callable[[], str]) -> HistoryEffect | None:
        """Compare the turn with its sampled text; None if they differ in more than reasoning."""
        opened = self._open_reasoning.search(prompt, max(len(prompt) - _MAX_OPENING, 0))
        before = prompt if opened is None else prompt[: opened.start()]
        if not full.startswith(before):
            return None
        turn, sampled = full[len(before) :], prompt[len(before) :] + sampled_text()
        if self._is_whole(turn, sampled):
            return HistoryEffect.KEPT
        without = self._empty_reasoning.sub("", turn)
        if not self._reasoning.search(without) and self._is_whole(without, self._reasoning.sub("", sampled)):
            return HistoryEffect.DROPS_REASONING
        return None

    def _compare_rendered(
        self,
        prompt: str,
        full: str,
        messages: list[dict[str, Any]],
        turn: int,
        *,
        tools: Sequence[ToolSchema],
        glue: str,
    ) -> HistoryEffect:
        last = self._render(messages[: turn + 1], tools=tools, add_generation_prompt=False)
        if full.startswith(prompt) and self._is_whole(full, last):
            reasoning = (get_reasoning(messages[turn]) or "").strip()
            return HistoryEffect.KEPT if reasoning in full[len(prompt) :] else HistoryEffect.DROPS_REASONING
        return self._compare_without_reasoning(messages, turn, tools=tools, glue=glue)

    def _compare_without_reasoning(
        self, messages: list[dict[str, Any]], turn: int, *, tools: Sequence[ToolSchema], glue: str
    ) -> HistoryEffect:
        """Compare the renderings of the messages without their reasoning: what differs there, was rewritten."""
        bare = [{key: value for key, value in message.items() if key not in REASONING_KEYS} for message in messages]
        prompt, last, full = (
            self._empty_reasoning.sub("", text)
            for text in (
                self._render(bare[:turn], tools=tools, add_generation_prompt=True),
                self._render(bare[: turn + 1], tools=tools, add_generation_prompt=False),
                self._render(bare, tools=tools, add_generation_prompt=True).removesuffix(glue),
            )
        )
        is_kept = full.startswith(prompt) and self._is_whole(full, last)
        return HistoryEffect.DROPS_REASONING if is_kept else HistoryEffect.REWRITTEN

    def _is_whole(self, text: str, ended: str) -> bool:
        """Whether `ended` is the text and nothing else than the end of the turn."""
        rest = ended[len(text) :].lstrip() if ended.startswith(text) else "not its end"
        return not rest or self._end_pattern.match(rest) is not None
