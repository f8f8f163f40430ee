"""A scripted model that answers the clients' question with two calls of `add`, in the way each client shows results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from support.servers import encode, make_app, scripted_engine, server_tokenizer

END = "<|im_end|>"
CALL = '<think>\nhm\n</think>\n\n<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>' + END
CALLS = (CALL.format("add", '{"a": 2, "b": 3}'), CALL.format("add", '{"a": 5, "b": 4}'))
MALFORMED = f'<think>\nhm\n</think>\n\n<tool_call>\n{{"name": "add", oops\n</tool_call>{END}'
ANSWER = "The answer is 9."
FINAL_ANSWER = CALL.format("final_answer", '{"answer": "The answer is 9."}')
CODE = (
    "I add.\n<code>\nprint(add(a=2, b=3))\n</code>" + END,
    'I add again.\n<code>\ntotal = add(a=5, b=4)\nfinal_answer(f"The answer is {total}.")\n</code>' + END,
)


@dataclass(slots=True)
class Played:
    """The application, and the ids of each turn: prompts and completions."""

    app: Any = None
    turns: list[tuple[list[int], list[int]]] = field(default_factory=list)

    def is_one_sequence(self) -> bool:
        """Whether each prompt begins with the turn before it (I1)."""
        pairs = zip(self.turns, self.turns[1:], strict=False)
        return all(after[: len(prompt + ids)] == prompt + ids for (prompt, ids), (after, _) in pairs)


def play() -> Played:
    """Make the application of a server that plays."""
    played = Played()

    def reply(prompt_ids: Any) -> list[int]:
        text = server_tokenizer().decode(prompt_ids)
        ids = encode(_choose(text))
        played.turns.append((prompt_ids.tolist(), ids))
        return ids

    played.app = make_app(scripted_engine(reply, context_length=16384))
    return played


def _choose(prompt: str) -> str:
    asked = prompt.rindex("What is 2 + 3 + 4?")
    if "<code>" in prompt:  # smolagents' CodeAgent
        return CODE[min(prompt.count("Observation", asked), 1)]
    num_results = prompt.count("<tool_response>", asked) + prompt.count("Observation", asked)
    if "badly" in prompt:
        return MALFORMED
    if num_results < len(CALLS):
        return CALLS[num_results]
    return FINAL_ANSWER if "final_answer" in prompt else f"<think>\nhm\n</think>\n\n{ANSWER}{END}"
