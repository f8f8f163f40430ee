"""Scripted models for agents in a session: one adds numbers with an agent's tool, one works in an agent's shell.

Each answers its k-th request with the k-th step of the task, in the form that the prompt asks for, so that the agent
really runs its tools. What it says differs from turn to turn, as what a sampled model says does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from support.agent_server import CALL, END
from support.servers import encode, server_tokenizer

NUMBERS = (2, 3, 4, 5, 6, 7)
QUESTION = f"What is {' + '.join(map(str, NUMBERS))}?"
ANSWER = f"The answer is {sum(NUMBERS)}."
ADDITIONS = tuple(zip(accumulate(NUMBERS), NUMBERS[1:], strict=False))
"""What the model adds, one after the other."""

TASK = "Write the lines one and two into notes.txt."
COMMANDS = (
    ("printf 'one\\n' > notes.txt",),
    ("cat notes.txt", "cat missing.txt"),
    ("printf 'two\\n' >> notes.txt",),
    ("wc -l < notes.txt",),
    ("ls",),
)
"""The commands of each turn. The second turn has two, one of which fails."""
NOTES = "one\ntwo\n"
DONE = "The notes are written."
_SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""The command with which a model ends the task of mini-swe-agent."""
_SHELLS: dict[str, Callable[[str], dict[str, Any]]] = {
    "bash": lambda command: {"command": command, "description": "Run a command"},
    "Bash": lambda command: {"command": command, "description": "Run a command"},
    "exec_command": lambda command: {"cmd": command},
    "shell_command": lambda command: {"command": command},
    "shell": lambda command: {"command": ["bash", "-c", command]},
    "run_shell_command": lambda command: {"command": command, "description": "Run a command", "is_background": False},
    "run_commands": lambda command: {"commands": [command]},
}
"""Names of agents' shell tools, and the arguments that run a command."""
_TOOLS = re.compile(r"<tools>\n(.*?)\n</tools>", re.DOTALL)

Step = Callable[[str, int], str | None]
"""Makes the reply to the k-th prompt of the task; None for a prompt that does not belong to it."""


@dataclass(slots=True)
class Player:
    """The script of an engine, and all that it sampled."""

    step: Step
    turns: list[tuple[list[int], list[int]]] = field(default_factory=list)
    """The ids of each turn: prompt and completion."""
    _num_steps: int = 0

    def __call__(self, prompt_ids: Any) -> list[int]:
        reply = self.step(server_tokenizer().decode(prompt_ids), self._num_steps)
        self._num_steps += reply is not None
        ids = encode(f"Aside {len(self.turns)}.{END}" if reply is None else reply)
        self.turns.append((prompt_ids.tolist(), ids))
        return ids


def add_up(prompt: str, number: int) -> str:
    """Add the numbers one by one with the tool `add`, or in code for smolagents' CodeAgent, then answer."""
    step = number % len(NUMBERS)
    is_last = step == len(ADDITIONS)
    if "<code>" in prompt:
        code = f'final_answer("{ANSWER}")' if is_last else f"print(add{ADDITIONS[step]})"
        return f"Step {number}.\n<code>\n{code}\n</code>{END}"
    if not is_last:
        a, b = ADDITIONS[step]
        return _call("add", [{"a": a, "b": b}], number)
    if '"final_answer"' in prompt:
        return _call("final_answer", [{"answer": ANSWER}], number)
    return _say(ANSWER)


def write_notes(prompt: str, number: int) -> str | None:
    """Run the commands in the agent's shell tool, or as text that mini-swe-agent reads, then say that it is done."""
    commands = (*COMMANDS, *([(_SUBMIT,)] if _SUBMIT in prompt else []))
    if "```mswea_bash_command" in prompt:
        return _say(f"Step {number}.\n\n```mswea_bash_command\n{'; '.join(commands[number])}\n```")
    shell = next((name for name in _list_tools(prompt) if name in _SHELLS), None)
    if shell is None:
        return None
    if number >= len(commands):
        return _say(DONE)
    return _call(shell, [_SHELLS[shell](command) for command in commands[number]], number)


def count_trained(rows: Iterable[Any], turns: Iterable[tuple[list[int], list[int]]]) -> tuple[int, int]:
    """Count the turns that are trained exactly, and the trained ids of no such turn: (all turns, 0) is right.

    A turn is exact if one row has its prompt and its ids at their place, trained; two equal turns need two rows.
    """
    left = [(row.token_ids.tolist(), row.loss_mask.tolist()) for row in rows]
    num_trained = sum(sum(mask) for _, mask in left)
    num_exact = 0
    for prompt, completion in turns:
        end = len(prompt) + len(completion)
        for ids, mask in left:
            if ids[:end] == prompt + completion and all(mask[len(prompt) : end]):
                mask[len(prompt) : end] = [False] * len(completion)  # so that no other turn finds it
                num_exact += 1
                num_trained -= len(completion)
                break
    return num_exact, num_trained


def _call(name: str, calls: Sequence[dict[str, Any]], number: int) -> str:
    texts = [CALL.format(name, json.dumps(arguments)).removesuffix(END).split("\n\n", 1) for arguments in calls]
    reasoning = texts[0][0]
    return "\n".join([f"{reasoning}\n\nStep {number}.", *(call for _, call in texts)]) + END


def _say(text: str) -> str:
    return f"<think>\nhm\n</think>\n\n{text}{END}"


def _list_tools(prompt: str) -> list[str]:
    """The names of the tools; an agent's system prompt may have the words around them too."""
    lines = [line for found in _TOOLS.finditer(prompt) for line in found.group(1).split("\n")]
    return [json.loads(line)["function"]["name"] for line in lines if line.startswith('{"type": "function"')]
