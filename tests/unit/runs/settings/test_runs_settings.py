"""A config from a command line and a TOML file: what is given arrives, what is wrong is named."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

from unbroken.cli import main
from unbroken.errors import InvalidInputError
from unbroken.runs.command import COMMON_FIELDS
from unbroken.runs.config import RolloutConfig, RunConfig
from unbroken.runs.settings import build, describe, load_toml, read_options, read_table, redact, section_of
from unbroken.training.config import OldLogprobs, OptimizerConfig, TrainerConfig
from unbroken.training.loss_config import Correction
from unbroken.types import SamplingParams


class Colour(StrEnum):
    """Colours."""

    RED = "red"
    """Like a tomato."""
    BLUE = "blue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One of several."""

    file: Path
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """What all have."""

    output: Path
    """Where
    to write."""
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(Base):
    """The whole."""

    colour: Colour = Colour.RED
    """The colour."""
    share: float = 0.5
    most: int | None = None
    loud: bool = False
    names: tuple[str, ...] = ()
    parts: tuple[Part, ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    trainer: TrainerConfig = field(
        default_factory=lambda: TrainerConfig(
            optimizer=OptimizerConfig(learning_rate=0.1, weight_decay=1e-3, eps=1e-3), logprob_chunk_size=64
        )
    )
    extra: Part | None = None
    data: Path | tuple[Path, ...] | None = None


SECTION = section_of(Config)


def from_options(*words: str) -> Config:
    config: Config = build(SECTION, read_options(["--output", "runs", *words], SECTION))
    return config


def from_toml(text: str, folder: Path) -> Config:
    path = folder / "recipe.toml"
    path.write_text('output = "runs"\n' + text)
    config: Config = build(SECTION, read_table(load_toml(path), SECTION, source="recipe.toml: ", folder=folder))
    return config


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--seed", "3"], "seed", 3),
        (["--seed=3"], "seed", 3),
        (["--colour", "blue"], "colour", Colour.BLUE),
        (["--share", "1"], "share", 1.0),
        (["--share", "3e-4"], "share", 3e-4),
        (["--share", "-.5"], "share", -0.5),
        (["--most", "4"], "most", 4),
        (["--most", "none"], "most", None),
        (["--loud", "true"], "loud", True),
        (["--names", "a,b"], "names", ("a", "b")),
        (["--names", '["a,b", "c"]'], "names", ("a,b", "c")),
        (["--names", "[]"], "names", ()),
        (["--parts", '[{file = "a.py", weight = 2}]'], "parts", (Part(file=Path("a.py"), weight=2.0),)),
        (["--variables", "{thinking = false}"], "variables", {"thinking": False}),
        (["--trainer.old-logprobs", "recompute"], "trainer.old_logprobs", OldLogprobs.RECOMPUTE),
        (["--trainer.correction.kind", "none"], "trainer.correction", Correction()),
        (["--trainer.optimizer.betas", "0.8,0.9"], "trainer.optimizer.betas", (0.8, 0.9)),
        (["--trainer.optimizer.max_grad_norm", "inf"], "trainer.optimizer.max_grad_norm", math.inf),
        (["--extra.file", "b.py"], "extra", Part(file=Path("b.py"))),
        (["--data", "a,b.csv"], "data", Path("a,b.csv")),
        (["--data", '["a.csv", "b.csv"]'], "data", (Path("a.csv"), Path("b.csv"))),
    ],
)
def test_an_option_sets_its_field(words, name, value):
    found = from_options(*words)
    for part in name.split("."):
        found = getattr(found, part)
    assert found == value
    assert type(found) is type(value)


def test_what_is_not_given_keeps_the_default_of_the_recipe_and_not_that_of_the_class():
    assert from_options() == Config(output=Path("runs"))
    trainer = from_options("--trainer.optimizer.learning-rate", "3e-4").trainer
    assert trainer == TrainerConfig(
        optimizer=OptimizerConfig(learning_rate=3e-4, weight_decay=1e-3, eps=1e-3), logprob_chunk_size=64
    )


def test_a_toml_file_sets_fields_and_its_paths_are_relative_to_it(tmp_path):
    config = from_toml(
        'colour = "blue"\nnames = ["a"]\n[trainer.optimizer]\nbetas = [0.8, 0.9]\n'
        '[[parts]]\nfile = "a.py"\n[[parts]]\nfile = "/b.py"\nweight = 2\n[variables]\nthinking = false',
        tmp_path,
    )
    assert config.output == tmp_path / "runs"
    assert config.parts == (Part(file=tmp_path / "a.py"), Part(file=Path("/b.py"), weight=2.0))
    assert config.trainer.optimizer == OptimizerConfig(learning_rate=0.1, weight_decay=1e-3, eps=1e-3, betas=(0.8, 0.9))
    assert (config.colour, config.names, config.variables) == (Colour.BLUE, ("a",), {"thinking": False})


