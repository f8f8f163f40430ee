"""Measures the cost of reading completions, whole and id by id. It must not grow with what was read before.

    OMP_NUM_THREADS=1 python bench/parsing.py

Completions of 2k, 8k and 32k ids in two formats: text with a call about every 160 ids, and one long call. It needs the
extra `dev`.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unbroken.rendering.encoding.safe_encoder import SafeEncoder
from unbroken.rendering.parsing.formats import get_format
from unbroken.rendering.parsing.id_stream import CompletionTokens
from unbroken.rendering.parsing.parser import FormatParser

FORMATS = ("hermes", "glm")
LENGTHS = (2_000, 8_000, 32_000)
NUM_ROUNDS = 5
TEXT = 'Let me see what the weather in Paris is, Größe 😀 and { "a": [1, 2] }.\n\n'
CALLS = {
    "hermes": '<tool_call>\n{{"name": "f", "arguments": {{"a": "{}"}}}}\n</tool_call>\n',
    "glm": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>\n",
}


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from support.tokenizers import make_tokenizer

    print(f"{'format':8} {'ids':>6}  {'whole':>15}  {'id by id':>15}  calls")
    for name in FORMATS:
        call_format = get_format(name)
        tokenizer = make_tokenizer(None, control_tokens=sorted(call_format.delimiters))
        encoder = SafeEncoder(tokenizer.backend_tokenizer)
        parser = FormatParser(call_format, CompletionTokens(encoder.control, encoder.decode))
        mixed = encoder.encode_plain(TEXT * 2 + CALLS[name].format("x y " * 30)).tolist()
        for length in LENGTHS:
            measure(name, parser, (mixed * (length // len(mixed) + 1))[:length])
        measure(name, parser, encoder.encode_plain(CALLS[name].format("x y <b> " * (LENGTHS[-1] // 5))).tolist())


def measure(name: str, parser: FormatParser, ids: list[int]) -> None:
    num_calls = len(parser.parse(ids).tool_calls)
    whole = median_us(lambda: parser.parse(ids)) / len(ids)
    single = median_us(lambda: read_one_by_one(parser, ids)) / len(ids)
    print(f"{name:8} {len(ids):6}  {whole:9.2f} us/id  {single:9.2f} us/id  {num_calls:5}")


def read_one_by_one(parser: FormatParser, ids: list[int]) -> Any:
    reader = parser.open_reader()
    for token_id in ids:
        reader.feed([token_id])
    return reader.finish()


def median_us(work: Callable[[], Any]) -> float:
    times = []
    for _ in range(NUM_ROUNDS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


if __name__ == "__main__":
    main()
