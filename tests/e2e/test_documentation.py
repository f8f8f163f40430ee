"""The blocks of README.md and docs/*.md, and the notebooks: each is run here, with a tiny model in place of the hub's,
or listed with the reason why not.

- A block of TOML is read as `unbroken train` reads it (tests/unit/runs/test_runs_docs.py).
- A block of commands `unbroken ...` alone is parsed: subcommands, options, their values, and recipes exist.
- The blocks of a tutorial are run in their order, and what they print is compared with what the page shows.
- Any other block is run by a test below that names it (`block`), or stands in `NOT_RUN`.

Whoever changes a block changes its first words here. The tests need nothing but pytest and the environment that the
README makes: `make extras` runs those of the README in one.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

import unbroken
from unbroken.cli import _parser, main
from unbroken.demo.model import build_model, build_tokenizer
from unbroken.runs.recipe import load_recipe
from unbroken.runs.settings import read_options
from unbroken.server.options import name_model

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "AGENTS.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
HUB_NAME = "Qwen/Qwen2.5-0.5B-Instruct"
NOTES = ("CONTRIBUTING.md", "docs/lab-notes", "docs/history.md", "docs/design/")
"""Of these only the links are checked: their blocks are sketches, or measurements with the commands of their time."""
SMALL = [
    *("--loop.num-steps=1", "--rollouts.problems-per-step=1", "--rollouts.group-size=2", "--trackers.names=[]"),
    "--rollouts.sampling.max-tokens=8",
]
# A reader closes no clients.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}, which begins with {self.text.splitlines()[0][:60]!r}"


def find_blocks() -> list[Block]:
    blocks, opening = [], re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
    for path in PAGES:
        page, text = str(path.relative_to(ROOT)), path.read_text("utf-8")
        for found in opening.finditer(text) if not page.startswith(NOTES) else ():
            blocks.append(Block(page, text.count("\n", 0, found.start()) + 1, found[1], found[2]))
    return blocks


BLOCKS = find_blocks()
TUTORIALS = [ROOT / "AGENTS.md", *sorted((ROOT / "docs" / "tutorials").glob("*.md"))]
"""Pages of which every block is run, in order."""


def block(page: str, beginning: str) -> str:
    """The text of the only block of a page that begins with these words."""
    found = [each.text for each in BLOCKS if each.page == page and each.text.startswith(beginning)]
    assert len(found) == 1, (
        f"{page} has {len(found)} blocks that begin with {beginning!r}, and {Path(__file__).name} names one: if the "
        "block was changed, change the words there; if it was removed, remove its test or its line"
    )
    return found[0]


HUB, GPU, PART = "needs models or data of the hub", "needs a GPU", "a part of a program, with names from around it"
DIAGRAM, OUTPUT, OTHERS = "a diagram or the layout of files", "what a program prints", "runs other programs"
WIRE = "requests and answers in short, for reading: tests/unit/server has them whole"
CLUSTER = "tests/e2e/test_cluster.py runs one on this machine"
OWN_SDK = "needs a package of `make clients` or `make agents`, which run it"

NOT_RUN = {
    ("README.md", "python3 -m venv"): "`make extras` installs each extra in a fresh environment",
    ("README.md", "unbroken new words"): "as in docs/getting-started.md",
    ("docs/architecture.md", " task ── Env.start"): DIAGRAM,
    ("docs/architecture.md", " GroupSource ──"): DIAGRAM,
    ("docs/architecture.md", " uvicorn ─►"): DIAGRAM,
    ("docs/architecture.md", " SessionGate ─►"): DIAGRAM,
    ("docs/audit.md", "$ unbroken audit --template $TRL/deepseekv3.jinja"): "as the block of qwen3.jinja, which is run",
    ("docs/bridges.md", "H + S + M"): DIAGRAM,
    ("docs/clients.md", "ANTHROPIC_BASE_URL="): OTHERS,
    ("docs/clients.md", "from google import genai"): OWN_SDK,
    ("docs/clients.md", "so_far = answer.prompt_token_ids"): PART,
    ("docs/clients.md", "from trl.generation"): "tests/e2e/test_server_with_vllm_clients.py runs TRL's client",
    ("docs/clients.md", "[[394, 99, 361, 208]"): OUTPUT,
    ("docs/clients.md", "from PIL import Image"): "needs a model that takes images: test_server_images_on_vllm.py",
    ("README.md", "# several machines"): CLUSTER,
    ("docs/cluster.md", "pip install '.[ray]'"): CLUSTER,
    ("docs/cluster.md", "export RAY_AUTH_MODE=token"): "starts Ray on several machines",
    ("docs/drift.md", "Retokenising would have changed"): OUTPUT,
    ("docs/environments.md", "pip install verifiers==0.1.14"): OWN_SDK,
    ("docs/environments.md", "pip install 'verifiers[rg]"): OWN_SDK,
    ("docs/environments.md", "pip install 'harbor"): OWN_SDK,
    ("docs/environments.md", "tasks/count/instruction.md"): DIAGRAM,
    ("docs/environments.md", "[containers]"): "the settings of podman, for its own file",
    ("docs/environments.md", "counter:"): OWN_SDK,
    ("docs/environments.md", "pip install nemo-gym"): OWN_SDK,
    ("docs/from-trl.md", "from datasets import load_dataset"): HUB,
    ("docs/from-verl.md", "python3 -m verl"): OTHERS,
    ("docs/from-verl.md", "from my_reward import compute_score"): "compute_score is the reader's own",
    ("docs/from-verl.md", "import torch"): "verl is in no environment of ours; the lab notes say how it was run",
    ("docs/gateway.md", "ANTHROPIC_BASE_URL=$ROOT"): OTHERS,
    ("docs/gateway.md", "OPENAI_API_KEY=$KEY codex"): OTHERS,
    ("docs/gateway.md", "cat > opencode.json"): OTHERS,
    ("docs/gateway.md", "mkdir -p .gemini"): OTHERS,
    ("docs/gateway.md", "from google import genai"): OWN_SDK,
    ("docs/gateway.md", "from agents import Agent"): OWN_SDK,
    ("docs/gateway.md", "from langchain_openai"): OWN_SDK,
    ("docs/gateway.md", "OPENAI_API_BASE=$URL"): OWN_SDK,
    ("docs/training.md", "python recipes/judge/stand_in.py"): "tests/e2e/test_train_judge.py does it",
    ("docs/tinker.md", "import tinker"): "tests/e2e/test_tinker.py runs it",
    ("docs/tinker-agents.md", " your loop ──"): DIAGRAM,
    ("docs/tinker-agents.md", "unbroken serve"): "tests/e2e/test_tinker_agents.py starts both",
    ("docs/tinker-agents.md", "import os"): "tests/e2e/test_tinker_agents.py runs it",
    (
        "docs/protocols.md",
        "unbroken serve path/to/model --served-model-name tiny",
    ): "as in the README, whose request is run",
    ("docs/troubleshooting.md", "diagnosis: every reward"): OUTPUT,
    ("docs/getting-started.md", "python3 -m venv"): "`make extras` installs each extra",
    ("docs/getting-started.md", "numerics: fast"): OUTPUT,
    (
        "docs/troubleshooting.md",
        "unbroken doctor runs/sums",
    ): "the tests of the diagnosis and the preflight run them",
    ("docs/getting-started.md", "docker build"): "needs Docker; the lab notes say how it was built",
    ("docs/getting-started.md", "unbroken demo --steps 10"): "tests/e2e/test_demo.py runs the demo, and takes minutes",
    ("docs/protocols.md", "POST /v1/sample"): WIRE,
    ("docs/protocols.md", '8 bytes   "UNBRKN"'): DIAGRAM,
    ("docs/protocols.md", 'POST {"token_ids"'): WIRE,
    ("docs/protocols.md", 'POST {"instructions"'): WIRE,
    ("docs/protocols.md", 'POST {"max_tokens": 300'): WIRE,
    ("docs/protocols.md", 'POST {"systemInstruction"'): WIRE,
    ("docs/protocols.md", '"images": [['): WIRE,
    ("docs/protocols.md", "POST /v1/weights"): WIRE,
    ("docs/protocols.md", "400 {"): WIRE,
    ("docs/protocols.md", "newest.json"): DIAGRAM,
    ("docs/evaluation.md", "evaluation: 16 problems"): OUTPUT,
    ("docs/evaluation.md", "OUTPUT/report.json"): DIAGRAM,
    ("docs/rollouts.md", "OUTPUT/evaluations/"): DIAGRAM,
    ("docs/rollouts.md", "OUTPUT/rollouts/"): DIAGRAM,
    ("docs/rollouts.md", '{"token_ids": [1, 2, 3, 4, 5, 6]'): DIAGRAM,
    ("docs/engines.md", "echo http://10.0.0.1:8000"): "tests/e2e/test_engines_come_and_go.py does it",
    ("docs/gateway.md", "unbroken gateway --upstream http://10.0.0.1:8000 --tokenizer path/to/model --store"): (
        "tests/e2e/test_gateways_together.py does it"
    ),
    ("docs/engines.md", "unbroken numerics path"): "tests/unit/runs/test_runs_numerics.py does it",
    ("docs/sampling-ahead.md", "openssl rand"): "tests/unit/runs/test_runs_samplers.py does it",
    ("docs/models.md", "model = get_peft_model"): PART,
    ("docs/engines.md", "VLLM_SERVER_DEV_MODE=1"): "tests/e2e/test_weights_to_stock_vllm.py starts such a server",
    ("docs/tutorials/several-gpus.md", "unbroken serve"): "tests/unit/runs/test_runs_asynchronous_servers.py does it",
    ("docs/trl.md", "import copy"): "needs a data set and a GPU: tests/e2e/test_trl_trainer.py runs the same",
    ("docs/trl.md", "@on_trained_rows"): PART,
    ("docs/trl.md", "@asynccontextmanager"): PART,
    ("docs/trl.md", "CUDA_VISIBLE_DEVICES=0 unbroken serve"): GPU,
    ("docs/trl.md", "GRPOConfig("): PART,
    ("docs/verify.md", "unbroken verify runs/sums"): "tests/unit/runs/test_runs_verify.py does it",
    (
        "docs/teachers.md",
        "unbroken demo",
    ): "learns for minutes: docs/lab-notes/learning.md",
    ("docs/viewer.md", "unbroken view runs/lookup"): "its commands are parsed, but ssh needs another machine",
    ("docs/vision.md", "             prompt"): DIAGRAM,
    ("docs/vision.md", "from PIL import Image"): HUB,
    ("docs/vllm.md", "from unbroken import VllmEngine"): GPU,
    ("docs/vllm.md", "await engine.update_weights"): PART,
    ("docs/vllm.md", "sleep()"): DIAGRAM,
    ("docs/vllm.md", "unbroken serve MODEL --tensor-parallel-size"): "tests/e2e/test_server_over_ranks.py runs both",
}
"""Beginnings of blocks, with the reason why they are not run."""


_COMMANDS = "demo|new|train|eval|agent|export|serve|gateway|audit|view|doctor|verify"


def commands(text: str) -> list[list[str]]:
    """The words of each command `unbroken ...` in a block, without a launcher, variables, comments and pipes."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        line = re.sub(r"\s+#.*|^\$ ", "", line.split("; echo")[0]).partition(" | ")[0].rstrip("&").strip()
        launched = re.fullmatch(
            rf"(?:\w+=\S+ )*(?:(?:torchrun|accelerate launch) .*-m )?unbroken ({_COMMANDS})(?: (.*))?", line
        )
        found += [] if launched is None else [[launched[1], *shlex.split(launched[2] or "")]]
    return found