def test_a_file_or_a_list_of_files_is_written_either_way_and_what_is_neither_is_named(tmp_path):
    assert from_toml('data = "a.csv"', tmp_path).data == tmp_path / "a.csv"
    assert from_toml('data = ["a.csv"]', tmp_path).data == (tmp_path / "a.csv",)
    for value, name in (("3", "data"), ("[3]", r"data\[0\]")):
        with pytest.raises(
            InvalidInputError, match=rf"recipe.toml: {name} must be a valid string, got {re.escape(value)}"
        ):
            from_toml(f"data = {value}", tmp_path)


@pytest.mark.parametrize(
    ("name", "field"), [("num_groups", "problems_per_step"), ("num_prompts", "problems_per_step"), ("n", "group_size")]
)
def test_a_field_of_rollouts_by_another_name_is_refused_with_its_own(name, field):
    section = section_of(RunConfig)
    with pytest.raises(InvalidInputError, match=f"recipe: rollouts.{name} must be left out: its name is {field}"):
        read_table({"rollouts": {name: 1}}, section, source="recipe: ", folder=None)
    with pytest.raises(InvalidInputError, match=f"--rollouts.{name.replace('_', '-')} must be .* its name is {field}"):
        read_options([f"--rollouts.{name.replace('_', '-')}", "1"], section)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("no_repeat_ngram_size", "logprobs would be of another distribution than the model's at this temperature"),
        ("num_beams", "logprobs would be of another distribution"),
        ("guidance_scale", "logprobs would be of another distribution"),
        ("stop", "its name is stop_strings"),
        ("bad_words", "its name is bad_words_ids, and it takes ids"),
        ("eos_token_id", "ids that end a completion, besides the template's own, are stop_token_ids"),
        ("ignore_eos", "a completion ends with a stop id, a stop string or max_tokens"),
    ],
)
def test_sampling_parameters_of_other_libraries_are_refused_by_name_with_the_reason(name, why):
    section = section_of(RunConfig)
    with pytest.raises(InvalidInputError, match=f"recipe: rollouts.sampling.{name} must be left out: {why}"):
        read_table({"rollouts": {"sampling": {name: 1}}}, section, source="recipe: ", folder=None)
    with pytest.raises(InvalidInputError, match=f"--rollouts.sampling.{name} must be left out: {why}"):
        read_options([f"--rollouts.sampling.{name}", "1"], section)


def test_further_sampling_parameters_that_are_exact_go_through():
    table = {"stop_strings": ["</answer>"], "stop_token_ids": [7]}
    values = read_table({"rollouts": {"sampling": table}}, section_of(RunConfig), source="", folder=None)
    config = build(section_of(RolloutConfig, prefix="rollouts."), values)
    assert config.sampling == SamplingParams(stop_strings=("</answer>",), stop_token_ids=(7,))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("trainer.seed", "it is the run's seed"),
        ("loop.outages.ask_every_s", "it is 2 s"),
        ("evaluation.sampling.structured_output.regex", "a recipe in Python gives it"),
        ("engine.embedded.numerics", "they are those of trainer.numerics"),
    ],
)
def test_a_field_that_is_no_setting_is_refused_with_the_reason(name, why):
    section, option = section_of(RunConfig), f"--{name.replace('_', '-')}"
    table: dict[str, Any] = {}
    inner = table
    *parts, last = name.split(".")
    for part in parts:
        inner = inner.setdefault(part, {})
    inner[last] = 1
    with pytest.raises(InvalidInputError, match=f"recipe: {'.*'.join(parts[:3])}.* must be left out: {why}"):
        read_table(table, section, source="recipe: ", folder=None)
    with pytest.raises(InvalidInputError, match=f"{option} must be left out: {why}"):
        read_options([option, "1"], section)
    assert name not in section.all_fields()


