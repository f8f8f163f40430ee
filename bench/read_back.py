"""How many turns with calls are read back as they were, for the chat templates in a folder: whole, and id by id.

    python bench/read_back.py [FOLDER] [--turns 200] [--seed 0] [--options '{"enable_thinking": true}']

Each template gets a stand-in tokenizer (`unbroken audit` explains it). A turn has text or none, reasoning or none, and
up to three calls with arguments of all types; it follows a conversation of up to two exchanges. The ids that the
template writes for it are parsed, all at once and in random pieces. Turns that the template refuses, and parts of a
turn that it leaves out or rewrites, are not counted against the parser, but in a column of their own. Without a folder,
the templates that `trl` ships are tried.
"""

import argparse
import importlib.util
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

from unbroken.audit.config import AuditTarget
from unbroken.audit.subject import Subject, load_subject
from unbroken.errors import UnbrokenError
from unbroken.rendering.base import Delta, PartKind, ToolCallStatus
from unbroken.types import token_ids

WORDS = (
    *("the file", "Größe", "今天", "😀", "e\u0301", "12:30", "a < b & c > d", "it's", '"so"', "C:\\new", "\n", "  "),
    *("<b>x</b>", "{", "}]", "```json", "</parameter>", "5", "true", "null", "\t", "; ", "[1]", "user", ">>>", "|>"),
)
TREE: dict[str, Any] = {"type": "object", "properties": {"k": {"type": "string"}, "n": {"type": "integer"}}}
PROPERTIES: dict[str, Any] = {
    "query": {"type": "string"},
    "limit": {"type": "integer"},
    "ratio": {"type": "number"},
    "exact": {"type": "boolean"},
    "page": {"type": ["integer", "null"]},
    "tags": {"type": "array", "items": {"type": "string"}},
    "where": {
        "type": "object",
        "properties": {"a": {"type": "string"}, "b": TREE, "c": {"type": "array", "items": TREE}},
    },
}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Does {name}.",
            "parameters": {
                "type": "object",
                "properties": {key: {**schema, "description": "a value"} for key, schema in properties.items()},
                "required": [],
            },
        },
    }
    for name, properties in (("search", PROPERTIES), ("now", {}))
]


def make_text(rng: random.Random) -> str:
    """Some words, without white space around them, which the formats trim beside delimiters."""
    return "".join(rng.choice(WORDS) + rng.choice(("", " ")) for _ in range(rng.randrange(1, 7))).strip() or "so"


def make_arguments(rng: random.Random) -> dict[str, Any]:
    """Arguments of `search`, of the types that its schema says."""
    tree = {"k": make_text(rng), "n": rng.randrange(9)}
    values: dict[str, Any] = {
        "query": rng.choice((make_text(rng), "5", "true", "")),
        "limit": rng.choice((0, -7, 10**12)),
        "ratio": rng.choice((0.5, -2.25, 1e-07)),
        "exact": rng.random() < 0.5,
        "page": rng.choice((None, 3)),
        "tags": rng.choice(([], ["x", make_text(rng)], ["it's", "1"])),
        "where": rng.choice(({}, {"a": "v"}, {"a": make_text(rng), "b": tree, "c": [tree, {"n": 1}]})),
    }
    return {key: values[key] for key in rng.sample(sorted(values), rng.randrange(1, len(values)))}


def make_turn(rng: random.Random, number: int, *, reasons: bool) -> Any:
    """A turn with one to three calls."""
    functions = [
        {"name": "now", "arguments": {}} if rng.random() < 0.1 else {"name": "search", "arguments": make_arguments(rng)}
        for _ in range(rng.choice((1, 1, 2, 3)))
    ]
    calls = [{"id": f"call{number:04d}{k}", "type": "function", "function": f} for k, f in enumerate(functions)]
    content = f"{make_text(rng)} Zq8Said" if rng.random() < 0.5 else ""
    turn: dict[str, Any] = {"role": "assistant", "content": content}
    if reasons and rng.random() < 0.6:
        turn["reasoning_content"] = f"{make_text(rng)} Zq8Thought"
    return {**turn, "tool_calls": calls}


def make_history(rng: random.Random, *, reasons: bool) -> list[Any]:
    """A question, maybe after exchanges with calls."""
    history: list[Any] = []
    for k in range(rng.randrange(3)):
        turn = make_turn(rng, k, reasons=reasons)
        turn["tool_calls"] = turn["tool_calls"][:1]
        call = turn["tool_calls"][0]
        result = {
            "role": "tool",
            "content": make_text(rng),
            "tool_call_id": call["id"],
            "name": call["function"]["name"],
        }
        history += [{"role": "user", "content": make_text(rng)}, turn, result, {"role": "assistant", "content": "So."}]
    return [*history, {"role": "user", "content": make_text(rng)}]


