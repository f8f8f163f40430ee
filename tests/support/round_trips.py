"""Random assistant turns, and their ids as the last turn of a conversation in a template of the corpus."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from support.conversations import WORDS
from support.corpus import CorpusTemplate
from support.corpus_oracle import facts_of
from unbroken.errors import TemplateError
from unbroken.messages import Message
from unbroken.rendering.base import ParsedResponse
from unbroken.rendering.template import TemplateRenderer
from unbroken.types import TokenIds

QUESTION: Message = {"role": "user", "content": "What now?"}
PROPERTIES: dict[str, Any] = {
    "query": {"type": "string"},
    "limit": {"type": "integer"},
    "ratio": {"type": "number"},
    "exact": {"type": "boolean"},
    "page": {"type": "integer", "nullable": True},
    "tags": {"type": "array"},
    "where": {"type": "object"},
}
TOOLS: tuple[Any, ...] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Does {name}.",
            "parameters": {
                "type": "object",
                "properties": {key: {**schema, "description": "a value"} for key, schema in properties.items()},
            },
        },
    }
    for name, properties in (("search", PROPERTIES), ("now", {}))
)
PLAIN_WORDS = (
    "the file",
    "Größe",
    "今天",
    "😀",
    "e\u0301",
    "x" * 30,
    "12:30",
    "a < b > c | d",
    "user",
    "\n",
    "  ",
    "; ",
    "[1]",
)
QUOTED_WORDS = (
    *PLAIN_WORDS,
    *WORDS,
    "don't",
    '"',
    "\\",
    "\\n",
    "\\u00e9",
    "'",
    "C:\\new",
    "\r\n",
    "{",
    "}]",
    "```json",
)


def random_text(rng: random.Random, words: Sequence[str]) -> str:
    """One word or more, without white space around it, which belongs to the format beside delimiters."""
    return "".join([rng.choice(words) + rng.choice(("", " ")) for _ in range(rng.randrange(1, 7))]).strip() or "so"


def random_arguments(rng: random.Random, words: Sequence[str]) -> dict[str, Any]:
    """Some arguments of `search`, of the types that its schema says."""
    where = {"a": random_text(rng, words), "b": [1, {"c": None, "d": True}], "e": {"f": -0.5, "g": []}}
    arguments: dict[str, Any] = {
        "query": rng.choice((random_text(rng, words), "5", "true", "")),
        "limit": rng.choice((0, -7, 10**12)),
        "ratio": rng.choice((0.5, -2.25, 1e-07)),
        "exact": rng.random() < 0.5,
        "page": rng.choice((None, 3)),
        "tags": rng.choice(([], ["x", random_text(rng, words)], [[1, 2], {}])),
        "where": rng.choice(({}, {"k": "v"}, where)),
    }
    return {key: arguments[key] for key in rng.sample(sorted(arguments), rng.randrange(1, len(arguments)))}


def random_calls(rng: random.Random, num_calls: int, words: Sequence[str]) -> list[Any]:
    """Calls of `search`; the last one may be of `now`, which has no arguments."""
    functions: list[dict[str, Any]] = [
        {"name": "search", "arguments": random_arguments(rng, words)} for _ in range(num_calls)
    ]
    if num_calls and rng.random() < 0.3:
        functions[-1] = {"name": "now", "arguments": {}}
    return [{"id": f"call0000{k}", "type": "function", "function": function} for k, function in enumerate(functions)]


@dataclass(frozen=True, slots=True)
class RenderedTurn:
    """The ids that a model samples when it writes this turn."""

    prompt_ids: TokenIds
    completion_ids: TokenIds
    text: str


class TurnRenderer:
    """A template, on a local tokenizer whose models end a turn with `stop`, one that makes calls with another."""

    def __init__(self, tokenizer: Any, *, stop: str, stop_of_calls: str = "") -> None:
        self.tokenizer = tokenizer
        self.renderer = TemplateRenderer(tokenizer)
        self._stop = stop
        self._stop_of_calls = stop_of_calls or stop
        self._prompt_ids = self.renderer.render([QUESTION], tools=TOOLS).token_ids

    @classmethod
    def of(cls, template: CorpusTemplate) -> "TurnRenderer":
        """For a template of the corpus."""
        facts = facts_of(template)
        return cls(template.tokenizer(), stop=facts.stop, stop_of_calls=facts.stop_of_calls)

    @property
    def control_tokens(self) -> tuple[str, ...]:
        """As the template spells them, and so may a text."""
        return tuple(
            sorted(token for token in self.tokenizer.get_added_vocab() if token in self.tokenizer.chat_template)
        )

    def render(self, turn: Message) -> RenderedTurn | None:
        """The turn behind a question; None if the template raises, or cuts or rewrites text with control tokens in it.

        A prompt that the template does not repeat in its history ends where the two begin to differ.
        """
        try:
            whole = self.renderer.render_ids([QUESTION, turn], tools=TOOLS)
        except TemplateError:
            return None
        start = num_common(self._prompt_ids, whole)
        stop = self._stop_of_calls if turn.get("tool_calls") else self._stop
        stop_id = self.tokenizer.convert_tokens_to_ids(stop) if stop else None
        ends = [k for k in range(start, len(whole)) if whole[k] == stop_id]
        ids = whole[start : ends[-1] + 1 if ends else len(whole)]
        return RenderedTurn(whole[:start], ids, self.tokenizer.decode(ids))

    def parse(self, turn: RenderedTurn) -> ParsedResponse:
        """Parse the turn with our parser."""
        return self.renderer.parse_response(turn.completion_ids, prompt_ids=turn.prompt_ids, tools=TOOLS)


def num_common(one: TokenIds, other: TokenIds) -> int:
    """Count the ids that both have in common at the beginning."""
    return next((k for k, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
