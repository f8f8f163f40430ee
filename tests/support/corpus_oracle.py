"""Judges the bridges of the corpus' templates with transformers' own rendering.

It shares no code with the code under test. How each family's model ends a turn, and which message format its template
expects, is written by hand here, from the models' documentation and generation configs.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import jinja2

from support.corpus import CorpusTemplate
from support.corpus_conversations import JudgedConversation
from unbroken.messages import Message
from unbroken.rendering.base import Bridge, BridgeOutcome, Closing

Options = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """How models of one family end a turn and how their templates take messages."""

    stop: str
    """The last token that the model samples for a turn of text; empty if nothing in the template ends a turn."""
    stop_of_calls: str = ""
    """The same for a turn that makes calls; the stop of text if empty."""
    in_history: Mapping[str, str] = field(default_factory=dict)
    """What the template writes later on in place of a stop."""
    header_is_stop: bool = False
    """The next message's header ends the turn: `<|user|>`, `<|system|>` or, for results, `<|observation|>`."""
    writes_header: bool = False
    """The turn is written with that header: that of results after calls, else that of a system message or user."""
    wants_parts: bool = False
    """Content as `[{"type": "text", "text": ...}]`."""
    wants_strings: bool = False
    """A call's arguments as the JSON string."""
    reasoning_key: str = "reasoning_content"
    most_calls: int = 3
    """How many calls of one turn the template shows; it raises at more, or leaves them out."""
    options: tuple[Options, ...] = ({},)
    """Variables to render with; the first without any."""


_THINKING: tuple[Options, ...] = ({}, {"enable_thinking": True}, {"enable_thinking": False})
_NEMOTRON: tuple[Options, ...] = (*_THINKING, {"truncate_history_thinking": False, "low_effort": True})
_LLAMA: tuple[Options, ...] = ({}, {"tools_in_user_message": False, "date_string": "1 Jan 2026"})
_GPTOSS: tuple[Options, ...] = ({}, {"reasoning_effort": "high", "model_identity": "You are a test."})
_GEMMA4: tuple[Options, ...] = (*_THINKING, {"preserve_thinking": True})
_DOCUMENTS: tuple[Options, ...] = ({}, {"documents": [{"title": "a", "text": "b"}]})
_DEEPSEEK = "<｜end▁of▁sentence｜>"
FACTS = {
    "cohere": Facts(stop="<|END_OF_TURN_TOKEN|>", most_calls=0, options=_DOCUMENTS),
    "deepseek": Facts(stop=_DEEPSEEK, wants_strings=True, options=({}, {"thinking": True})),
    "deepseek_r1": Facts(stop=_DEEPSEEK, most_calls=0),
    "diffusion_gemma": Facts(stop="<turn|>", stop_of_calls="<|tool_response>", options=_THINKING),
    "gemma": Facts(stop="<end_of_turn>", most_calls=0),
    "gemma4": Facts(stop="<turn|>", stop_of_calls="<|tool_response>", options=_GEMMA4),
    "gemma4_v2": Facts(stop="<turn|>", options=_THINKING),
    "glm": Facts(stop="", header_is_stop=True, options=_THINKING),
    "glm4moe_training": Facts(stop="", header_is_stop=True, writes_header=True, options=_THINKING),
    "gptoss": Facts(
        stop="<|return|>",
        stop_of_calls="<|call|>",
        in_history={"<|return|>": "<|end|>"},
        reasoning_key="thinking",
        most_calls=1,
        options=_GPTOSS,
    ),
    "idefics3": Facts(stop="<end_of_utterance>", wants_parts=True, most_calls=0),
    "lfm2": Facts(stop="<|im_end|>", most_calls=0),
    "lfm2_v2": Facts(stop="<|im_end|>"),
    "lfm2_2_5": Facts(stop="<|im_end|>", reasoning_key="thinking", options=({}, {"preserve_thinking": True})),
    "llama3": Facts(stop="<|eot_id|>", most_calls=0),
    "llama3_1": Facts(stop="<|eot_id|>", most_calls=1, options=_LLAMA),
    "llama3_2": Facts(stop="<|eot_id|>", most_calls=1, options=_LLAMA),
    "llava": Facts(stop="</s>", wants_parts=True, most_calls=0),
    "muse": Facts(stop="<|eot|>", options=({}, {"reasoning_strength": "low", "current_date": "2026-01-01"})),
    "nemotron": Facts(stop="<|im_end|>", options=_NEMOTRON),
    "phi3": Facts(stop="<|end|>", most_calls=0),
    "qwen": Facts(stop="<|im_end|>", options=_THINKING),
    "qwen2_5": Facts(stop="<|im_end|>", options=_DOCUMENTS),
    "qwen2_5_vl": Facts(stop="<|im_end|>", most_calls=0),
    "qwen3_6": Facts(stop="<|im_end|>", options=(*_THINKING, {"preserve_thinking": True})),
    "smolvlm": Facts(stop="<end_of_utterance>", wants_parts=True, most_calls=0),
    "template_basic": Facts(stop="", most_calls=0),
    "template_blip2": Facts(stop="", most_calls=0),
    "template_chatml": Facts(stop="<|im_end|>", most_calls=0),
    "template_deepseek_ocr": Facts(stop="", most_calls=0),
    "template_deepseek_vl2": Facts(stop=_DEEPSEEK, most_calls=0),
    "template_kimi_audio": Facts(stop="<|im_kimia_text_eos|>", most_calls=0),
    "template_minicpmv45": Facts(stop="<|im_end|>", options=_THINKING),
}
"""By the beginning of a template's file name, the longest that fits."""