def find_completion(subject: Subject, prompt: str, whole: str) -> tuple[str, str]:
    """The prompt as a model would get it, and the text that it would sample after it, stop token included."""
    control = subject.facts.control_tokens
    start = next((k for k, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(prompt))
    start = next((m.start for m in control.find(prompt) if m.start < start < m.stop), start)
    rest, body = prompt[start:], whole[start:]
    opening, closing = subject.facts.reasoning_markup
    if rest.strip() == opening:  # Reasoning that was opened, and that the history leaves out, was empty.
        body = f"{closing}{body}" if not body.lstrip().startswith(closing) else body
        start = len(prompt)
    elif "".join(rest.split()) == opening + closing and body.lstrip().startswith(closing):
        body = body.lstrip().removeprefix(closing)
        start = len(prompt)
    stops = {token.text for token in subject.get_tokens(subject.renderer.get_stop_token_ids())}
    ends = [m.stop for m in control.find(body) if m.token in stops]
    return prompt[:start], body[: ends[-1]] if ends else body


def read_streamed(subject: Subject, rng: random.Random, prompt: list[int], ids: list[int]) -> tuple[Any, list[Delta]]:
    reader = subject.renderer.open_response(prompt_ids=token_ids(prompt), tools=TOOLS)
    deltas: list[Delta] = []
    position = 0
    while position < len(ids):
        size = rng.choice((1, 1, 2, 5, 40))
        deltas += reader.feed(token_ids(ids[position : position + size]))
        position += size
    deltas += reader.close()
    return reader.finish(), deltas


def without_null(value: Any) -> Any:
    """MiniMax M3 and others leave out arguments that are null."""
    if isinstance(value, dict):
        return {key: without_null(item) for key, item in value.items() if item is not None}
    return [without_null(item) for item in value] if isinstance(value, list) else value


def measure(file: Path, *, num_turns: int, seed: int, options: dict[str, Any]) -> str:
    """Measure one template, and return its row."""
    subject = load_subject(AuditTarget(template=str(file), options=options))
    rng = random.Random(f"{seed}")
    reasons = subject.facts.message_format.reasoning_key is not None
    counts: Counter[str] = Counter()
    example = refusal = ""
    while counts["turns"] < num_turns and counts["tried"] < num_turns * 4:
        counts["tried"] += 1
        history, turn = make_history(rng, reasons=reasons), make_turn(rng, 9, reasons=reasons)
        try:
            prompt = subject.template_renderer.render_text(history, tools=TOOLS, add_generation_prompt=True)
            whole = subject.template_renderer.render_text([*history, turn], tools=TOOLS)
        except UnbrokenError as error:
            counts[f"refused ({type(error).__name__})"] += 1
            refusal = refusal or str(error)
            continue
        before_text, text = find_completion(subject, prompt, whole)
        before, ids = subject.encode(before_text), subject.encode(text)
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in turn["tool_calls"]]
        if sum(text.count(name) for name, _ in calls[:1]) == 0:
            counts["without calls"] += 1
            continue
        counts["turns"] += 1
        parsed, deltas = read_streamed(subject, rng, before, ids)
        same = parsed == subject.renderer.parse_response(token_ids(ids), prompt_ids=token_ids(before), tools=TOOLS)
        same &= "".join(d.text for d in deltas if d.kind is PartKind.CONTENT) == parsed.content
        same &= "".join(d.text for d in deltas if d.kind is PartKind.REASONING) == parsed.reasoning
        same &= tuple(d.tool_call for d in deltas if d.tool_call) == parsed.tool_calls
        counts["streamed"] += same
        read = [(c.name, c.arguments) if c.status is ToolCallStatus.OK else c.status.value for c in parsed.tool_calls]
        if read == calls:
            counts["calls"] += 1
        elif read and read == calls[: len(read)] and text.count("search") + text.count("now") < len(calls):
            counts["left out"] += 1
        elif read == [(name, without_null(arguments)) for name, arguments in calls]:
            counts["null left out"] += 1
        else:
            example = example or f"{json.dumps(calls, ensure_ascii=False)}\n  {text!r}\n  {read}"
        content, reasoning = str(turn["content"]), str(turn.get("reasoning_content", ""))
        if content in text:
            counts["contents"] += 1
            counts["content"] += parsed.content.strip() == content
        if reasoning and reasoning in text:
            counts["reasonings"] += 1
            counts["reasoning"] += parsed.reasoning.strip() == reasoning
            if parsed.reasoning.strip() != reasoning and not example:
                example = f"reasoning {reasoning!r} read as {parsed.reasoning!r} of {text!r}"
    other = ("tried", "turns", "calls", "streamed", "content", "contents", "reasoning", "reasonings")
    notes = ", ".join(f"{num} {name}" for name, num in counts.items() if name not in other)
    notes += f" ({refusal})" if refusal else ""
    row = (
        f"| {file.stem} | {subject.template_renderer.parser_name} | {counts['calls']}/{counts['turns']} "
        f"| {counts['content']}/{counts['contents']} | {counts['reasoning']}/{counts['reasonings']} "
        f"| {counts['streamed']}/{counts['turns']} | {notes or '-'} |"
    )
    return f"{row}\n{example}" if example else row


def find_shipped_folder() -> Path:
    """The folder of the chat templates of `trl`, which is not imported."""
    spec = importlib.util.find_spec("trl")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("name a folder of chat templates, or install trl (it is in the extra dev)")
    return Path(next(iter(spec.submodule_search_locations))) / "chat_templates"


def main() -> None:
    """Print a row for each template."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", help="default: the templates that trl ships")
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--options", type=json.loads, default={}, help="variables for the templates, as JSON")
    arguments = parser.parse_args()
    print("| template | format | calls | content | reasoning | streamed equal | the template |")
    print("|---|---|---|---|---|---|---|")
    for file in sorted((arguments.folder or find_shipped_folder()).glob("*.jinja")):
        try:
            print(measure(file, num_turns=arguments.turns, seed=arguments.seed, options=arguments.options), flush=True)
        except Exception as error:
            print(f"| {file.stem} | {type(error).__name__}: {str(error)[:200]} |", flush=True)


if __name__ == "__main__":
    main()
