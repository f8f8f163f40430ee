"""The table `To add something` of CONTRIBUTING.md is true: seven things are added in a copy, in the files it names.

Each door below is a toy. Its edits are those of a contributor, and nothing else is changed in the copy; there the tests
that the table names run, with toys of their own. What a file of the table is needed for shows the test for `nightly`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.forks import python_as_fork

ROOT = Path(__file__).parents[2]
MAX_FILES = 3
OWN_TEST = "tests/unit/test_toys.py"


Change = str | Mapping[str, str]
"""The text of a new file, or lines for one that exists, each behind what it has once: {behind: lines}."""


@dataclass(frozen=True)
class Door:
    """How a toy is added, and a test that uses it."""

    changes: Mapping[str, Change]
    """By file, as the table names it: NAME stands for the toy's own."""
    test: str


LOSS = Door(
    {
        "src/unbroken/training/objective/losses.py": {
            "LOSSES: Mapping[str, PolicyLoss] = {\n": '    "toy": PolicyLoss(\n'
            "        function=lambda logprobs_N, batch, clip: TokenLosses(-logprobs_N, logprobs_N > 0),\n"
            "        uses=(),\n    ),\n"
        }
    },
    """
def test_a_loss():
    import torch
    from unbroken.training.loss_config import ClipConfig
    from unbroken.training.model.batch import idle_batch
    from unbroken.training.objective.losses import LOSSES

    found = LOSSES["toy"](torch.tensor([-1.0]), idle_batch(torch.device("cpu")), ClipConfig())
    assert found.losses_N.tolist() == [1.0]
""",
)
FORMAT = Door(
    {
        "src/unbroken/rendering/parsing/formats/NAME.py": """
from unbroken.rendering.parsing.call_format import CallFormat, call_region
from unbroken.rendering.parsing.syntax.json_calls import make_json_call_reader

TOY = CallFormat(name="toy", regions=(call_region("<toy>", "</toy>", make_json_call_reader()),), hints=("<toy>",))
""",
        "src/unbroken/rendering/parsing/formats/__init__.py": {
            "import SOLAR\n": "from unbroken.rendering.parsing.formats.toy import TOY\n",
            "FORMATS: tuple[CallFormat, ...] = (\n": "    TOY,\n",
        },
        "tests/support/parsing.py": {"WRITTEN = {\n": '    "toy": f"<toy>{_JSON}</toy><toy>{_NOW}</toy>",\n'},
    },
    """
def test_a_format():
    from unbroken.rendering.parsing.formats import get_format

    assert get_format("toy").name == "toy"
""",
)
DIALECT = Door(
    {
        "src/unbroken/server/routes/NAME.py": """
from fastapi import Response

from unbroken.server.http.access import Access, Routes
from unbroken.server.http.json import json_response

router = Routes(Access.CLIENT)


@router.get("/toy", summary="A toy")
async def toy() -> Response:
    return json_response({"is_toy": True})
""",
        "src/unbroken/server/routes/__init__.py": {"DIALECTS = (\n": '    "toy",\n'},
    },
    """
async def test_a_dialect():
    from support.servers import asgi_client, make_app, scripted_engine

    async with asgi_client(make_app(scripted_engine("x"), api_key="key")) as client:
        assert (await client.get("/toy")).status_code == 401
        assert (await client.get("/toy", headers={"Authorization": "Bearer key"})).json() == {"is_toy": True}
""",
)
ENGINE = Door(
    {
        "src/unbroken/engines/NAME.py": '''
"""The nine members of `Engine`, and nothing else."""

import numpy as np

from unbroken.engines.scripted import ScriptedEngine, ScriptedReply
from unbroken.types import token_ids


class ToyEngine:
    context_length, vocab_size = 256, 64
    takes_images = takes_structured_output = False

    def __init__(self):
        def reply(prompt_ids):
            ids = np.random.default_rng(int(prompt_ids.sum())).integers(0, self.vocab_size, self.context_length)
            return ScriptedReply(completion_ids=token_ids(ids))

        self.inner = ScriptedEngine(reply, context_length=self.context_length, vocab_size=self.vocab_size)

    @property
    def policy_version(self):
        return 0

    async def check_health(self):
        await self.inner.check_health()

    async def sample(self, request):
        return await self.inner.sample(request)

    async def abort(self, request_id):
        await self.inner.abort(request_id)

    async def close(self):
        await self.inner.close()


async def open_engine(options):
    return ToyEngine()
''',
        "src/unbroken/engines/registry.py": {
            "ENGINES = {\n": '    "toy": EngineModule(module="unbroken.engines.toy", needs="nothing", extra="none"),\n'
        },
        "tests/support/engine_subjects.py": {
            'process."""\n': "\n\ndef toy() -> Subject:\n    from unbroken.engines.toy import ToyEngine\n\n"
            "    engine = ToyEngine()\n"
            "    return Subject(engine=engine, num_sampled=lambda: engine.inner.num_sampled, weights=[])\n\n\n"
            'SUBJECTS["toy"] = toy\n'
        },
    },
    """
async def test_an_engine():
    from unbroken.engines.base import Engine
    from unbroken.engines.registry import open_engine

    assert isinstance(await open_engine("toy", None), Engine)
""",
)
ENVIRONMENT = Door(
    {},
    """
ENVIRONMENT = '''
from unbroken.rollout.tool_env import ToolEnv

class Toy(ToolEnv):
    def __init__(self, number, *, largest: int):
        async def reward(messages):
            return 1.0

        super().__init__([{"role": "user", "content": f"Guess {number} of {largest}"}], [], reward)
'''


async def test_an_environment(tmp_path):
    from unbroken.runs.python_files import FunctionName
    from unbroken.runs.prompts.environments import Environments

    (tmp_path / "toy.py").write_text(ENVIRONMENT)
    make = Environments(FunctionName(f"{tmp_path}/toy.py:Toy"), {"largest": 9}, seed=0)(None, [], split="train")
    start = await make(3).start()
    assert "Guess 3 of 9" in str(start)
""",
)
METRIC = Door(
    {
        "src/unbroken/training/metrics/rollouts.py": {
            '"rollout/num_trajectories": len(numbers.turns),\n': '        "rollout/num_toys": len(numbers.turns),\n'
        },
        "docs/metrics.md": {"rollouts of the step |\n": "| `rollout/num_toys` | | toys |\n"},
    },
    "",
)
SETTING = Door(
    {
        "src/unbroken/training/config.py": {
            'With 0, a run evaluates and trains nothing."""\n': "    num_toys: int = 3\n"
            '    """How many toys there are."""\n'
        }
    },
    """
def test_a_setting(tmp_path):
    from unbroken.runs.settings import build, read_options, section_of
    from unbroken.training.config import LoopConfig

    section = section_of(LoopConfig)
    assert section.all_fields()["num_toys"].doc == "How many toys there are."
    assert build(section, read_options(["--num-steps", "1", "--num-toys", "5"], section)).num_toys == 5
""",
)
DOORS = {
    "a loss": LOSS,
    "a call format": FORMAT,
    "a dialect of the server": DIALECT,
    "an engine": ENGINE,
    "an environment": ENVIRONMENT,
    "a metric": METRIC,
    "a field of the config": SETTING,
}


