"""Judges the bridges of the corpus' templates with transformers' own rendering.

It shares no code with the code under test. How each family's model ends a turn, and which message format its template
expects, is written by hand here, from the models' documentation and generation configs.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
_DEEPSEEK4: tuple[Options, ...] = ({}, {"thinking": True}, {"thinking": True, "drop_thinking": False})
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
    "qwen3.6": Facts(stop="<|im_end|>", options=(*_THINKING, {"preserve_thinking": True})),
    "qwen3_6": Facts(stop="<|im_end|>", options=(*_THINKING, {"preserve_thinking": True})),
    "smolvlm": Facts(stop="<end_of_utterance>", wants_parts=True, most_calls=0),
    "template_basic": Facts(stop="", most_calls=0),
    "template_blip2": Facts(stop="", most_calls=0),
    "template_chatml": Facts(stop="<|im_end|>", most_calls=0),
    "template_deepseek_ocr": Facts(stop="", most_calls=0),
    "template_deepseek_vl2": Facts(stop=_DEEPSEEK, most_calls=0),
    "template_kimi_audio": Facts(stop="<|im_kimia_text_eos|>", most_calls=0),
    "template_minicpmv45": Facts(stop="<|im_end|>", options=_THINKING),
    "Apertus": Facts(
        stop="<|assistant_end|>", stop_of_calls="<|tools_suffix|>", options=({}, {"enable_thinking": True})
    ),
    "Bielik": Facts(stop="<|im_end|>"),
    "ByteDance-Seed": Facts(stop="<seed:eos>", options=({}, {"thinking_budget": 0}, {"thinking_budget": 512})),
    "Cohere": Facts(stop="<|END_OF_TURN_TOKEN|>", options=_DOCUMENTS),
    "GLM": Facts(stop="", header_is_stop=True, options=(*_THINKING, {"clear_thinking": False})),
    "GigaChat3.1": Facts(stop="<|message_sep|>", most_calls=1),
    "HuggingFaceTB-SmolLM3": Facts(stop="<|im_end|>", most_calls=0, options=_THINKING),
    "Kimi-K3": Facts(stop="<|end_of_msg|>", options=({}, {"thinking": False}, {"thinking_effort": "low"})),
    "MiniMax-M2": Facts(stop="[e~["),
    "MiniMax-M3": Facts(stop="[e~[", options=({}, {"thinking": False})),
    "NVIDIA-Nemotron-Nano-v2": Facts(stop="<SPECIAL_12>", options=_THINKING),
    "Phi-4-mini": Facts(stop="<|end|>", most_calls=0),
    "deepseek-ai-DeepSeek-V3.2": Facts(stop=_DEEPSEEK, options=_DEEPSEEK4[:2]),
    "deepseek-ai-DeepSeek-V4": Facts(stop=_DEEPSEEK, options=_DEEPSEEK4),
    "inkling": Facts(stop="<|content_model_end_sampling|>", options=({}, {"reasoning_effort": 0.5})),
    "llama4": Facts(stop="<|eot|>", options=_LLAMA),
    "meetkai-functionary": Facts(stop="<|eot_id|>", wants_strings=True),
    "openbmb-MiniCPM5": Facts(stop="<|im_end|>", options=_THINKING),
    "poolside-Laguna": Facts(stop="</assistant>", options=_THINKING),
    "tencent-Hy3": Facts(stop="<｜hy_eos:opensource｜>", options=({}, {"reasoning_effort": "high"})),
    "upstage-Solar": Facts(
        stop="<|end|>",
        stop_of_calls="<|calls|>",
        reasoning_key="reasoning",
        options=({}, {"reasoning_effort": "minimal"}),
    ),
}
"""By the beginning of a template's file name, the longest that fits."""


class Judgement(StrEnum):
    EXACT = "exact"
    REFUSED = "refused"
    """Though it can be bridged."""
    WRONG = "wrong"
    IMPOSSIBLE = "cannot be bridged"
    """Refused, and rightly: the template leaves out, repeats or reorders a message, writes text of the turn after the
    new messages, or writes no control token between them."""
    NOT_ACCEPTED = "not accepted"
    """The template itself raises."""
    UNJUDGED = "unjudged"
    """The turn has no text that marks its end, and the template is not append-only here."""


