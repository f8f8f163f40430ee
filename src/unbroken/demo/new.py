"""`unbroken new NAME`: the task of docs/getting-started.md, in files that run as they are, and that a user changes.

make_data.py                   writes prompts.jsonl, the problems, and table.json, what the tool knows
tools.py                       what the model may call
rewards.py, test_rewards.py    what is rewarded, and its test
task.toml, README.md           the model and the settings, and which command does what
model/                         the demo's tiny model, unless another is named

The tiny model comes with the package (`words/`), because its warm-up takes 100 CPU seconds, and minutes beside other
programs: it is what `write_warm_model(folder, WarmUpConfig(), seed=0)` writes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from unbroken.demo.lookup import EXPLANATION, SYLLABLES
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
    rows.append({"prompt": f'Start at "{first}".', "answer": value})
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
```
unbroken doctor task.toml       # samples 8 rollouts, and says what is wrong with them
unbroken train task.toml        # trains{duration}
unbroken view runs/first        # shows the run: curves, and each rollout
unbroken eval task.toml --model {model} --model runs/first
```

## Make it yours
| to change | where |
|---|---|
| the problems | `make_data.py`: `python make_data.py` writes `prompts.jsonl`, and `table.json` of the tool |
| the tool | `tools.py`: the model sees its types and its docstring |
| the reward | `rewards.py`: it gets columns of the data by their names; `python test_rewards.py` tests it |
| the model, the settings | `task.toml`; `unbroken train task.toml --help` describes them |

`unbroken train` continues the run in `runs/first`. After a change give it another folder:
```
unbroken train task.toml --output runs/second
```

To try: let the word of the first lookup be the answer (in `make_data.py` write `"answer": second`), and add a second
reward, a tenth for one lookup and no more. At the end of `rewards.py`:
```
def one_lookup(messages):
    return [float(sum(each["role"] == "tool" for each in talk) == 1) for talk in messages]
```
and at the end of `task.toml` (the reward is the sum, each times its `weight`):
```
[[rewards]]
function = "rewards.py:one_lookup"
weight = 0.1
```
"""
_README_OF_TINY = """
## What the tiny model can learn
`model` has 0.1 million parameters and knows one task: `Start at "raka".`, calls of `lookup` with one `key`, and
`Answer: "pemi"`, with words of two small syllables. In 20 steps it learns a rule that is the same for all problems:
which of the words that it has seen to answer, or a number of lookups. It does not learn one that depends on what a
lookup returns, and a second reward that wants what the first does not need is lost if its weight is small. Capitals,
other words and other tools never come: for these put a model of your own into `task.toml`, by its name on the hub or
its folder, and a learning rate of 1e-6.

The same from Python, without files: `unbroken.fit` (docs/getting-started.md in the clone, "Without files").

If other programs use the same cores, `export OMP_NUM_THREADS=1` makes it several times faster.
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
                _copy_model(part / MODEL)
    except OSError as error:
        raise InvalidInputError(f"NAME must be a folder that can be written, got {folder}: {error}") from error
    return [*texts, *([MODEL] if model is None else [])]


def _copy_model(folder: Path) -> None:
    """Write the tiny model; its chat template is the demo's."""
    folder.mkdir()
    demo = files("unbroken.demo")
    for each in demo.joinpath("words").iterdir():
        (folder / each.name).write_bytes(each.read_bytes())
    (folder / "chat_template.jinja").write_bytes(demo.joinpath("chat.jinja").read_bytes())


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
        "README.md": _README.format(
            name=name, model=source, duration="" if model else " 20 steps, in about 40 CPU seconds"
        )
        + ("" if model else _README_OF_TINY),
        "task.toml": settings,
        "make_data.py": _DATA if model is None else _DATA.replace("\".'", f"\".' + {EXPLANATION!r}"),
        "prompts.jsonl": "".join(json.dumps(row) + "\n" for row in rows),
        "rewards.py": _REWARDS,
        "test_rewards.py": _TEST,
        "tools.py": _TOOLS,
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