def test_a_field_that_is_no_setting_keeps_the_value_of_the_recipe_and_is_described():
    config = from_options("--trainer.optimizer.learning-rate", "0.5")
    assert (config.trainer.logprob_chunk_size, config.trainer.optimizer.learning_rate) == (64, 0.5)
    assert describe(config)["trainer.logprob_chunk_size"] == 64


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sed", "3"], r"--sed must be a field of the recipe: did you mean --seed\?"),
        (["--learning-rate", "3"], r"--learning-rate must .*: did you mean --trainer.optimizer.learning-rate\?"),
        (["--trainer.optimiser.lr", "3"], r"--trainer.optimiser.lr .* mean --trainer.optimizer.learning-rate\?"),
        (["--trainer.optimiser.betas", "3"], r"--trainer.optimiser.betas .* mean --trainer.optimizer.betas\?"),
        (["--trainer", "3"], r"--trainer has its own fields: give one of trainer.old_logprobs, "),
        (["--qqqqqqqq", "3"], r"--qqqqqqqq must be .*: the fields are output, seed, colour"),
        (["--seed"], r"--seed must be followed by a value"),
        (["--seed", "1", "--seed=2"], r"--seed must be given once, but is given twice"),
        (["seed=1"], r"options must be written as --FIELD VALUE, got 'seed=1'"),
        (["--seed", "1.5"], r"--seed must be a valid integer, got '1.5'"),
        (["--seed", "none"], r"--seed must be a valid integer, got 'none'"),
        (["--colour", "green"], r"--colour must be 'red' or 'blue', got 'green'"),
        (["--loud", "perhaps"], r"--loud must be a valid boolean, got 'perhaps'"),
        (["--names", "[a"], r"--names must be written as in TOML, got '\[a'"),
        (["--parts", '[{fil = "a.py"}]'], r"--parts\[0\].fil must be a field .* did you mean --parts\[0\].file\b"),
        (["--parts", "[3]"], r"--parts must be a list of tables of file, weight, got \[3\]"),
        (["--extra.weight", "2"], r"extra.file must be given, by --extra.file or in the recipe's TOML"),
        (["--trainer.kl-weight", "-1"], r"^trainer.kl_weight must be finite and >= 0, got -1.0"),
        (
            ["--trainer.optimizer.weight-decay", "-1"],
            r"^trainer.optimizer.weight_decay must be finite and >= 0, got -1.0",
        ),
        (["--trainer.correction.high", "1"], r"^trainer.correction: Correction needs 0 <= low < 1 < high, got low=0.0"),
        (["--trainer.optimizer.betas", "[0.9]"], r"--trainer.optimizer.betas\[1\] must be valid: .*, got \[0.9\]"),
    ],
)
def test_what_is_wrong_on_the_command_line_is_named(words, message):
    with pytest.raises(InvalidInputError, match=message):
        from_options(*words)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sed = 3", r"recipe.toml: sed must be a field of the recipe: did you mean seed\?"),
        ("trainer.optimizer.lr = 3", r"recipe.toml: trainer.optimizer.lr must be a field of the recipe"),
        ("[trainer.optimiser]\nbetas = 3", r"toml: trainer.optimiser must be a section .* mean trainer.optimizer\? \("),
        (
            "[trainer]\noptimiser = 3",
            r"toml: trainer.optimiser must be a field of the recipe: trainer has no field optimiser, and "
            r"trainer.optimizer is a section, with the fields name, ",
        ),
        ("optimiser = 3", r"toml: optimiser must .*: the recipe has no field optimiser, and trainer.optimizer is a se"),
        ("[trainer]\nnum_minibatch = 3", r"num_minibatch must .*: did you mean trainer.num_minibatches or "),
        ("[optimizer]\nbetas = 3", r"toml: optimizer must be a section .* mean trainer.optimizer\? \("),
        ("[[part]]\nweight = 2", r"toml: part must be a section of the recipe: did you mean parts\? \("),
        ("[extra.optimizer]\nbetas = 3", r"toml: extra.optimizer must be a section .* mean trainer.optimizer\? \("),
        (
            "[trainer.betas]\nx = 1",
            r"toml: trainer.betas must .* mean the field trainer.optimizer.betas\? It has a value",
        ),
        ("lr = {x = 1}", r"toml: lr must be a section .* mean the field trainer.optimizer.learning_rate\? It has"),
        (
            "[extra]\nbetas = 3",
            r"toml: extra.betas must be a field of the recipe: did you mean trainer.optimizer.betas\?",
        ),
        ("[reading]\nx = 1", r"toml: reading must be a section of the recipe: the sections are trainer, "),
        ("[extra.trainer]\nx = 1", r"move it above the first table, .*; as a table, write \[trainer\]$"),
        ("[extra.trainer.optimizer]\nx = 1", r"; as a table, write \[trainer.optimizer\]$"),
        ("[[extra.parts]]\nx = 1", r"; as a table, write \[\[parts\]\]$"),
        ("[extra]\nseed = 3", r"move it above the first table, because .* to that table$"),
        ("[trainer.optimizer.x]\ny = 1", r"toml: trainer.optimizer.x must .*: trainer.optimizer has no sections, but"),
        ("trainer = 3", r"recipe.toml: trainer must be a table of old_logprobs, .*, got 3"),
        ('seed = "3"', r"recipe.toml: seed must be a valid integer, got '3'"),
        ("seed = true", r"recipe.toml: seed must be a valid integer, got True"),
        ('colour = "green"', r"recipe.toml: colour must be 'red' or 'blue', got 'green'"),
        ("names = [1]", r"recipe.toml: names\[0\] must be a valid string, got \[1\]"),
        ("[[parts]]\nweight = 2", r"parts\[0\].file must be given"),
        ("seed = ", r"recipe.toml must be a TOML file: "),
    ],
)
def test_what_is_wrong_in_a_toml_file_is_named(tmp_path, text, message):
    with pytest.raises(InvalidInputError, match=message):
        from_toml(text, tmp_path)