@dataclass(frozen=True, slots=True)
class CorpusOracle:
    """Judges bridges of one template with one set of options."""

    template: CorpusTemplate
    tokenizer: Any
    options: Options = field(default_factory=dict)
    tools: Sequence[Any] = ()
    keeps_text: bool = True
    """Decoding gives back every text. Where it does not, only ids are compared."""

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

    def sampled_ids_of(self, conversation: JudgedConversation) -> list[int]:
        """The completion; only its stop, or the text of a turn that was cut, if the template shows no such thing."""
        _, turn = self.completion_text(conversation) or ("", "")
        stop = self.stop_of(conversation)
        if conversation.is_cut:
            [mark] = conversation.turn_marks
            return self.ids(turn[: turn.index(mark)] + mark if turn else str(conversation.assistant["content"]))
        return [*(self.ids(turn.removesuffix(stop)) if stop else []), self.stop_id_of(conversation)]

    def judge(self, conversation: JudgedConversation, outcome: BridgeOutcome, *, is_benign: bool = True) -> Judgement:
        """Compare a bridge after the turn, as it was sampled, with the template's rendering of everything.

        Not `is_benign`: contents may spell control tokens, so that ids must differ (I5); the characters are compared.
        """
        full = self.text(conversation.everything, generation_prompt=True)
        if full is None:
            return Judgement.NOT_ACCEPTED
        start = self._end_of_turn(conversation, full)
        if start is None and not conversation.turn_marks:
            return Judgement.UNJUDGED
        is_possible = start is not None and self._is_in_order(conversation, full, start) and self._has_end()
        if not isinstance(outcome, Bridge):
            return Judgement.REFUSED if is_possible else Judgement.IMPOSSIBLE
        if start is None or not is_possible or not self._is_same(conversation, outcome, full, start, is_benign):
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

    def keeps_history(self, conversation: JudgedConversation) -> bool | None:
        """Whether the rendering of everything begins with the prompt and the turn as sampled (P2).

        None if the template has no prompt that the turn follows, or writes a header that it cannot know at its end.
        """
        full = self.text(conversation.everything, generation_prompt=True)
        sampled = self.completion_text(conversation)
        if full is None or sampled is None or self.facts.writes_header:
            return None
        prompt, turn = sampled
        stop = self.stop_of(conversation)
        return full.startswith(prompt + turn.removesuffix(stop) + self.facts.in_history.get(stop, stop))

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

    def _has_end(self) -> bool:
        return bool(self.facts.stop) or self.facts.header_is_stop

    def _is_same(
        self, conversation: JudgedConversation, bridge: Bridge, full: str, start: int, is_benign: bool
    ) -> bool:
        """Whether the bridge is the whole text from `start` on, in characters and in ids, and says how it closes."""
        ids = bridge.bridge_ids.tolist()
        if conversation.is_cut:  # The end of the turn is the template's: white space before it is not added.
            start += len(full[start:]) - len(full[start:].lstrip())
        if self.keeps_text and self.tokenizer.decode(ids) != full[start:]:
            return False
        if is_benign:
            encoding = self.tokenizer(full, add_special_tokens=False, return_offsets_mapping=True)
            first = sum(begin < start for begin, _ in encoding["offset_mapping"])
            if encoding["input_ids"][first:] != ids:
                return False
        closing = Closing.TRUNCATED if conversation.is_cut else Closing.NONE
        return bridge.num_taken_back == 0 and bridge.closing is closing

    def _end_of_turn(self, conversation: JudgedConversation, full: str) -> int | None:
        """Where in the whole text the sampled part of the turn ends; None if the turn or its end is not shown."""
        stop = self.stop_of(conversation)
        stop = self.facts.in_history.get(stop, stop)
        if not conversation.turn_marks:
            return self._end_of_blank_turn(conversation, full)
        last_mark = conversation.turn_marks[-1]
        if last_mark not in full:
            return None
        end_of_mark = full.index(last_mark) + len(last_mark)
        end = full.find(stop, end_of_mark)
        if conversation.is_cut:
            return end_of_mark
        return None if end < 0 else end + len(stop)

    def _end_of_blank_turn(self, conversation: JudgedConversation, full: str) -> int | None:
        """The same where the turn has no text to find: after prompt and turn, or as for a turn with text."""
        sampled = "".join(self.completion_text(conversation) or ())
        if sampled and full.startswith(sampled):
            return len(sampled)
        assistant: Message = {**conversation.assistant, "content": "SaidEnd"}
        named = replace(conversation, assistant=assistant, turn_marks=("SaidEnd",))
        text = self.text(named.everything, generation_prompt=True) or ""
        start = self._end_of_turn(named, text)
        rest = "" if start is None else text[start:]
        end = full[: len(full) - len(rest)]
        stop = "" if self.facts.header_is_stop else self.stop_of(named)
        return (
            len(end) if rest and full.endswith(rest) and end.endswith(self.facts.in_history.get(stop, stop)) else None
        )

    def _is_in_order(self, conversation: JudgedConversation, full: str, start: int) -> bool:
        """Whether the turn stands before `start`, and each new message once after it, in the order given."""
        if any(mark in full[start:] for mark in conversation.turn_marks):
            return False
        marks = [re.search(r"new\d{8}", str(message["content"])) for message in conversation.new_messages]
        if not _stand_in_order([mark.group() for mark in marks if mark is not None], full, start):
            return False
        if None not in marks:
            return True
        names = [f"Shown{k}End" for k in range(len(marks))]
        named = [{**message, "content": name} for message, name in zip(conversation.new_messages, names, strict=True)]
        text = self.text([*conversation.history, conversation.assistant, *named], generation_prompt=True) or ""
        return _stand_in_order(names, text, max((text.find(mark) for mark in conversation.turn_marks), default=0))

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


def _stand_in_order(texts: Sequence[str], full: str, start: int) -> bool:
    """Whether each text stands in `full` once, from `start` on, each after the one before."""
    places = [full.find(text) for text in texts]
    return min(places, default=start) >= start and places == sorted(places) and all(full.count(t) == 1 for t in texts)


def facts_of(template: CorpusTemplate) -> Facts:
    """The facts about the template's family."""
    file = template.name.partition("/")[2]
    return FACTS[max((name for name in FACTS if file.startswith(name)), key=len)]