@dataclass(frozen=True)
class Row:
    """A row of the table."""

    files: tuple[str, ...]
    test: str
    """The first that it names: `tests/unit/x.py`, or `tests/unit/x.py -k NAME`."""


def read_table(text: str) -> dict[str, Row]:
    """The rows of `To add something`, by what is added."""
    section = text.partition("## To add something\n")[2].partition("\n## ")[0]
    lines = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    (header, _, *rows) = [[cell.strip() for cell in line] for line in lines]
    assert header == ["to add", "files", "how", "shown by"]
    return {
        name: Row(files=tuple(re.findall(r"`([^`]+)`", files)), test=re.findall(r"`(tests/[^`]+)`", shown)[0])
        for name, files, _, shown in rows
    }


TABLE = read_table((ROOT / "CONTRIBUTING.md").read_text())


@pytest.mark.parametrize("name", DOORS)
def test_the_table_names_the_files_that_an_addition_changes_and_no_others(name: str) -> None:
    assert sorted(TABLE[name].files) == sorted(DOORS[name].changes)
    assert len(TABLE[name].files) <= MAX_FILES
    assert all(("NAME" in file) is isinstance(change, str) for file, change in DOORS[name].changes.items())


def test_every_file_and_test_of_the_table_exists() -> None:
    named = [path for row in TABLE.values() for path in (*row.files, row.test.split()[0])]
    assert [path for path in named if not (ROOT / path).exists() and "NAME" not in path] == []


