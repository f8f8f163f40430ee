"""`unbroken new NAME`: the task of docs/getting-started.md, in files that run as they are, and that a user changes.

README.md                      which command does what, and what to edit
make_data.py                   writes prompts.jsonl, the problems, and table.json, what the tool knows
tools.py                       what the model may call
rewards.py, test_rewards.py    what is rewarded, and its test
task.toml                      the model, the rewards and the settings: `unbroken train task.toml`
train.py                       the same without a TOML file: `python train.py`
.gitignore                     leaves out the runs
model/                         the demo's tiny model, unless another is named

The tiny model is the demo's (`warm.py`).
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path

from unbroken.demo.config import WarmUpConfig
from unbroken.demo.lookup import EXPLANATION, SYLLABLES
from unbroken.demo.warm import write_warm_model
from unbroken.errors import InvalidInputError
from unbroken.model_source import check_model_source
from unbroken.weights.folders import atomic_folder

NUM_PROMPTS = 256
MODEL = "model"
"""The folder of the tiny model, beside the task."""
_DATA = """\
import json
import random

draw = random.Random(0)
syllables = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
table, rows = {}, []
while len(rows) < 256:
    parts = draw.sample(syllables, 6)
    first, second, value = (a + b for a, b in zip(parts[::2], parts[1::2]))
    if {first, second} & table.keys():
        continue
    table |= {first: {"next": second}, second: {"value": value}}
    rows.append({"prompt": f'Start at "{first}".', "answer": value})  # EDIT 1
with open("table.json", "w") as file:
    json.dump(table, file)
with open("prompts.jsonl", "w") as file:
    file.writelines(json.dumps(row) + "\\n" for row in rows)
"""
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


# EDIT 2: your reward, a number for each conversation.
def one_lookup(messages):
    return [float(sum(each["role"] == "tool" for each in talk) == 1) for talk in messages]
"""
_TEST = """\
import rewards


def test_correct():
    completions = ['Answer: "pemi"', 'Answer: "tuvo"', "pemi"]
    assert rewards.correct(completions, answer=["pemi", "pemi", "pemi"]) == [1.0, 0.0, 0.0]


def test_one_lookup():
    asked, found = {"role": "user", "content": "..."}, {"role": "tool", "content": '{"next": "bode"}'}
    assert rewards.one_lookup([[asked], [asked, found], [asked, found, found]]) == [0.0, 1.0, 0.0]


if __name__ == "__main__":
    for name, reward in vars(rewards).items():
        if getattr(reward, "__module__", None) == "rewards" and not name.startswith("_"):
            test = globals().get(f"test_{name}")
            if test is not None:
                test()
            print(f"{name}: {'as its test says' if test else 'NOT TESTED'}")
"""
_SETTINGS = """\
model = {model}
data.file = "prompts.jsonl"
tools = ["tools.py:lookup"]
output = "runs/first"  # EDIT 3: another folder
rollouts.sampling.max_tokens = {max_tokens}
trainer.optimizer.learning_rate = {learning_rate}
loop.num_steps = 20
evaluation.num_problems = 64

[[rewards]]
function = "rewards.py:correct"

# EDIT 3: remove the #
#[[rewards]]
#function = "rewards.py:one_lookup"
#weight = 0.5
"""
_SCRIPT = """\
import json

import unbroken
from rewards import correct
from tools import lookup

rows = [json.loads(line) for line in open("prompts.jsonl")]
result = unbroken.fit(
    {model}, rows, tools=[lookup], steps=20, output="runs/fit",
    rewards=[{{"function": correct}}],  # as in task.toml: {{"function": one_lookup, "weight": 0.5}}
    rollouts={{"sampling": {{"max_tokens": {max_tokens}}}}}, evaluation={{"num_problems": 64}},
    trainer={{"optimizer": {{"learning_rate": {learning_rate}}}}},
)
for line in result.evaluations:
    print(line)
"""
_IGNORED = """\
runs/
__pycache__/
"""
_README = """\
# {name}
The model looks up a word, then the word that it got, and answers with its value: reward 1 if right, else 0.
```
unbroken train task.toml    # {duration}; ±: one standard error
unbroken view runs/first
```

## Your own task: three edits
Marked `EDIT`. For example, answer with the word of the *first* lookup, and do no other:

1. `make_data.py`: the rows. Write `"answer": second`.
2. `rewards.py`: `one_lookup` is there. It may name `completions`, `messages`, columns of the rows.
3. `task.toml`: `output = "runs/second"`, and `one_lookup` without the `#`. Rewards are added, each times its `weight`.

```
python make_data.py
python test_rewards.py
unbroken train task.toml
unbroken eval task.toml --model {model} --model runs/second    # before, after, on 64 of the rows that train
unbroken doctor runs/second    # what is wrong
```
`tools.py` has the tool. `train.py` is the same as a script; another reward needs another `output`. Settings:
`unbroken train task.toml --help`.
"""
_README_OF_TINY = """
## What the tiny model can learn
Training amplifies what some rollouts do already: lookups, then the word of the last. `correct`, in 20 steps:

| | |
|---|---|
| the example | 0.38 to 0.89 |
| three lookups in a row | 0.39 to 0.94 |
| depending on a lookup's answer | 0.46 to 0.49 |
| the start word (never sampled) | 0 to 0 |

For other prompts or tools, put your own model into `task.toml`, with a learning rate of 1e-6.
"""


def write_task(folder: Path, model: str | None = None) -> list[str]:
    """Write a task for `model`, a folder or a hub's name, and return the names of its files.

    Without `model` the demo's tiny one is put beside the task. It has seen such prompts; for another one each prompt
    has an explanation, and the learning rate is that of a large model.

    Raises:
        InvalidInputError: the folder is there, or cannot be written, or `model` names no model.
    """
    if folder.exists() or folder.is_symlink():
        raise InvalidInputError(f"NAME must be a folder that is not there yet, got {folder}")
    if model is not None:
        check_model_source(model, name="--model")
    texts = _make_files(folder.name, model)
    try:
        with atomic_folder(folder) as part:
            for name, text in texts.items():
                (part / name).write_text(text, "utf-8")
            if model is None:
                write_warm_model(part / MODEL, WarmUpConfig(), seed=0)
    except OSError as error:
        raise InvalidInputError(f"NAME must be a folder that can be written, got {folder}: {error}") from error
    return [*texts, *([MODEL] if model is None else [])]


def _make_files(name: str, model: str | None) -> Mapping[str, str]:
    """The text of each file, by its name."""
    table, rows = _draw_problems(explanation=EXPLANATION if model else "")
    source = MODEL if model is None else str(Path(model).absolute()) if Path(model).is_dir() else model
    values = {
        "model": json.dumps(source, ensure_ascii=False),
        "max_tokens": 256 if model else 64,
        "learning_rate": "1e-6" if model else "5e-4",  # a tenth of a million parameters takes more than a large model
    }
    return {
        "README.md": _README.format(
            name=name, model=source, duration="20 steps" if model else "about 40 CPU seconds, longer on busy cores"
        )
        + ("" if model else _README_OF_TINY),
        "task.toml": _SETTINGS.format(**values),
        "make_data.py": _DATA if model is None else _DATA.replace("\".'", f"\".' + {EXPLANATION!r}"),
        "prompts.jsonl": "".join(json.dumps(row) + "\n" for row in rows),
        "rewards.py": _REWARDS,
        "test_rewards.py": _TEST,
        "tools.py": _TOOLS,
        "train.py": _SCRIPT.format(**values),
        ".gitignore": _IGNORED,
        "table.json": json.dumps(table),
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
