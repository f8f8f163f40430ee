"""A small agent of a terminal, as mini-swe-agent: it asks a model for commands, runs them, and shows what they print.

    python terminal_agent.py [--text] INSTRUCTION

With `--text` the commands are blocks of the reply's text, else calls of a tool. It needs only the standard library, and
finds the model in OPENAI_BASE_URL and OPENAI_API_KEY.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from typing import Any

MAX_TURNS = 12
END = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
TEXT_PROMPT = f"Answer with one block:\n```mswea_bash_command\ncommand\n```\nTo end: echo {END}"
BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


def main(instruction: str, *, in_text: bool) -> None:
    """Work until the model asks for nothing more."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": instruction}]
    if in_text:
        messages.insert(0, {"role": "system", "content": TEXT_PROMPT})
    for _ in range(MAX_TURNS):
        reply = ask(messages, [] if in_text else [BASH])
        messages.append(reply)
        print(json.dumps(reply), flush=True)
        answers = act_on_text(reply) if in_text else act_on_calls(reply)
        if not answers:
            return
        messages += answers


def ask(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> dict[str, Any]:
    body = {"model": os.environ["UNBROKEN_MODEL"], "messages": messages, **({"tools": tools} if tools else {})}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    with urllib.request.urlopen(request) as answer:
        found: dict[str, Any] = json.load(answer)["choices"][0]["message"]
    return {name: value for name, value in found.items() if value is not None}


def act_on_calls(reply: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "role": "tool",
            "tool_call_id": call["id"],
            "content": run(json.loads(call["function"]["arguments"])["command"]),
        }
        for call in reply.get("tool_calls") or ()
    ]


def act_on_text(reply: dict[str, Any]) -> list[dict[str, Any]]:
    found = re.search(r"```mswea_bash_command\n(.*?)\n```", reply.get("content") or "", re.DOTALL)
    if found is None:
        return []
    output = run(found[1])
    return [] if END in output else [{"role": "user", "content": output}]


def run(command: str) -> str:
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    return f"{done.stdout}{done.stderr}[exit {done.returncode}]"


if __name__ == "__main__":
    main(sys.argv[-1], in_text="--text" in sys.argv)