def test_a_field_without_a_default_must_be_given():
    with pytest.raises(InvalidInputError, match=r"output must be given, by --output .*: Where to write."):
        build(SECTION, {})


def test_every_field_is_listed_with_its_docstring():
    fields = SECTION.all_fields()
    assert fields["output"].doc == "Where to write."
    assert fields["colour"].doc == "The colour. red: Like a tomato."
    assert fields["trainer.optimizer.weight_decay"].default == 1e-3
    assert "Weight of the distance to the reference policy" in fields["trainer.kl_weight"].doc


def test_a_config_is_described_as_json_holds_it():
    described = describe(from_options("--trainer.optimizer.max-grad-norm", "inf", "--extra.file", "b.py"))
    assert described["output"] == "runs"
    assert described["colour"] == "red"
    assert described["trainer.optimizer.max_grad_norm"] == "inf"
    assert described["trainer.optimizer.betas"] == [0.9, 0.999]
    assert described["extra.file"] == "b.py"
    assert described["extra.weight"] == 1.0
    assert described["trainer.dpo"] is None


def test_a_part_that_is_left_out_is_told_from_one_with_default_values():
    without, with_defaults = describe(from_options()), describe(from_options("--trainer.dpo.beta", "0.1"))
    assert without["trainer.dpo"] is None
    assert "trainer.dpo.beta" not in without
    assert with_defaults["trainer.dpo.beta"] == 0.1


def test_a_correction_is_a_config_of_its_own():
    given = {"trainer.correction.high": 3.0}
    section = section_of(Config, base=from_options())
    assert build(section, given).trainer.correction == Correction(high=3.0)


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        *((name, "x", "***") for name in ("WANDB_API_KEY", "HF_TOKEN", "DB_PASSWORD", "api_key", "access_token")),
        *((name, "x", "***") for name in ("Authorization", "X-Api-Key", "token", "proxy_password")),
        *(("api_keys", ["x", ""], ["***", ""]), ("a.b.client_secret", "x", "***"), ("password", None, None)),
        *(("max_tokens", "5", "5"), ("bos_token", "<s>", "<s>"), ("api_key_file", "k", "k"), ("key", "a", "a")),
        ("url", "http://u:p:w@h:1/a?b=c", "http://u:***@h:1/a?b=c"),
        ("url", "https://h/a?x=1&api_key=k&y=2#f", "https://h/a?x=1&api_key=***&y=2#f"),
        ("url", "http://h:80/s/abc/v1?v=key", "http://h:80/s/abc/v1?v=key"),
        ("command", ["curl", "-H", "Authorization: Bearer abcdefgh.ijk"], ["curl", "-H", "Authorization: Bearer ***"]),
        ("text", "a basic question, hf_ and sk-learn", "a basic question, hf_ and sk-learn"),
        ("text", "use sk-proj-0123456789abcdef here", "use *** here"),
    ],
)  # fmt: skip
def test_what_is_a_secret_is_left_out_of_what_is_kept_and_nothing_else(name, value, kept):
    assert redact({"outer": {name: value}}) == {"outer": {name: kept}}
    assert redact(kept, name) == kept


def test_the_help_names_what_a_first_hour_needs_and_each_is_a_setting(capsys, tmp_path):
    recipe = tmp_path / "task.toml"
    recipe.write_text('model = "model"\nloop.num_steps = 20\n')
    assert main(["train", str(recipe), "--help"]) == 0
    described = re.findall(r"(?m)^  (--[\w.-]+) ", capsys.readouterr().out)
    assert described == [f"--{name.replace('_', '-')}" for name in COMMON_FIELDS]
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    first = re.findall(r"(?m)^  (--[\w.-]+) ", capsys.readouterr().out.partition("settings of a first hour")[2])
    assert len(first) > 5
    assert set(first) <= set(described)
