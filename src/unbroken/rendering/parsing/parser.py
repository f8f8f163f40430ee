"""The parser of a call format, for one tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from unbroken.messages import ToolSchema
from unbroken.rendering.base import ParsedResponse
from unbroken.rendering.encoding.control_tokens import AddedTokens
from unbroken.rendering.parsing.call_format import CallFormat
from unbroken.rendering.parsing.reading.decoding import TokenTexts
from unbroken.rendering.parsing.reading.delimiters import Delimiters
from unbroken.rendering.parsing.reading.id_stream import IdStream
from unbroken.rendering.parsing.reading.parts import PartBuilder
from unbroken.rendering.parsing.reading.reader import FormatReader


class FormatParser:
    """Implements `ResponseParser`. It keeps no state of completions, only the text of each id that it met."""

    def __init__(
        self,
        call_format: CallFormat,
        *,
        control: AddedTokens,
        decode: Callable[[Sequence[int]], str],
        stop_token_ids: Collection[int] = (),
        num_stop_ids: int = 1,
    ) -> None:
        """`stop_token_ids` are the ids that end a turn, at most `num_stop_ids` of them in a row."""
        self.call_format = call_format
        self._delimiters = Delimiters(call_format.delimiters, control=control)
        self._texts = TokenTexts(decode)
        self._stops = {token_id: control.get_text(token_id) or "" for token_id in stop_token_ids}
        self._num_stop_ids = num_stop_ids

    @property
    def name(self) -> str:
        """The name of the format."""
        return self.call_format.name

    def opens_reasoning(self, prompt_end: str) -> bool:
        """Whether a prompt that ends with this text ends inside reasoning."""
        return self.call_format.opens_reasoning(prompt_end)

    def open_reader(self, *, reasoning_opened: bool = False, tools: Sequence[ToolSchema] = ()) -> FormatReader:
        """Open a reader for one completion; see `ResponseParser`."""
        parts = PartBuilder()
        stream = IdStream(
            delimiters=self._delimiters,
            texts=self._texts,
            stops=self._stops,
            num_stop_ids=self._num_stop_ids,
            parts=parts,
        )
        return FormatReader(self.call_format, stream, parts, reasoning_opened=reasoning_opened, tools=tools)

    def parse(
        self, completion_ids: Iterable[int], *, reasoning_opened: bool = False, tools: Sequence[ToolSchema] = ()
    ) -> ParsedResponse:
        """Read a whole completion; see `ResponseParser`."""
        reader = self.open_reader(reasoning_opened=reasoning_opened, tools=tools)
        reader.feed(completion_ids)
        return reader.finish()
