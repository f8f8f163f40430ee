"""`unbroken new NAME`: the task of docs/getting-started.md, in files that run as they are, and that a user changes.

prompts.jsonl, table.json      the problems, and what the tool knows
tools.py                       what the model may call
rewards.py, test_rewards.py    what is rewarded, and its test
task.toml, README.md           the model and the settings, and which command does what
model/                         the demo's tiny model, unless another is named
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path

from unbroken.demo.config import WarmUpConfig
from unbroken.demo.lookup import EXPLANATION, SYLLABLES
from unbroken.errors import InvalidInputError
from unbroken.model_source import check_model_source
from unbroken.weights.folders import atomic_folder

NUM_PROMPTS = 256
MODEL = "model"
"""The folder of the tiny model, beside the task."""
_TOOLS = '''\
import json
from pathlib import Path

from unbroken import tool

TABLE = json.loads((Path(__file__).parent / "table.json").read_text())


@tool
def lookup(key: str) -> dict[str, str]:
    """Look up a key.

    Args:
        key: The key.
    """
    return TABLE.get(key, {"error": "no such key"})
'''
_REWARDS = """\
def correct(completions, answer):
    return [float(text.strip() == f'Answer: "{right}"') for text, right in zip(completions, answer)]
"""
_TEST = """\
from rewards import correct


def test_only_the_right_answer_is_rewarded():
    completions = ['Answer: "pemi"', 'Answer: "tuvo"', "pemi"]
    assert correct(completions, answer=["pemi", "pemi", "pemi"]) == [1.0, 0.0, 0.0]


if __name__ == "__main__":
    test_only_the_right_answer_is_rewarded()
    print("the reward is as its test says")
"""
_SETTINGS = """\
model = {model}
data.file = "prompts.jsonl"
tools = ["tools.py:lookup"]
output = "runs/first"
rollouts.sampling.max_tokens = {max_tokens}
trainer.optimizer.learning_rate = {learning_rate}
loop.num_steps = 20
evaluation.num_problems = 64

[[rewards]]
function = "rewards.py:correct"
"""
_README = """\
# {name}
The model looks up a word, then the word that it was given, and answers with the value: 1 if that is right, else 0.

- `prompts.jsonl`: a problem in each line; columns other than `prompt` go to the reward, by their names
- `tools.py`: what the model may call; it sees types and docstring (`table.json` is what this tool knows)
- `rewards.py`: what is rewarded; `python test_rewards.py` tests it
- `task.toml`: the model and the settings; `unbroken train task.toml --help` describes them

`unbroken doctor task.toml` samples a few rollouts and says what is wrong with them. `unbroken train task.toml` trains,
and `unbroken view runs/first` shows the run.
"""


def write_task(folder: Path, model: str | None = None, *, warm_up: WarmUpConfig | None = None) -> list[str]:
    """Write a task for `model`, a folder or a hub's name, and return the names of its files.

    Without `model` the demo's tiny one is made beside the task, in a minute or two. It has seen such prompts; for
    another one each prompt has an explanation, and the learning rate is that of a large model.

    Raises:
        InvalidInputError: the folder is there, or cannot be written, or `model` names no model.
    """
    if folder.exists() or folder.is_symlink():
        raise InvalidInputError(f"NAME must be a folder that is not there yet, got {folder}")
    if model is not None:
        check_model_source(model, name="--model")
    files = _make_files(folder.name, model)
    try:
        with atomic_folder(folder) as part:
            for name, text in files.items():
                (part / name).write_text(text, "utf-8")
            if model is None:
                from unbroken.demo.model import write_warm_model

                write_warm_model(part / MODEL, warm_up or WarmUpConfig(), seed=0)
    except OSError as error:
        raise InvalidInputError(f"NAME must be a folder that can be written, got {folder}: {error}") from error
    return [*files, *([MODEL] if model is None else [])]


def _make_files(name: str, model: str | None) -> Mapping[str, str]:
    """The text of each file, by its name."""
    table, rows = _draw_problems(explanation=EXPLANATION if model else "")
    source = MODEL if model is None else str(Path(model).absolute()) if Path(model).is_dir() else model
    settings = _SETTINGS.format(
        model=json.dumps(source, ensure_ascii=False),
        max_tokens=256 if model else 64,
        learning_rate="1e-6" if model else "5e-4",  # a tenth of a million parameters takes more than a large model
    )
    return {
        "README.md": _README.format(name=name),
        "task.toml": settings,
        "prompts.jsonl": "".join(json.dumps(row) + "\n" for row in rows),
        "rewards.py": _REWARDS,
        "test_rewards.py": _TEST,
        "tools.py": _TOOLS,
        "table.json": json.dumps(table, indent=1) + "\n",
    }


def _draw_problems(*, explanation: str) -> tuple[dict[str, dict[str, str]], list[dict[str, str]]]:
    """The table, and rows with a prompt and its answer. No syllable occurs twice in a problem, no key in two."""
    draw = random.Random(0)
    table: dict[str, dict[str, str]] = {}
    rows: list[dict[str, str]] = []
    while len(rows) < NUM_PROMPTS:
        parts = draw.sample(SYLLABLES, 6)
        first, second, value = (a + b for a, b in zip(parts[::2], parts[1::2], strict=True))
        if {first, second} & table.keys():
            continue
        table |= {first: {"next": second}, second: {"value": value}}
        rows.append({"prompt": f'Start at "{first}".{explanation}', "answer": value})
    return table, rows
