"""Completions of one format, as a local tokenizer writes them."""

from collections.abc import Collection
from typing import Any

from support.tokenizers import make_tokenizer
from unbroken.rendering.base import ParsedResponse
from unbroken.rendering.encoding import SafeEncoder
from unbroken.rendering.parsing.format import Format
from unbroken.rendering.parsing.reader import FormatParser

STOP = "<|im_end|>"


class FormatOnTokenizer:
    """A parser of a format for a tokenizer that has `control` as control tokens, and `stops` to end turns with."""

    def __init__(self, form: Format, *, control: Collection[str] = (), stops: Collection[str] = (STOP,)) -> None:
        tokenizer = make_tokenizer(None, control_tokens=(*control, *stops))
        self._encoder = SafeEncoder(tokenizer.backend_tokenizer)
        self.parser = FormatParser(
            form,
            control=self._encoder.control,
            decode=self._encoder.decode,
            stop_token_ids=[tokenizer.convert_tokens_to_ids(stop) for stop in stops],
        )

    def ids(self, text: str) -> list[int]:
        """The ids of a completion; control tokens in `text` are control ids."""
        return [int(token_id) for token_id in self._encoder.encode_plain(text)]

    def spelled(self, text: str) -> list[int]:
        """The ids of `text` without any control id."""
        return [token_id for character in text for token_id in self.ids(character)]

    def parse(self, text: str, **options: Any) -> ParsedResponse:
        """The parse of a completion that is this text."""
        return self.parser.parse(self.ids(text), **options)

    def parts(self, completion: str | list[int], **options: Any) -> list[tuple[str, str]]:
        """The kind and the text of each part of the parse of this text, or of these ids."""
        ids = self.ids(completion) if isinstance(completion, str) else completion
        parsed = self.parser.parse(ids, **options)
        return [(part.kind.value, self._encoder.decode(ids[slice(*part.span)])) for part in parsed.parts]


def tool(name: str, **properties: Any) -> Any:
    """A tool's schema with these parameters."""
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}
