"""Builds tokenizers for text from outside: the same model, normaliser and pre-tokenizer, but no added tokens.

A control token in the model's own vocabulary, such as sentencepiece's `<s>`, gets another name in the text tokenizer:
otherwise the text `<s>` would become the control token. Ids do not change.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Set
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer, models

from unbroken.rendering.encoding.control_tokens import AddedTokens


class TextTokenizers:
    """The tokenizers for text, with the model as it is and, built when first needed, without its control tokens."""

    def __init__(self, tokenizer: Tokenizer, control: AddedTokens) -> None:
        self._tokenizer = tokenizer
        self._control = control
        self._as_it_is = _build_pair(tokenizer, tokenizer.model)

    def find(self, *, at_start: bool) -> Iterator[Tokenizer]:
        """The tokenizers to try in turn for text at the beginning of a prompt, or after a control token.

        The second one takes seconds to build for 130k entries, and is needed only for a text that the first one
        encodes to a control id.
        """
        yield self._as_it_is[at_start]
        if self._without_control is not None:
            yield self._without_control[at_start]

    @cached_property
    def _without_control(self) -> tuple[Tokenizer, Tokenizer] | None:
        model = _build_model_without_control(self._tokenizer, self._control)
        return None if model is None else _build_pair(self._tokenizer, model)


def _build_pair(tokenizer: Tokenizer, model: Any) -> tuple[Tokenizer, Tokenizer]:
    """Build the tokenizer for text after a control token, and the one for text at the beginning of a prompt."""
    first = tokenizer.pre_tokenizer
    other = _adapt_to_mid_text(first) if first is not None else None
    mid_text, at_start = Tokenizer(model), Tokenizer(model)
    for built, pre_tokenizer in ((mid_text, other), (at_start, first)):
        if tokenizer.normalizer is not None:
            built.normalizer = tokenizer.normalizer
        if pre_tokenizer is not None:
            built.pre_tokenizer = pre_tokenizer
    return mid_text, at_start


def _build_model_without_control(tokenizer: Tokenizer, control: AddedTokens) -> Any:
    """The model with other names for its control tokens, except of one character: without those text would be lost.

    None if it has none.
    """
    spelled = {text for text in control.texts & tokenizer.get_vocab(with_added_tokens=False).keys() if len(text) > 1}
    if not spelled:
        return None
    model = json.loads(tokenizer.to_str())["model"]
    if model["type"] == "BPE":
        _remove_from_bpe(model, spelled - {model.get("unk_token")})
    elif model["type"] == "Unigram":
        model["vocab"] = [
            [_make_unused_name(k) if text in spelled else text, score] for k, (text, score) in enumerate(model["vocab"])
        ]
    return _build_tokenizer(model=model).model


def _remove_from_bpe(model: dict[str, Any], spelled: Set[str]) -> None:
    model["vocab"] = {_make_unused_name(k) if text in spelled else text: k for text, k in model["vocab"].items()}
    pairs = (tuple(merge.split(" ", 1)) if isinstance(merge, str) else tuple(merge) for merge in model["merges"])
    model["merges"] = [pair for pair in pairs if spelled.isdisjoint((*pair, "".join(pair)))]


def _make_unused_name(token_id: int) -> str:
    """A name that does not occur in text. If it does, the encoder refuses the id."""
    return f"\U0010ffff{token_id}"


def _adapt_to_mid_text(pre_tokenizer: Any) -> Any:
    """The pre-tokenizer for text after a control token: without Metaspace's prefix of the first word."""
    state = json.loads(pre_tokenizer.__getstate__())
    return _build_tokenizer(pre_tokenizer=state).pre_tokenizer if _remove_prefix(state) else pre_tokenizer


def _remove_prefix(state: dict[str, Any]) -> bool:
    """Change a pre-tokenizer's description; returns whether that was needed."""
    is_first = state.get("prepend_scheme") == "first"
    if is_first:
        state["prepend_scheme"] = "never"
    return any([is_first, *map(_remove_prefix, state.get("pretokenizers", ()))])


def _build_tokenizer(**parts: Any) -> Tokenizer:
    blank = json.loads(Tokenizer(models.BPE()).to_str())
    return Tokenizer.from_str(json.dumps({**blank, **parts}))
