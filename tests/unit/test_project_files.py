"""The files around the package: they name what exists, and say the same."""

from __future__ import annotations

import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import unbroken
from unbroken.cli import _parser
from unbroken.runs.recipe import load_recipe
from unbroken.runs.settings import read_options
from unbroken.server.options import name_model

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
NOTES = sorted(page for folder in ("lab-notes", "design") for page in (ROOT / "docs" / folder).glob("*.md"))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_the_extras_of_the_dockerfile_exist() -> None:
    installed = re.findall(r"\.whl\)\[([\w,-]+)\]", (ROOT / "Dockerfile").read_text("utf-8"))
    assert len(installed) == 2
    for extras in installed:
        assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()


def test_the_commands_of_the_compose_file_have_options_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    services = yaml.safe_load((ROOT / "compose.yaml").read_text("utf-8"))["services"]
    parser = _parser()
    assert parser.parse_known_args(name_model(services["server"]["command"]))[1] == []
    (shell,) = services["gateway"]["command"]
    words = shlex.split(shell)
    assert words[:2] == ["exec", "unbroken"]  # a shell that waits for it would take its signals, and ignore them
    assert parser.parse_known_args(words[2:])[1] == []
    command, recipe, *options = services["trainer"]["command"]
    assert (command, recipe) == ("train", "/work/task.toml")
    values = read_options(options, load_recipe(None).section)
    assert values["engine.urls"] == ("http://server:8000",)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_the_workflows_run_targets_and_tools_that_exist(path: Path) -> None:
    jobs = yaml.safe_load(path.read_text("utf-8"))["jobs"]
    targets = set(re.findall(r"^([a-z0-9]+):.*##", (ROOT / "Makefile").read_text("utf-8"), flags=re.MULTILINE))
    for job in jobs.values():
        steps = [step["run"] for step in job["steps"] if "run" in step]
        for matrix in [job["strategy"]["matrix"]] if "strategy" in job else []:
            assert set(matrix.get("target", ())) <= targets
        for text in steps:
            assert set(re.findall(r"\bmake ([a-z0-9]+)", text)) <= targets
            assert all((ROOT / tool).exists() for tool in re.findall(r"python (tools/\w+\.py)", text))


def test_a_release_has_absolute_images_and_the_publishers_addresses(tmp_path: Path) -> None:
    places = runpy.run_path(str(ROOT / "tools/prepare_release.py"))["PLACES"]
    for name in (*places, "README.md", "CHANGELOG.md", "src/unbroken/__init__.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    tag = f"v{unbroken.__version__}"
    words = [sys.executable, str(ROOT / "tools/prepare_release.py"), "--owner=somebody", f"--root={tmp_path}"]

    def run(tag: str) -> str:
        return subprocess.run(
            [*words, f"--tag={tag}", f"--notes={tmp_path / 'notes'}"], check=False, capture_output=True, text=True
        ).stderr

    assert f"--tag must be {tag}" in run("v9.9.9")
    changelog = tmp_path / "CHANGELOG.md"
    heading = f"## {unbroken.__version__} (2026-01-01)\n"
    changelog.write_text(heading.replace("2026-01-01", "unreleased"))
    assert "which is not called unreleased" in run(tag)
    changelog.write_text(f"# Changelog\n\n{heading}- [One](docs/a.md#b).\n\n## 0.0.1 (2025-01-01)\n- Two.\n")
    assert run(tag) == ""
    linked = f"https://github.com/somebody/unbroken/blob/{tag}/docs/a.md#b"
    assert (tmp_path / "notes").read_text() == f"- [One]({linked}).\n"
    readme = (tmp_path / "README.md").read_text("utf-8")
    images = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", readme)
    assert len(images) >= 2
    assert all(each.startswith(f"https://raw.githubusercontent.com/somebody/unbroken/{tag}/docs/") for each in images)
    assert not re.findall(r"\]\((?!https://|#)[^)]+\)", readme)
    for place in places:
        assert "OWNER" not in (tmp_path / place).read_text("utf-8")


def test_the_package_has_the_metadata_that_an_index_shows() -> None:
    assert PROJECT["authors"] == [{"name": "The unbroken authors"}]
    assert {"Homepage", "Documentation", "Repository", "Issues", "Changelog"} <= PROJECT["urls"].keys()
    for version in ("3.11", "3.12", "3.13"):
        assert f"Programming Language :: Python :: {version}" in PROJECT["classifiers"]


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text("utf-8")
    missing = [path.name for path in (ROOT / "docs").glob("*.md") if f": {path.name}\n" not in navigation]
    assert missing == ["lab-notes.md"], "add the page to `nav` of mkdocs.yml"


@pytest.mark.parametrize("page", NOTES, ids=lambda page: page.stem)
def test_the_files_that_notes_name_exist_or_are_said_to_be_removed(page: Path) -> None:
    text = page.read_text("utf-8")
    removed = " ".join(line for line in text.splitlines() if "removed after these runs: `git show " in line)
    named = set(re.findall(r"\b((?:bench|tests|tools|recipes)/[\w/]+\.(?:py|toml))\b", text))
    assert sorted(name for name in named if not (ROOT / name).exists() and f"`{name}`" not in removed) == []


def test_make_clients_names_all_that_failed(tmp_path: Path) -> None:
    """With a Python that does nothing but fail to install one environment and to pass one test file."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copytree(ROOT / "tests/e2e/clients", tmp_path / "tests/e2e/clients")
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\n"
        'case "$*" in *-m\\ venv*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python";;\n'
        "*verifiers-0.4.txt*|*test_tinker_cookbook.py*) exit 1;; esac\n"
    )
    python.chmod(0o755)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    shutil.copy(python, tmp_path / ".venv" / "bin" / "python")
    for name in ("pyproject.toml", "tools/install_vllm_cpu.py", ".venv/.installed-readme", ".venv/.installed"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    words = ["make", f"PYTHON={python}", "--directory", str(tmp_path), "clients"]
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    assert done.returncode != 0
    assert done.stdout.partition("clients failed:\n")[2].split("\n")[:2] == [
        "  install verifiers-0.4",
        "  tests/e2e/test_tinker_cookbook.py",
    ]
