"""The TOML in the documentation is read as `unbroken train` reads it, and tables of names have only what exists."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

from unbroken.runs.config import RunConfig
from unbroken.runs.prompts.built_in import Config
from unbroken.runs.recipe import BUILT_IN, load_recipe
from unbroken.runs.settings import read_table, section_of

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGES = ("from-trl.md", "from-verl.md")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)


def toml_blocks() -> Iterator[tuple[str, str]]:
    for page in [*sorted(DOCS.glob("*.md")), *sorted(DOCS.glob("tutorials/*.md")), ROOT / "README.md"]:
        for number, text in enumerate(blocks(page, "toml")):
            yield f"{page.name}-{number}", text


def rows(name: str) -> list[list[str]]:
    """The cells of the table `Every setting`."""
    text = (DOCS / name).read_text("utf-8").partition("## Every setting")[2]
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[1:]]


def trainer_arguments(package: Path) -> list[str]:
    """Of `GRPOTrainer`, from its file: importing it warns of the installed vLLM."""
    tree = ast.parse((package / "trainer" / "grpo_trainer.py").read_text("utf-8"))
    trainer = next(each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == "GRPOTrainer")
    init: Any = next(each for each in trainer.body if getattr(each, "name", "") == "__init__")
    return [argument.arg for argument in init.args.args]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@pytest.mark.parametrize("text", [pytest.param(text, id=name) for name, text in toml_blocks()])
def test_the_toml_of_every_page_has_settings_that_exist(text):
    table = tomllib.loads(text)
    table.pop("recipe", None)
    values = read_table(table, section_of(importlib.import_module(BUILT_IN).Config), source="", folder=DOCS)
    assert {name.partition(".")[0] for name in values} == set(table)


@pytest.mark.parametrize("page", PAGES)
def test_the_example_of_a_page_is_a_whole_recipe(tmp_path, page):
    (text,) = blocks(DOCS / page, "toml")
    (tmp_path / "recipe.toml").write_text(text)
    for name in re.findall(r'"([\w/]+\.(?:py|jsonl|parquet))', text):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    config = load_recipe(tmp_path / "recipe.toml").configure(
        ["--trackers.names", "tensorboard"]
    )  # others need not be installed
    assert isinstance(config, Config)
    assert config.rollouts.group_size == 8
    assert config.precision == "bfloat16"


@pytest.mark.parametrize("page", PAGES)
def test_the_table_of_a_page_names_our_settings(page):
    section = section_of(Config)
    known = {*section.all_fields(), *(each.prefix.removesuffix(".") for each in section.all_sections())}
    assert {each.name for each in dataclasses.fields(RunConfig)} <= known
    found = [name for row in rows(page) for name in names(row[1])]
    assert len(found) > 50
    assert [name for name in found if name not in known] == []


def covered(name: str, named: Iterable[str]) -> bool:
    """Whether a table names a setting, or a group that it is in."""
    return any(name == each or name.startswith(each + ".") for each in named)


@pytest.mark.parametrize("page", PAGES)
def test_each_row_has_a_counterpart_or_a_reason(page):
    found = rows(page)
    assert [row for row in found if len(row) != 3 or not row[0] or not (names(row[1]) or row[2])] == []
    named = [name for row in found for name in names(row[0])]
    assert len(named) == len(set(named))


def test_every_field_of_trl_has_a_row():
    """Its own and those of transformers' `TrainingArguments`."""
    trl = pytest.importorskip("trl")
    named = {name.partition("=")[0] for row in rows("from-trl.md") for name in names(row[0])}
    fields = {each.name for each in dataclasses.fields(trl.GRPOConfig)}
    own = fields - {each.name for each in dataclasses.fields(transformers.TrainingArguments)}
    assert len(own) > 70
    assert sorted(own - named) == []
    assert sorted(fields - named) == []


def test_every_field_of_verl_has_a_row():
    """`verl_settings.txt` has the keys of its trainer's YAML of January 2026, without what is deep inside a group."""
    keys = (Path(__file__).parent / "verl_settings.txt").read_text().split()
    named = [name for row in rows("from-verl.md") for name in names(row[0])]
    assert [key for key in keys if not covered(key, named)] == []
    elsewhere = {"algorithm.filter_groups.enable", ".max_num_gen_batches"}  # of its recipe for DAPO
    assert [name for name in named if not any(covered(key, [name]) for key in keys) and name not in elsewhere] == []


def test_the_names_of_trl_are_those_of_the_installed_one():
    trl = pytest.importorskip("trl")
    known = {each.name for each in dataclasses.fields(trl.GRPOConfig)}
    known |= {*trainer_arguments(Path(trl.__file__).parent), "image", "images", "accelerate launch"}
    named = [name.partition("=")[0] for row in rows("from-trl.md") for name in names(row[0])]
    assert [name for name in named if name not in known] == []
    code: Any = ast.parse(blocks(DOCS / "from-trl.md", "python")[0])
    given = {
        node.func.id: node for node in ast.walk(code) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    for call in ("GRPOConfig", "GRPOTrainer"):
        assert [each.arg for each in given[call].keywords if each.arg not in known] == []