def has_only_commands(each: Block) -> bool:
    lines = [line for line in each.text.replace("\\\n", " ").splitlines() if line.strip() and not line.startswith("#")]
    return each.language == "" and len(commands(each.text)) == len(lines)


def test_every_block_is_run_or_listed_with_a_reason() -> None:
    calls = re.findall(r'block\(\s*"([^"]+)", "((?:[^"\\]|\\.)+)"', Path(__file__).read_text("utf-8"))
    run = {(page, json.loads(f'"{words}"')) for page, words in calls}
    listed = {*NOT_RUN, *run}
    missing = [
        each.place
        for each in BLOCKS
        if not (each.language == "toml" or has_only_commands(each) or ROOT / each.page in TUTORIALS)
        and not any(each.page == page and each.text.startswith(words) for page, words in listed)
    ]
    assert not missing, (
        f"these blocks are neither run nor listed in {Path(__file__).name}: add a test that runs them, or a line with "
        "the reason to NOT_RUN:\n" + "\n".join(missing)
    )
    for page, words in NOT_RUN:
        block(page, words)
    assert {*NOT_RUN} - run == {*NOT_RUN}, "a block that is run needs no reason"


def headings(page: Path) -> set[str]:
    """The anchors of a page: its headings, as GitHub names them, and those that it names itself."""
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    names = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
    return names | set(re.findall(r'<a id="([^"]+)"', text))