class Judgement(StrEnum):
    EXACT = "exact"
    REFUSED = "refused"
    WRONG = "wrong"
    NOT_ACCEPTED = "not accepted"
    """The template itself raises, or leaves out the turn or a new message."""
    UNJUDGED = "unjudged"
    """The turn has no text that marks its end, and the template is not append-only here."""


@dataclass(frozen=True, slots=True)
class CorpusOracle:
    """Judges bridges of one template with one set of options."""

    template: CorpusTemplate
    tokenizer: Any
    options: Options = field(default_factory=dict)
    tools: Sequence[Any] = ()

    @property
    def facts(self) -> Facts:
        return facts_of(self.template)

    def stop_of(self, conversation: JudgedConversation) -> str:
        """The last token of the turn, as sampled."""
        facts = self.facts
        if facts.header_is_stop:
            role = conversation.new_messages[0]["role"]
            if facts.writes_header:
                role = "tool" if conversation.assistant.get("tool_calls") else "user" if role == "tool" else role
            return "<|observation|>" if role == "tool" else f"<|{role}|>"
        return (facts.stop_of_calls if conversation.assistant.get("tool_calls") else "") or facts.stop

    def stop_id_of(self, conversation: JudgedConversation) -> int:
        return int(self.tokenizer.convert_tokens_to_ids(self.stop_of(conversation) or self.tokenizer.eos_token))

    def judge(self, conversation: JudgedConversation, outcome: BridgeOutcome, *, is_benign: bool = True) -> Judgement:
        """Compare a bridge after the whole turn, stop included, with the template's rendering of everything.

        Not `is_benign`: contents may spell control tokens, so that ids must differ (I5); the characters are compared.
        """
        full = self.text(conversation.everything, generation_prompt=True)
        if full is None:
            return Judgement.NOT_ACCEPTED
        start = self._end_of_turn(conversation, full)
        if start is None:
            return Judgement.UNJUDGED if not conversation.turn_marks else Judgement.NOT_ACCEPTED
        is_shown = self._shows_new_messages(conversation, full)
        if not isinstance(outcome, Bridge):
            return Judgement.REFUSED if is_shown else Judgement.NOT_ACCEPTED
        if not is_shown or not self._is_same(outcome, full, start, is_benign):
            return Judgement.WRONG
        return Judgement.EXACT

    def extends(self, conversation: JudgedConversation, bridge: Bridge) -> bool | None:
        """Whether prompt, turn and bridge are the whole text; None where the template itself rewrites the history.

        Knows of the turn's end only what the template writes when nothing follows it: unlike `judge`.
        """
        full = self.text(conversation.everything, generation_prompt=True)
        sampled = self.completion_text(conversation)
        if full is None or sampled is None or not full.startswith("".join(sampled)):
            return None
        return "".join(sampled) + self.tokenizer.decode(bridge.bridge_ids.tolist()) == full

    def completion_text(self, conversation: JudgedConversation) -> tuple[str, str] | None:
        """The prompt and what the model samples after it, stop included; None if the template shows no such thing."""
        prompt = self.text(conversation.history, generation_prompt=True)
        last = self.text([*conversation.history, conversation.assistant], generation_prompt=False)
        if prompt is None or last is None or not last.startswith(prompt):
            return None
        stop, body = self.stop_of(conversation), last[len(prompt) :]
        end = body.rfind(stop) if stop else -1
        after_last_mark = max((body.rfind(mark) for mark in conversation.turn_marks), default=0)
        return (prompt, body[: end + len(stop)]) if end >= after_last_mark else (prompt, body + stop)

    def text(self, messages: Sequence[Message], *, generation_prompt: bool) -> str | None:
        """The template's text, None if it refuses the messages."""
        try:
            text: str = self.tokenizer.apply_chat_template(
                [self._in_form(message) for message in messages],
                tools=list(self.tools) or None,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **self.options,
            )
        except (jinja2.TemplateError, TypeError):
            return None
        return text

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _is_same(self, bridge: Bridge, full: str, start: int, is_benign: bool) -> bool:
        """Whether the bridge is the end of the whole text, from `start` on, in characters and in ids."""
        ids = bridge.bridge_ids.tolist()
        same_text = self.tokenizer.decode(ids) == full[start:]
        same_ids = not is_benign or self.ids(full)[-len(ids) :] == ids
        return same_text and same_ids and bridge.num_taken_back == 0 and bridge.closing is Closing.NONE

    def _end_of_turn(self, conversation: JudgedConversation, full: str) -> int | None:
        """Where in the whole text the turn's last token ends."""
        stop = self.stop_of(conversation)
        stop = self.facts.in_history.get(stop, stop)
        if not conversation.turn_marks:
            sampled = self.completion_text(conversation)
            return len("".join(sampled)) if sampled and full.startswith("".join(sampled)) else None
        last_mark = conversation.turn_marks[-1]
        if last_mark not in full:
            return None
        end = full.find(stop, full.index(last_mark))
        assert end >= 0 or not stop, f"{self.template.name}: no {stop!r} after the turn in {full!r}: wrong facts?"
        return end + len(stop)

    def _shows_new_messages(self, conversation: JudgedConversation, full: str) -> bool:
        marks = [re.search(r"new\d{8}", str(message["content"])) for message in conversation.new_messages]
        if all(mark is not None and mark.group() in full for mark in marks):
            return True
        if any(mark is not None and mark.group() not in full for mark in marks):
            return False
        names = [f"Shown{k}" for k in range(len(marks))]
        named = [{**message, "content": name} for message, name in zip(conversation.new_messages, names, strict=True)]
        text = self.text([*conversation.history, conversation.assistant, *named], generation_prompt=True) or ""
        return all(name in text for name in names)

    def _in_form(self, message: Message) -> dict[str, Any]:
        facts = self.facts
        out: dict[str, Any] = dict(message)
        if facts.wants_parts:
            out["content"] = [{"type": "text", "text": message["content"]}]
        if "reasoning_content" in out:
            out[facts.reasoning_key] = out.pop("reasoning_content")
        if facts.wants_strings and "tool_calls" in out:
            out["tool_calls"] = [
                {
                    **call,
                    "function": {
                        **call["function"],
                        "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
                    },
                }
                for call in out["tool_calls"]
            ]
        return out


def facts_of(template: CorpusTemplate) -> Facts:
    """The facts about the template's family."""
    file = template.name.partition("/")[2]
    return FACTS[max((name for name in FACTS if file.startswith(name)), key=len)]
