"""Measures what certificates cost: CPU time and renderings, for each chat template that trl and vllm ship, or others.

    OMP_NUM_THREADS=1 python bench/certificates.py [FOLDER_OR_FILE ..] [--slowest 10] [--rounds 3]

Each template gets a stand-in tokenizer (`unbroken audit` explains it). Three first bridges of a new renderer are
measured, each with tools: a tool result after one call, two results after two calls, and a question after a text; for
any history, and for this one, which examines more classes where the first is refused. Times are minima of CPU times
over the rounds.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unbroken.audit.config import AuditTarget
from unbroken.audit.loading import load_subject
from unbroken.errors import UnbrokenError
from unbroken.messages import Message, ToolSchema
from unbroken.rendering.base import Bridge
from unbroken.types import token_ids

SHIPPED = {"trl": "chat_templates", "vllm": "transformers_utils/chat_templates"}
TOOLS: tuple[ToolSchema, ...] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Does {name}.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    }
    for name in ("read", "write")
)
HISTORY: list[Message] = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Hi."},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "Which file?"},
]


def make_call(number: int) -> Any:
    return {"id": f"call{number:05d}", "type": "function", "function": {"name": "read", "arguments": {"path": "a"}}}


def make_result(number: int) -> Message:
    return {"role": "tool", "tool_call_id": f"call{number:05d}", "name": "read", "content": "42"}


SHAPES: dict[str, tuple[Message, list[Message]]] = {
    "result": ({"role": "assistant", "content": "", "tool_calls": [make_call(0)]}, [make_result(0)]),
    "results": (
        {"role": "assistant", "content": "", "tool_calls": [make_call(0), make_call(1)]},
        [make_result(0), make_result(1)],
    ),
    "question": ({"role": "assistant", "content": "It is a."}, [{"role": "user", "content": "Sure?"}]),
}


def main() -> None:
    """Print a row for each template, the most expensive first."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("places", nargs="*", type=Path, help="templates or folders (default: those of trl and vllm)")
    parser.add_argument("--slowest", type=int, help="print the most expensive ones only")
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    rows = [measure(file, arguments.rounds) for file in find_templates(arguments.places)]
    rows.sort(key=lambda row: row[0], reverse=True)
    print(f"{'CPU ms (renderings)':45}", *(f"{name:>18} {'in this history':>22}" for name in SHAPES))
    print(*(line for _, line in rows[: arguments.slowest]), sep="\n")
    print(f"the largest of {len(rows)}: {rows[0][0] * 1e3:.0f} ms; all: {sum(cost for cost, _ in rows):.2f} s")


def find_templates(places: Sequence[Path]) -> list[Path]:
    """The files, those in the folders, or the shipped ones."""
    if not places:
        specs = {package: importlib.util.find_spec(package) for package in SHIPPED}
        found = {name: spec.submodule_search_locations for name, spec in specs.items() if spec is not None}
        places = [Path(next(iter(folders))) / SHIPPED[name] for name, folders in found.items() if folders]
    return [file for place in places for file in (sorted(place.glob("*.jinja")) if place.is_dir() else [place])]


def measure(file: Path, num_rounds: int) -> tuple[float, str]:
    """The largest cost of one certificate for any history in seconds, and the row."""
    largest, cells = 0.0, [f"{file.stem[:44]:45}"]
    for turn, new_messages in SHAPES.values():
        for earlier in (None, HISTORY):
            try:
                costs = [measure_once(file, turn, new_messages, earlier) for _ in range(num_rounds)]
            except UnbrokenError as error:
                cells.append(f"{type(error).__name__[:18]:>{18 if earlier is None else 22}}")
                continue
            cost_s, num_renderings, num_certificates, is_exact = min(costs)
            mark = " " if is_exact else "-"
            if earlier is None:
                largest = max(largest, cost_s)
                cells.append(f"{cost_s * 1e3:>10.0f} ({num_renderings:>4}){mark}")
            else:
                cells.append(f"{cost_s * 1e3:>10.0f} ({num_renderings:>4}, {num_certificates:>2}){mark}")
    return largest, " ".join(cells)


def measure_once(
    file: Path, turn: Message, new_messages: list[Message], earlier: list[Message] | None
) -> tuple[float, int, int, bool]:
    """CPU seconds of the first bridge of a new renderer, its renderings and certificates, and whether it is exact."""
    renderer = load_subject(AuditTarget(template=str(file))).template_renderer
    stop_ids = renderer.get_stop_token_ids()[:1]
    start = time.process_time()
    outcome = renderer.bridge_to_next_turn(
        token_ids([]), token_ids(stop_ids), new_messages, assistant=turn, tools=TOOLS, earlier=earlier
    )
    cost_s = time.process_time() - start
    records = renderer.certificates()
    return cost_s, sum(record.num_renderings for record in records), len(records), isinstance(outcome, Bridge)


if __name__ == "__main__":
    main()