def test_every_link_leads_to_a_file_and_a_heading_that_exist() -> None:
    broken = []
    for page in PAGES:
        for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text("utf-8")):
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            if not target.exists() or (anchor and anchor not in headings(target)):
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert not broken, "\n".join(broken)


def test_every_page_says_first_for_whom_it_is() -> None:
    """docs/templates.md and docs/lab-notes.md are lists, one of them written by a command."""
    pages = [page for page in (ROOT / "docs").glob("*.md") if page.stem not in ("templates", "lab-notes")]
    pages += (ROOT / "docs" / "tutorials").glob("*.md")
    firsts = {page.name: page.read_text("utf-8").split("\n\n")[1] for page in pages}
    assert not {name: text for name, text in firsts.items() if not text.startswith("For whoever ")}


WITHOUT_TROUBLE = ("environments-run.md", "vision.md", "vllm.md", "drift.md", "clients.md", "troubleshooting.md")
"""Guides that speak of no run."""


def test_each_tutorial_and_guide_of_a_run_leads_to_what_to_do_when_it_goes_wrong() -> None:
    nav = (ROOT / "mkdocs.yml").read_text("utf-8").partition("  - Tutorials:\n")[2].partition("  - With other")[0]
    pages = set(re.findall(r": ([\w/-]+\.md)$", nav, flags=re.MULTILINE))
    assert set(WITHOUT_TROUBLE) <= pages
    texts = {page: (ROOT / "docs" / page).read_text("utf-8") for page in pages - set(WITHOUT_TROUBLE)}
    assert sorted(page for page, text in texts.items() if "troubleshooting.md" not in text) == []


def test_llms_txt_has_every_page_that_a_reader_is_led_to() -> None:
    """Tutorials, guides and reference of the site; links of other files are checked above."""
    text = (ROOT / "llms.txt").read_text("utf-8")
    linked = set(re.findall(r"\]\(([^)]+)\)", text))
    assert not [name for name in linked if not (ROOT / name).is_file()]
    nav = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2].partition("  - Lab notes:")[0]
    pages = {f"docs/{page}" for page in re.findall(r": ([\w/-]+\.md)$", nav, flags=re.MULTILINE)}
    made = {"docs/index.md", *(f"docs/{name}.md" for name in ("reference/cli", "changelog", "contributing", "roadmap"))}
    assert len(pages) > 40
    assert sorted(pages - made - linked) == []


