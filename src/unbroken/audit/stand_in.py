"""Makes a tokenizer for a template without a model: small, byte-level, with the template's control tokens.

Control tokens are guessed from how texts look: `<|im_end|>`, `<seed:eos>`, `[e~[`. If none of these is between two
turns, markup there is taken for one: `</assistant>`. The ids mean nothing outside the audit. Findings about the
template's text hold for the model too; those about ids and their drift do not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from unbroken.audit.conversations import TOOLS
from unbroken.errors import TemplateError
from unbroken.messages import Message, make_call
from unbroken.rendering.template import TemplateRenderer

BEGIN, END = "<|bos_token|>", "<|eos_token|>"
"""The default values of the variables `bos_token` and `eos_token`."""

_VOCABULARY_SIZE = 1500
_MARKS = ("Zq8Asked", "Zq8Said", "Zq8Next")
_SPECIAL = re.compile(
    r"<\|[^\s<>|'\"{}+~]{1,48}\|>"  # <|im_start|>
    r"|<｜[^\s<>｜'\"{}+~]{1,48}｜>"  # DeepSeek, with a wide bar
    r"|<\|[a-z_]{2,24}>|<[a-z_]{2,24}\|>"  # Gemma 4: <|turn> and <turn|>
    r"|</?s>|<(?:bos|eos|sop|eop|image|[a-z]+_of_[a-z]+)>|<[A-Z]{3}_TOKEN>|<(?:SPECIAL|extra_id|reserved)_\d+>"
    r"|</?[a-z]{2,12}(?:_[a-z]+)?:[a-z_]{2,24}>"  # Seed, MiniMax, Hunyuan: <seed:eos>, </think:opensource>
    r"|\]~!?b[\]\[]|\[e~\[|\]<\][a-z_]{2,24}\[>\["  # MiniMax: ]~b], [e~[, ]<]minimax[>[
    r"|\[\|[^\s\[\]|'\"{}+]{1,48}\|\]|〈\|[^\s〈〉|'\"{}+]{1,48}\|〉"  # EXAONE: [|endofturn|]; Laguna: 〈|EOS|〉
    r"|\[(?:/?INST|gMASK|BOS|EOS|/?TOOL_CALLS|/?TOOL_RESULTS|/?AVAILABLE_TOOLS|/?SYSTEM_PROMPT|CALL_ID|ARGS|/?THINK)\]"
)
_MARKUP = re.compile(r"</?[A-Za-z][\w:.\-]{0,40}>|[\[<{|~〈]{1,4}[\w~!]{1,20}[\]>}|~〉]{1,4}")
"""Between two turns, if nothing there looks like a control token."""
_TAGS = re.compile(r"</?(?:think|tool_call|tool_response|arg_key|arg_value)>")
"""Added tokens, but not special, in the families that use them."""
_TEXTS = (
    "The tool answered: the file was not found. Shall I look at the next page, or is that all for today?",
    "system user assistant tool function name arguments content value result number query observation reasoning",
    'def add(a, b):\n    return a + b\n\nfor number in range(10):\n    print(number, "->", add(number, 1))\n',
    '{"name": "search", "arguments": {"query": "weather in Oslo", "limit": 10, "exact": true, "page": null}}',
    '{"name":"add","arguments":{"a":12,"b":30.5,"unit":"celsius","days":["monday","sunday"]}}',
    "When is the library open? It is open from Monday to Friday, and until noon on Saturdays. On Sundays it is closed.",
    "Let me see what the tool says about that: the opening hours of the library, and where it is. Done, here they are.",
    "Größe, Straße, où est la gare? 今天天气怎么样 привет 😀",
)


def make_stand_in(source: str, *, begin: str = BEGIN, end: str = END) -> Any:
    """Make a `PreTrainedTokenizerFast`; raises `TemplateError` if the template does not compile or exceeds a limit."""
    from transformers import PreTrainedTokenizerFast

    # This checks the template's size before anything is trained on it.
    plain = PreTrainedTokenizerFast(
        tokenizer_object=_train(_TEXTS), bos_token=begin, eos_token=end, chat_template=source
    )
    renderer = TemplateRenderer(plain)
    text = "\n".join([source, *_render_conversations(renderer)])
    special = sorted({*_SPECIAL.findall(text), *_find_markup(renderer, (begin, end)), begin, end})
    tags = sorted(set(_TAGS.findall(text)) - set(special))
    backend = _train([*_TEXTS, _SPECIAL.sub(" ", source)])
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in tags])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=begin, eos_token=end, chat_template=source)


def _render_conversations(renderer: TemplateRenderer) -> Iterator[str]:
    """Render each kind of message: some templates join control tokens from parts, `'<|' + role + '|>'`."""
    call = make_call("callprob1", "search", {"query": "x"})
    conversations: list[list[Message]] = [
        [{"role": "system", "content": "x"}, {"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}],
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x", "reasoning_content": "x"}],
        [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "x", "name": "search", "tool_call_id": "callprob1"},
        ],
    ]
    for messages in conversations:
        for tools in ((), TOOLS):
            try:
                yield renderer.render_text(messages, tools=tools, add_generation_prompt=True)
            except TemplateError:
                continue


def _find_markup(renderer: TemplateRenderer, known: Sequence[str]) -> set[str]:
    """Find the markup around a turn; nothing if a control token stands there."""
    messages: list[Message] = [
        {"role": "user", "content": _MARKS[0]},
        {"role": "assistant", "content": _MARKS[1]},
        {"role": "user", "content": _MARKS[2]},
    ]
    try:
        text = renderer.render_text(messages, add_generation_prompt=True)
    except TemplateError:
        return set()
    before, said, after = (text.rfind(mark) for mark in _MARKS)
    between = text[said:after]
    if not 0 <= before < said < after or _SPECIAL.search(between) or any(token in between for token in known):
        return set()
    return {*_MARKUP.findall(between), *_MARKUP.findall(text[before:said])} if _MARKUP.search(between) else set()


def _train(texts: Sequence[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY_SIZE, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
