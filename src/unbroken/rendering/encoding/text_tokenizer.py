"""The twin of a tokenizer: the same model, normaliser and pre-tokenizer without added tokens, for text from outside.

Where the model's own vocabulary spells a control token, as sentencepiece's does with `<s>`, the twin's does not: else
the text `<s>` would be that token after all. Ids stay what they are.
"""

from __future__ import annotations

import json
from collections.abc import Set
from typing import Any

from tokenizers import Tokenizer, models

from unbroken.rendering.encoding.control_tokens import AddedTokens


def build_text_tokenizers(tokenizer: Tokenizer, control: AddedTokens) -> tuple[Tokenizer, Tokenizer]:
    """The twin for text that follows a control token, and the one for text that begins a prompt."""
    model = _model_of_text(tokenizer, control)
    before = tokenizer.pre_tokenizer
    mid_text, at_start = Tokenizer(model), Tokenizer(model)
    for twin, pre_tokenizer in ((mid_text, _in_mid_text(before) if before is not None else None), (at_start, before)):
        if tokenizer.normalizer is not None:
            twin.normalizer = tokenizer.normalizer
        if pre_tokenizer is not None:
            twin.pre_tokenizer = pre_tokenizer
    return mid_text, at_start


def _model_of_text(tokenizer: Tokenizer, control: AddedTokens) -> Any:
    """The model, of which no token is spelled as a control token.

    Other kinds than BPE and Unigram, and single characters, without which text would be lost, stay as they are.
    """
    spelled = {text for text in control.texts & tokenizer.get_vocab(with_added_tokens=False).keys() if len(text) > 1}
    if not spelled:
        return tokenizer.model
    model = json.loads(tokenizer.to_str())["model"]
    if model["type"] == "BPE":
        _remove_from_bpe(model, spelled - {model.get("unk_token")})
    elif model["type"] == "Unigram":
        model["vocab"] = [
            [_unspelled(k) if text in spelled else text, score] for k, (text, score) in enumerate(model["vocab"])
        ]
    return _tokenizer_with(model=model).model


def _remove_from_bpe(model: dict[str, Any], spelled: Set[str]) -> None:
    model["vocab"] = {_unspelled(k) if text in spelled else text: k for text, k in model["vocab"].items()}
    pairs = (tuple(merge.split(" ", 1)) if isinstance(merge, str) else tuple(merge) for merge in model["merges"])
    model["merges"] = [pair for pair in pairs if spelled.isdisjoint((*pair, "".join(pair)))]


def _unspelled(token_id: int) -> str:
    """A name for a token that is not to be found: should text spell it all the same, the encoder refuses its id."""
    return f"\U0010ffff{token_id}"


def _in_mid_text(pre_tokenizer: Any) -> Any:
    """The pre-tokenizer as it works after a control token: Metaspace's prefix for the very first word is left out."""
    state = json.loads(pre_tokenizer.__getstate__())
    return _tokenizer_with(pre_tokenizer=state).pre_tokenizer if _leave_out_prefix(state) else pre_tokenizer


def _leave_out_prefix(state: dict[str, Any]) -> bool:
    """Change a pre-tokenizer's description; whether there was something to change."""
    is_first = state.get("prepend_scheme") == "first"
    if is_first:
        state["prepend_scheme"] = "never"
    return any([is_first, *map(_leave_out_prefix, state.get("pretokenizers", ()))])


def _tokenizer_with(**parts: Any) -> Tokenizer:
    blank = json.loads(Tokenizer(models.BPE()).to_str())
    return Tokenizer.from_str(json.dumps({**blank, **parts}))