def test_the_files_that_contributing_names_exist() -> None:
    named = re.findall(
        r"`((?:src|tests|docs|tools|recipes|bench)/[\w./-]+)", (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    )
    placeholders = ("TOPIC", "NAME")
    real = [path for path in named if not any(placeholder in path for placeholder in placeholders)]
    missing = [path for path in real if not is_in_a_clone(ROOT / path)]
    assert named, "the table `To add something` names files"
    assert not missing, missing


def is_in_a_clone(path: Path) -> bool:
    """Whether `path` is a file, or a folder with one: a move may leave one behind with caches alone."""
    return path.is_file() or any(each.is_file() and each.suffix != ".pyc" for each in path.rglob("*"))


def test_the_commands_of_every_page_have_options_that_exist(tmp_path: Path) -> None:
    for name in ("recipe.toml", "task.toml"):
        (tmp_path / name).write_text('model = "m"')
    problems = []
    for each in BLOCKS:
        for words in commands(each.text):
            if problem := find_problem(words, tmp_path):
                problems.append(f"{each.page}:{each.line}: unbroken {shlex.join(words)}: {problem}")
    assert not problems, "\n".join(problems)


_load = functools.cache(load_recipe)


def test_the_settings_that_pages_and_diagnoses_name_exist() -> None:
    """As options with a dot: those of `unbroken train` and of `unbroken cluster`."""
    known = ""
    for words in (["train", "--env", "NAME"], ["cluster", "run"], ["cluster", "plan"]):
        with redirect_stdout(StringIO()) as printed, suppress(SystemExit):
            main([*words, "--help-all"])
        known += printed.getvalue()
    options = set(re.findall(r"--[a-z]+\.[a-z0-9.-]+", known))
    assert {"--loop.num-steps", "--engine.tp"} <= options
    rules = ROOT / "src" / "unbroken" / "runs" / "diagnosis" / "rules.py"
    pages = [page for page in PAGES if not str(page.relative_to(ROOT)).startswith(NOTES)]
    named = {
        option: str(page.relative_to(ROOT))
        for page in (*pages, rules)
        for option in re.findall(r"--[a-z]+\.[a-z0-9.-]*[a-z0-9]", page.read_text("utf-8"))
    }
    tables = {option.rsplit(".", 1)[0] for option in options}  # a page may name all of a table: --trainer.clip.*
    assert {option: page for option, page in named.items() if option not in options | tables} == {}


def find_problem(words: list[str], folder: Path) -> str:
    """What the command line says of a command, which is not run; "" for nothing."""
    if words[0] == "train" and not {"--help", "--help-all"} & set(words):
        paths = [ROOT / words[1], folder / words[1]]
        recipe = _load(None if words[1] == "--env" else next((path for path in paths if path.exists()), None))
        options = ["--environment", *words[2:]] if words[1] == "--env" else words[2:]
        try:
            read_options(options, recipe.section)
        except ValueError as error:
            return str(error)
        return ""
    words = name_model(words) if words[:1] == ["serve"] else words
    try:
        with redirect_stderr(StringIO()) as errors:
            _parser().parse_known_args([word for word in words if not word.startswith("--help")])
    except SystemExit:
        return errors.getvalue()
    return ""


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working directory of a reader: a clone's recipes, a model at path/to/model, and a task of their own."""
    folder = tmp_path_factory.mktemp("reader")
    tokenizer = build_tokenizer()
    for part in (tokenizer, build_model(tokenizer, seed=0)):
        part.save_pretrained(folder / "path" / "to" / "model")
    shutil.copytree(ROOT / "recipes", folder / "recipes")
    (folder / "src").symlink_to(ROOT / "src")
    (folder / "prompts.jsonl").write_text('{"prompt": "What is 17 + 6?", "answer": "23"}\n' * 4)
    (folder / "tasks.jsonl").write_text('{"prompt": "What is 17 + 6?"}\n')
    (folder / "rewards.py").write_text(block("README.md", "def correct(completions, answer):"))
    (folder / "task.toml").write_text(with_model(block("README.md", "# task.toml")))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
        patch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        if (datasets := sys.modules.get("datasets")) is not None:
            patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
        yield folder


@pytest.fixture
def forked_unbroken(forked_commands: None, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`unbroken` of the shell is a fork: other tests of this file run the command itself."""
    command = workplace / "forks" / "unbroken"
    command.parent.mkdir(exist_ok=True)
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m unbroken "$@"\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}:{os.environ['PATH']}")


def with_model(text: str) -> str:
    assert HUB_NAME in text, f"the block should train {HUB_NAME}, which is replaced by a tiny model:\n{text}"
    return text.replace(HUB_NAME, "path/to/model")


def run_python(text: str, /, **names: Any) -> dict[str, Any]:
    """Run a block in a module of its own, where `names` exist; returns its names."""
    found = {"__name__": "a_block", **names}
    exec(compile(text, "a block of the documentation", "exec"), found)
    return found


def run_shell(text: str) -> str:
    """The output of commands of the clone's folder."""
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=False)
    # What takes longer than ten seconds says how far it is, and a machine may be busy.
    other = [line for line in done.stderr.splitlines() if not re.search(r": \d+:\d\d:\d\d so far$", line)]
    assert (done.returncode, other) == (0, [])
    return done.stdout


@pytest.fixture(scope="module")
def server(workplace: Path) -> Iterator[str]:
    """The URL of the README's server."""
    command, _, printed = block("README.md", "$ unbroken serve path/to/model").partition("\n")
    with start_server(command.removeprefix("$ unbroken ")) as (url, line):
        assert line == printed.strip().replace("http://127.0.0.1:8000", url)
        yield url


@contextmanager
def start_server(words: str) -> Iterator[tuple[str, str]]:
    """Start `unbroken WORDS` at a free port; yields its URL and the line that it prints."""
    command = [sys.executable, "-m", "unbroken", *shlex.split(words), "--engine", "transformers", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = next((line for line in process.stdout if " at http" in line), "")
            found = re.search(r"http://[\d.]+:\d+", line)
            assert found is not None, "the server did not start"
            yield found[0], line.strip()
        finally:
            process.terminate()


def test_the_environment_of_make_demo_is_that_of_the_readme() -> None:
    readme, makefile = (ROOT / "README.md").read_text("utf-8"), (ROOT / "Makefile").read_text("utf-8")
    (named,) = re.findall(r"`pip install '(\.\[[\w,]+\])'`, as `make demo` does", readme)
    assert "\ndemo: $(README) " in makefile
    rule = makefile.partition("\n$(README):")[2].partition("touch")[0]
    assert f"--editable '{named}'" in rule


def test_the_task_of_the_readme_is_trained_as_its_block_says(workplace: Path) -> None:
    (words,) = commands(block("README.md", "unbroken train task.toml --algorithm"))
    assert main([*words, *SMALL]) == 0
    assert (workplace / "runs" / "prompts" / "final" / "model.safetensors").exists()


def test_an_agent_that_is_a_command_is_trained_by_the_words_of_readme_and_gateway(workplace: Path) -> None:
    """A file beside the TOML, and after a mistake in its name the same command again."""
    (workplace / "agent.py").write_text(
        "import json, os, urllib.request as web\n"
        "task = json.loads(os.environ['UNBROKEN_TASK'])\n"
        "body = {'model': 'any', 'messages': [{'role': 'user', 'content': task['prompt']}]}\n"
        "headers = {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY'], 'Content-Type': 'application/json'}\n"
        "url = os.environ['OPENAI_BASE_URL'] + '/chat/completions'\n"
        "print(len(web.urlopen(web.Request(url, json.dumps(body).encode(), headers)).read()))\n"
    )
    readme = commands(block("README.md", "unbroken serve path/to/model --sessions"))[-1]
    text = with_model(block("docs/gateway.md", "# task.toml: every row"))
    (workplace / "agents.toml").write_text(text)
    options = ["--output=runs/agents", *SMALL]
    assert main(["train", "agents.toml", "--agent.command=python,agnt.py", *options]) == 1
    assert main(["train", "agents.toml", *options]) == 0
    assert main([*readme, "--output=runs/readme-agents", *SMALL]) == 0


def test_the_rollout_of_the_readme_runs(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_python(with_model(block("README.md", "import asyncio")))
    assert re.match(r"(completed|truncated) 0\.0 ", capsys.readouterr().out)


def test_the_requests_of_the_readme_are_answered_as_shown(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The numbers depend on the model; their names and lengths do not."""
    shell, _, shown = block("README.md", "$ curl -s http://127.0.0.1:8000/v1/sample").rstrip().partition("\n{")
    answer = json.loads(run_shell(shell.removeprefix("$ ").replace("http://127.0.0.1:8000", server)))
    (ours,), (theirs,) = (each["results"][0]["sequences"] for each in (answer, json.loads("{" + shown)))
    assert ours.keys() == theirs.keys()
    assert len(ours["completion_ids"]) == len(theirs["completion_ids"])
    for page in ("README.md", "docs/clients.md"):
        text = block("README.md", "from unbroken import Client, SamplingParams")
        assert text == block("docs/clients.md", "from unbroken import Client, SamplingParams"), page
        run_python(text.replace("http://127.0.0.1:8000", server))
        assert len(capsys.readouterr().out.splitlines()) == 2


def test_no_line_of_the_readme_is_longer_than_a_page_is_wide() -> None:
    long = [line for line in (ROOT / "README.md").read_text("utf-8").splitlines() if len(line) > 120]
    assert not long, "\n".join(long)


def test_the_audits_of_the_pages_print_what_they_show(workplace: Path) -> None:
    shell, _, shown = block("README.md", "$ unbroken audit --template src").partition("\n")
    assert run_shell(shell.removeprefix("$ ")) == shown
    templates = importlib.util.find_spec("trl")
    if templates is None or templates.origin is None:
        pytest.skip("docs/audit.md audits a template that TRL ships")
    shell, _, shown = block("docs/audit.md", "$ unbroken audit --template $TRL/qwen3.jinja").partition("\n")
    found = run_shell(f"TRL={Path(templates.origin).parent / 'chat_templates'}; {shell.removeprefix('$ ')}")
    assert found == shown


def test_the_blocks_of_the_openai_and_anthropic_sdks_run(server: str) -> None:
    pytest.importorskip("openai")
    printed: list[tuple[Any, ...]] = []  # the model's text may have any line ends
    names: dict[str, Any] = {"print": lambda *values: printed.append(values)}
    openai = block("docs/clients.md", "from openai import OpenAI").replace("http://127.0.0.1:8000", server)
    names = run_python(openai, **names)
    run_python(block("docs/clients.md", "response = client.responses.create"), **names)
    pytest.importorskip("anthropic")
    anthropic = block("docs/clients.md", "from anthropic import Anthropic").replace("http://127.0.0.1:8000", server)
    run_python(anthropic, print=names["print"])
    assert len(printed) == 3


def test_the_blocks_of_sessions_run(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("openai", "anthropic"):
        pytest.importorskip(package)
    (workplace / "key").write_text("a-key-of-ours-that-is-long-enough")
    words = commands(block("docs/gateway.md", "unbroken serve path/to/model --sessions"))[0]
    with start_server(shlex.join([*words, "--api-key-file", "key"])) as (url, _):
        monkeypatch.setenv("UNBROKEN_KEY", (workplace / "key").read_text())
        agent = block("docs/gateway.md", "from openai import") + block("docs/gateway.md", "from anthropic import")
        given = "URL, ROOT, KEY = created['openai_base_url'], created['anthropic_base_url'], created['api_key']\n"
        text = block("docs/gateway.md", "import os\n\nfrom unbroken import Client")
        text = text.replace('"temperature": 1.0', '"temperature": 1.0, "max_tokens": 8')
        agent = agent.replace("client = ", "agent = ").replace("\nclient.", "\nagent.")
        assert text.count("    ...  # the agent works") == text.count('"max_tokens": 8') == 1
        inside = textwrap.indent(given + agent, "    ")
        names = run_python(
            text.replace("    ...  # the agent works", f"{inside}    ...  # the agent works").replace(
                "http://127.0.0.1:8000", url
            )
        )
        assert len(names["rows"]) == 3
        shell = block("docs/gateway.md", "curl -s $SERVER/v1/chat/completions")
        with names["Client"](url, api_key=os.environ["UNBROKEN_KEY"]) as client:
            created = client.sessions.create({"sampling": {"max_tokens": 8}})
        assert '"choices"' in run_shell(f"SERVER={url}; KEY={created['api_key']}\n{shell}")


def test_the_debate_of_several_policies_is_trained(workplace: Path) -> None:
    (workplace / "debate.py").write_text(block("docs/policies.md", "from unbroken import Continue, Done, EnvStart"))
    settings = block("docs/policies.md", 'model = "Qwen/Qwen2.5-0.5B-Instruct"')
    (workplace / "debate.toml").write_text(settings.replace("Qwen/Qwen2.5-0.5B-Instruct", "path/to/model"))
    assert main(["train", "debate.toml", "--output=runs/debate", *SMALL]) == 0
    lines = (workplace / "runs/debate/metrics/metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["reward/solver_mean"] == json.loads(lines[0])["reward/critic_mean"] == 0


def test_the_blocks_of_training_rollouts_and_environments_run(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (workplace / "sums.py").write_text(
        with_model(block("docs/own-environment.md", "from dataclasses import dataclass"))
    )
    (workplace / "curriculum.py").write_text(block("docs/choosing-problems.md", "from unbroken.runs.collector import"))
    assert main(["train", "task.toml", "--curriculum=curriculum.py:make", "--output=runs/unsolved", *SMALL]) == 0
    assert main(["train", "sums.py", *SMALL]) == 0
    capsys.readouterr()
    run_python(block("docs/rollouts.md", "from pathlib import Path"))
    assert capsys.readouterr().out.startswith("0 [0")
    if shutil.which("jq"):
        zcat = block("docs/rollouts.md", "zcat runs/sums/rollouts").replace("step-00000012", "step-00000000")
        assert json.loads(run_shell(zcat).splitlines()[0])[2] in ("completed", "truncated")
    guess = block("docs/own-environment.md", 'model = "Qwen/Qwen3-0.6B"\nenvironment = "recipes/guess.py')
    (workplace / "guess.toml").write_text(guess.replace("Qwen/Qwen3-0.6B", "path/to/model"))
    assert main(["train", "guess.toml", "--output=runs/guess", *SMALL]) == 0
    correct = run_python(block("docs/training.md", "def correct(completions, answer):"))["correct"]
    assert correct([" 23", "2"], ["23", "23"]) == [1.0, 0.0]
    process = run_python(block("docs/training.md", "def no_repeats(completion_ids):"))
    assert process["no_repeats"]([[5, 5, 6], [7]]) == [[0.0, -0.1, 0.0], [0.0]]
    assert process["in_halves"]([[5, 5, 6], [7]], [(1, 0), (1, 1)]) == [[(0, 1, 1), (1, 3, 0)], None]
    judge = run_python(block("docs/training.md", "# rewards.py\nimport os"))["judge"]
    assert (judge.max_requests, (workplace / judge.cache).exists()) == (50_000, True)
    (workplace / "env.py").write_text(block("docs/own-environment.md", "import random"))
    assert main(["train", "--env", "env.py:Sum", "--model=path/to/model", "--output=runs/env", *SMALL]) == 0


def test_the_own_task_of_getting_started_is_trained_as_its_page_says(workplace: Path) -> None:
    folder = workplace / "words"
    shell = block("docs/getting-started.md", "unbroken new words") + f"unbroken train task.toml {shlex.join(SMALL)}"
    run_shell(f"({shell}) 2> log")
    assert (folder / "runs" / "first" / "final" / "model.safetensors").exists()
    script = block("docs/getting-started.md", "import json\n\nimport unbroken")
    for words, short in (("steps=20", "steps=1"), ('"num_problems": 64', '"num_problems": 2')):
        assert words in script
        script = script.replace(words, short)
    (folder / "fit.py").write_text(script)
    run_shell("cd words; python fit.py 2> log-of-fit")
    assert (folder / "runs" / "fit" / "final" / "model.safetensors").exists()
    correct = run_python(block("docs/getting-started.md", "def correct(completions, answer):"))["correct"]
    assert correct(['Answer: "zavi"', "zavi"], ["zavi", "zavi"]) == [1.0, 0.0]


def write_first_task(workplace: Path, name: str) -> Path:
    """A folder with the files of getting-started, and a model that is not warmed up in place of the demo's."""
    folder = workplace / name
    folder.mkdir()
    (folder / "model").symlink_to(workplace / "path" / "to" / "model")
    (folder / "make_data.py").write_text(block("docs/getting-started.md", "import json\nimport random"))
    (folder / "tools.py").write_text(block("docs/getting-started.md", "import json\nfrom pathlib import Path"))
    (folder / "rewards.py").write_text(block("docs/getting-started.md", "def correct(completions, answer):"))
    (folder / "task.toml").write_text(block("docs/getting-started.md", 'model = "model"'))
    return folder


SMALL_TOML = [
    *("rollouts.problems_per_step = 1", "rollouts.group_size = 2", "rollouts.sampling.max_tokens = 8"),
    *("loop.num_steps = 1", "evaluation.num_problems = 2", "trackers.names = []"),
]
SMALL_WORDS = {
    "head -192": "head -2",
    "tail -64": "tail -2",
    "--output runs/two": f"--output runs/two {shlex.join(SMALL).replace('per-step=1', 'per-step=2')}",
}
WITHOUT_MODEL = ("python play.py", "unbroken cluster plan")
"""Commands of tutorials that print the same everywhere."""


def make_small(name: str, text: str) -> str:
    """A file of a tutorial; of TOML, one for a step of two short rollouts."""
    if not name.endswith(".toml"):
        return text
    for line in SMALL_TOML:
        text = re.sub(rf"(?m)^{re.escape(line.partition(' = ')[0])} = .*\n", "", text)
    return "\n".join([*SMALL_TOML, text.replace(HUB_NAME, "model")])


def find_labels(text: str) -> list[str]:
    """The first word of each line that has one, but of those with what a model said."""
    lines = [line for line in text.splitlines() if not line.strip().startswith("->")]
    return [found[0] for line in lines if (found := re.search(r"[A-Za-z@/_]{2,}\d*", line))]


@pytest.mark.usefixtures("forked_unbroken")
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_runs_from_its_first_block_to_its_last(
    path: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the folder of getting-started. A file's name is in its first line; a block of text is what the commands above
    it print: the same where no model speaks, otherwise lines with the same first words.
    """
    monkeypatch.chdir(write_first_task(workplace, f"tutorial-{path.stem}"))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # a machine of tests may not find its own name
    run_shell("python make_data.py")
    page, commands_before, printed = str(path.relative_to(ROOT)), "", ""
    for each in (each for each in BLOCKS if each.page == page):
        if each.language == "text" and commands_before.startswith(WITHOUT_MODEL):
            assert printed == each.text, each.place
        elif each.language == "text":
            missing = [label for label in find_labels(each.text) if label not in find_labels(printed)]
            assert not missing, f"{each.place}: {missing} stand in no line of\n{printed}"
        elif each.language:
            name = each.text.partition("\n")[0].removeprefix("# ")
            Path(name).write_text(make_small(name, each.text))
        elif not any(page == listed and each.text.startswith(words) for listed, words in NOT_RUN):
            commands_before = each.text
            for words, replacement in SMALL_WORDS.items():
                commands_before = commands_before.replace(words, replacement)
            done = subprocess.run(["bash", "-ec", commands_before], capture_output=True, text=True, check=False)
            printed = done.stdout + done.stderr
            assert done.returncode == 0, f"{each.place}:\n{printed}"


NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.usefixtures("forked_unbroken")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_cells_of_the_notebooks_run(path: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fewer steps, with a model that is not warmed up: files and data are as they are saved, and other cells print
    something where something is saved (`python tools/run_notebook.py` saves it).
    """
    spec = importlib.util.spec_from_file_location("run_notebook", ROOT / "tools" / "run_notebook.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    folder = workplace / path.stem
    (folder / "words").mkdir(parents=True)
    (folder / "words" / "model").symlink_to(workplace / "path" / "to" / "model")
    monkeypatch.chdir(folder)
    shorter = {
        "unbroken new words > new.log": "true",
        "unbroken train task.toml": f"unbroken train task.toml {shlex.join(SMALL)}",
        "--problems 32": "--problems 2 --rollouts.sampling.max-tokens 16",
    }
    names: dict[str, Any] = {"__name__": "a_notebook"}
    cells = [cell for cell in json.loads(path.read_text("utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        source, saved = "".join(cell["source"]), tool.get_saved(cell)
        text = source
        for words, replacement in shorter.items() if source.startswith("!") else ():
            text = text.replace(words, replacement)
        printed = tool.run_cell(text, names)
        if source.startswith(("%%writefile ", "!python ")):
            assert printed == saved, source
        assert bool(printed) == bool(saved), source
        assert not re.search(r"/(tmp|home|root|work)/", saved), source


async def test_the_mcp_server_of_environments_answers(tmp_path: Path) -> None:
    pytest.importorskip("mcp_types", reason="needs mcp 2", exc_type=ModuleNotFoundError)
    from unbroken.integrations.mcp import McpServer, McpSession

    (tmp_path / "server.py").write_text(block("docs/environments.md", "from mcp.server.mcpserver import MCPServer"))
    async with McpSession(McpServer(command=(sys.executable, str(tmp_path / "server.py")))) as session:
        outcome = await session.tools[0].call({"a": 17, "b": 6})
    assert outcome.content == "23"


def test_the_reference_has_every_public_name() -> None:
    named = re.findall(
        r"^::: unbroken\.(\w+)$", (ROOT / "docs/reference/api.md").read_text("utf-8"), flags=re.MULTILINE
    )
    assert sorted(named) == sorted(unbroken.__all__)


def imported_names(text: str) -> set[str]:
    """What a block or cell imports from `unbroken`, with the modules; nothing of one that is not whole."""
    try:
        tree = ast.parse(text)
    except SyntaxError:  # a cell with `!COMMAND`, or lines of a larger function
        return set()
    froms = [each for each in ast.walk(tree) if isinstance(each, ast.ImportFrom) and each.module is not None]
    ours = [each for each in froms if (each.module or "").split(".")[0] == "unbroken"]
    return {f"{each.module}.{alias.name}" for each in ours for alias in each.names}


def test_every_name_that_a_page_imports_is_in_the_reference_with_its_stability() -> None:
    """Names of `unbroken` itself are stable, those of its modules provisional."""
    sections = (ROOT / "docs/reference/api.md").read_text("utf-8").split("\n## ")[1:]
    known = {
        name: "Stable" if "\n**Stable**\n" in section else "Provisional" if "\n**Provisional**\n" in section else ""
        for section in sections
        for name in re.findall(r"^::: (unbroken[\w.]+)$", section, flags=re.MULTILINE)
    }
    texts = [(each.place, each.text) for each in BLOCKS if each.language == "python"]
    for path in NOTEBOOKS:
        texts += [(path.name, "".join(cell["source"])) for cell in json.loads(path.read_text("utf-8"))["cells"]]
    problems = [
        f"{place} imports {name}: docs/reference/api.md calls it {known.get(name)!r}"
        for place, text in texts
        for name in sorted(imported_names(text))
        if known.get(name) != ("Stable" if name.count(".") == 1 else "Provisional")
    ]
    assert not problems, "\n".join(problems)
    for name in (name for name, stability in known.items() if stability == "Provisional"):
        module, _, last = name.rpartition(".")
        spec = importlib.util.find_spec(module)
        assert spec is not None, name
        assert re.search(rf"\b{last}\b", Path(str(spec.origin)).read_text("utf-8")), name


def test_the_example_of_slurm_gives_each_step_the_cpus_of_its_task() -> None:
    """Since Slurm 22.05 `srun` inherits `--cpus-per-task` from this variable alone."""
    text = (ROOT / "docs/examples/cluster.slurm").read_text("utf-8")
    assert "--cpus-per-task" in text
    assert "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK" in text.partition("\nsrun ")[0]


def test_every_page_that_says_how_to_install_names_linux() -> None:
    pages = ("README.md", "docs/getting-started.md", "docs/training.md", "docs/cluster.md")
    assert not [page for page in pages if "Linux" not in (ROOT / page).read_text("utf-8").partition("pip install")[0]]


def test_the_small_blocks_run(workplace: Path) -> None:
    make = run_python(block("docs/environments.md", "from unbroken.integrations.mcp import"))["make"]
    assert make([{"role": "user", "content": "a"}])
    text = block("docs/renderers.md", "from unbroken import load_renderer")
    tokenizer = build_tokenizer()
    run_python(text, tokenizer=tokenizer, text=tokenizer.chat_template)
    run_python(block("docs/training.md", "from transformers import AutoTokenizer"))