@pytest.fixture
def copy(tmp_path: Path) -> Iterator[Path]:
    """A copy of what a contributor changes."""
    target = tmp_path / "copy"
    target.mkdir()
    for name in ("src", "tests", "docs"):
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "CONTRIBUTING.md", "README.md"):
        shutil.copy(ROOT / name, target / name)
    yield target
    shutil.rmtree(target)


def add(copy: Path, name: str, *, without: str | None = None) -> None:
    for file, change in DOORS[name].changes.items():
        if file == without:
            continue
        path = copy / file.replace("NAME", "toy")
        text = change if isinstance(change, str) else path.read_text()
        for behind, lines in change.items() if not isinstance(change, str) else ():
            assert text.count(behind) == 1, f"{path} must have this once: {behind!r}"
            text = text.replace(behind, behind + lines)
        path.write_text(text)


def run_tests(copy: Path, names: list[str]) -> tuple[int, str]:
    """Run the tests that the table names for these doors, and the toys' own, in one process; its status and output."""
    (copy / OWN_TEST).write_text("\n".join(DOORS[name].test for name in names))
    files, words = [OWN_TEST], ["test_toys"]
    for name in names:
        file, _, key = TABLE[name].test.partition(" -k ")
        files.append(file)
        words.append(f"({Path(file).stem} and {key.replace('NAME', 'toy')})" if key else Path(file).stem)
    arguments = ["-q", "-n0", "-p", "no:cacheprovider", "--no-header", *files, "-k", " or ".join(words)]
    # A fork has imported libraries. It drops our own modules, so that it finds those of the copy.
    line = (
        "import sys; "
        "[sys.modules.pop(each) for each in [*sys.modules] if each.split('.')[0] in ('unbroken', 'support')]; "
        f"sys.path[:0] = {[str(copy / 'src'), str(copy / 'tests')]!r}; "
        f"import pytest; sys.exit(pytest.main({[*arguments, '--junitxml', str(copy / 'report.xml')]!r}))"
    )
    done = subprocess.run(
        [*python_as_fork(), "-c", line],
        cwd=copy,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    return done.returncode, done.stdout[-6000:] + done.stderr[-2000:]


def has_run(copy: Path, name: str) -> bool:
    """Whether a test that the table names for this door was among those that ran."""
    module = TABLE[name].test.partition(" ")[0].removesuffix(".py").replace("/", ".")
    return module in (copy / "report.xml").read_text()


def test_with_the_files_that_the_table_names_the_nearest_tests_pass(copy: Path) -> None:
    for name in DOORS:
        add(copy, name)
    status, output = run_tests(copy, [*DOORS])
    assert status == 0, output
    assert [name for name in DOORS if not has_run(copy, name)] == []


@pytest.mark.e2e
@pytest.mark.nightly
@pytest.mark.parametrize(("name", "without"), [(name, file) for name, door in DOORS.items() for file in door.changes])
def test_without_one_of_these_files_a_test_says_what_is_missing(copy: Path, name: str, without: str) -> None:
    add(copy, name, without=without)
    status, output = run_tests(copy, [name])
    assert status != 0 or not has_run(copy, name), output
