"""A tokenizer of one's own that no caller can reconfigure, without going through JSON.

Writing and reading 130k entries takes seconds. The model, normaliser and pre-tokenizer of a `tokenizers.Tokenizer` are
shared when they are set on another one, and what is set by a call (truncation, padding, added tokens) is not.
"""

from __future__ import annotations

from itertools import groupby

from tokenizers import Tokenizer

_PARTS = ("normalizer", "pre_tokenizer", "decoder", "post_processor")


def copy_tokenizer(tokenizer: Tokenizer) -> Tokenizer:
    """The same tokenizer without its truncation and padding."""
    copy = Tokenizer(tokenizer.model)
    for part in _PARTS:
        if getattr(tokenizer, part) is not None:
            setattr(copy, part, getattr(tokenizer, part))
    added = tokenizer.get_added_tokens_decoder()
    in_order = (added[token_id] for token_id in sorted(added))
    for is_special, tokens in groupby(in_order, key=lambda token: bool(token.special)):
        (copy.add_special_tokens if is_special else copy.add_tokens)(list(tokens))
    assert copy.get_added_tokens_decoder() == added, "the library numbers added tokens by their order"
    return copy
