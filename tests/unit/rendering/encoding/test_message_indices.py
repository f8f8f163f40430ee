"""Each id belongs to the message that it has a character of."""

import random

import pytest

from support.tokenizer_kinds import KINDS
from unbroken.rendering.base import TEMPLATE
from unbroken.rendering.encoding.marks import Span
from unbroken.rendering.encoding.safe_encoder import SafeEncoder

PIECES = ("so ", "\n", " ", "  ", "Größe", "e\u0301", "今天", "😀", "\u200b", "\x00", "a", "ﬁ", "½", "12", "?")


@pytest.mark.parametrize("kind", KINDS)
def test_the_ids_of_one_message_are_those_that_overlap_its_text(kind: str) -> None:
    backend = KINDS[kind].make_backend()
    encoder = SafeEncoder(backend)
    rng = random.Random(kind)
    for _ in range(300):
        text = "".join(rng.choice(PIECES) for _ in range(rng.randrange(1, 12)))
        start = rng.randrange(len(text))
        span = Span(start=start, stop=rng.randrange(start + 1, len(text) + 1), index=3)
        encoding = backend.encode(text, add_special_tokens=False)
        expected = [3 if begin < span.stop and end > start else TEMPLATE for begin, end in encoding.offsets]
        assert encoder.encode(text, [span]).message_indices.tolist() == expected, (text, span, encoding.tokens)
