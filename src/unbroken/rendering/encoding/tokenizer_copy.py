"""Copies a tokenizer, so that no caller can reconfigure the copy.

A copy through JSON takes seconds for 130k entries. This one shares model, normaliser and pre-tokenizer, but not what
calls set: truncation, padding, added tokens.
"""

from __future__ import annotations

from itertools import groupby

from tokenizers import Tokenizer

_PARTS = ("normalizer", "pre_tokenizer", "decoder", "post_processor")


def copy_tokenizer(tokenizer: Tokenizer) -> Tokenizer:
    """Copy a tokenizer, without its truncation and padding."""
    copy = Tokenizer(tokenizer.model)
    for part in _PARTS:
        if getattr(tokenizer, part) is not None:
            setattr(copy, part, getattr(tokenizer, part))
    added = tokenizer.get_added_tokens_decoder()
    in_order = (added[token_id] for token_id in sorted(added))
    for is_special, tokens in groupby(in_order, key=lambda token: bool(token.special)):
        (copy.add_special_tokens if is_special else copy.add_tokens)(list(tokens))
    assert copy.get_added_tokens_decoder() == added, "the library gives added tokens ids in their order"
    return copy
