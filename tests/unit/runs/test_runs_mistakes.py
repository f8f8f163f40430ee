"""Mistakes of a new user are found before anything slow is loaded, and by name."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, Qwen3Config

from support import templates
from support.images import CountingProcessor
from support.served import save_tiny_model
from support.vision import PAD, picture, vision_tokenizer
from unbroken.cli import main
from unbroken.errors import InvalidInputError
from unbroken.images.decoder import ImageLimits, check_image, encode_picture
from unbroken.images.processor import ImageInputs
from unbroken.rendering.loader import load_renderer
from unbroken.rendering.template import TemplateRenderer
from unbroken.rollout.tools import tool
from unbroken.runs import run
from unbroken.runs.config import EngineConfig, EngineKind
from unbroken.runs.models import find_context_length
from unbroken.runs.prompts.dataset import DataConfig, Rows
from unbroken.training.config import ParallelConfig
from unbroken.training.model.sharding import check_heads

RECIPES = Path(__file__).parents[3] / "recipes"
TASK = """
model = "nobody/nothing"
loop.num_steps = 1
data.file = "prompts.jsonl"
rewards = [{function = "rewards.py:score"}]
"""
ABOVE = "must be a field of the recipe, and {} is one at the top of the file: move it above the first table"
MISTAKES = {
    "no TOML": ("model = ", [], "must be a TOML file"),
    "no field": (TASK.replace("rewards", "rewrds"), [], "did you mean rewards?"),
    "no option": (TASK, ["--trainer.optimiser.lr", "1"], "did you mean --trainer.optimizer.learning-rate"),
    "a value": (TASK, ["--loop.num-steps", "x"], "--loop.num-steps must be a valid integer, got 'x'"),
    "no algorithm": (TASK, ["--algorithm", "grop"], "--algorithm must be 'grpo', 'dr_grpo'"),
    "no tracker": (TASK, ["--trackers.names", "swanlab"], "swanlab is not installed"),
    "no data": (TASK, ["--data.file", "rows.jsonl"], "data.file must name a file that exists, got rows.jsonl: there"),
    "no rewards": (TASK.replace("rewards.py", "r.py"), [], "rewards[0].function must name a file that exists, got"),
    "no folder": (TASK.replace("nobody", "./nobody"), [], "got './nobody/nothing': there is no such folder"),
    "a line after a list's table": (
        TASK + "[[evaluation_sets]]\nname = 'a'\nloop.max_staleness = 1\n",
        [],
        ABOVE.format("loop"),
    ),
    "a line after a table": (TASK + "[trainer]\noutput = 'runs/a'\n", [], "trainer.output " + ABOVE.format("output")),
    "no recipe": (None, [], "there is no such file"),
}
"""The TOML file, options, and a part of the error."""
SEVERAL = """
import json, sys
from unbroken.cli import main
for words in json.loads(sys.argv[1]):
    assert main(words) == 1
    loaded = {"torch", "transformers", "accelerate", "datasets", "openai"} & sys.modules.keys()
    print(f"loaded: {sorted(loaded)}", file=sys.stderr)
"""


def test_a_mistake_in_a_config_is_found_before_torch_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "rewards.py").write_text("def score(completions): ...\n")
    commands = []
    commands.append((["."], "RECIPE must be a Python or TOML file, got .: it is a folder"))
    for name, (text, options, message) in MISTAKES.items():
        file = tmp_path / f"{name}.toml"
        if text is not None:
            file.write_text(text)
        commands.append(([str(file), *options], message))
    commands.append(
        (["--env", "nothing.py:Env", "--model", "m"], "environment must name a file that exists, got nothing.py")
    )
    commands.append((["--env", "nothing.py:Env"], "environment must name a file that exists, got nothing.py"))
    _expect_without_torch(tmp_path, commands)


SEVERAL_MISTAKES = {
    "in tables of one file": (
        'loop.num_steps = "ten"\ntrainer.optimiser.learning_rate = 1\nrollouts.group_size = 0\n'
        'rewards = [{function = "rewards.py:score", wight = 1}, {function = 3}]\n',
        [],
        [
            "loop.num_steps must",
            "trainer.optimiser must",
            "rewards[0].wight must",
            "rewards[1].function must",
            "rollouts.group_size must",
        ],
    ),
    "in one table": (
        'model = "m"\nloop.num_steps = 1\n[trainer.optimizer]\nlearning_rate = -1.0\nweight_decay = -1.0\neps = 0.0\n',
        [],
        ["trainer.optimizer.learning_rate must", "trainer.optimizer.weight_decay must", "trainer.optimizer.eps must"],
    ),
    "of the file's type, and of what only another field allows": (
        'loop.num_steps = 1\nsessions.url = 3\nsessions.api_key_file = "key"\nloop.max_staleness = -1\n',
        [],
        ["sessions.url must", "loop.max_staleness must"],
    ),
    "in options": (
        "",
        ["--loop.num-step", "3", "--seed", "x", "--algorithm=grop"],
        ["--loop.num-step must", "--seed must", "--algorithm must"],
    ),
    "in what is missing, and in files": (
        'data.file = "rows.jsonl"\nrewards = [{function = "r.py:score"}]\nenvironment = "none.py:Env"\nseed = -1\n',
        [],
        ["environment must name", "model must be given", "loop.num_steps must be given"],
    ),
    "in files": (
        'model = "./no"\nloop.num_steps = 1\ndata.file = "rows.jsonl"\nrewards = [{function = "r.py:score"}]\n',
        [],
        ["model must be a folder", "rewards[0].function must name", "data.file must name"],
    ),
}
"""A file, options, and how each line of the error begins, in its order."""


@pytest.mark.parametrize("name", SEVERAL_MISTAKES)
def test_all_mistakes_of_a_configuration_are_said_at_once_a_line_for_each(tmp_path, capsys, name):
    text, options, lines = SEVERAL_MISTAKES[name]
    (tmp_path / "task.toml").write_text(text)
    assert main(["train", str(tmp_path / "task.toml"), f"--output={tmp_path / 'run'}", *options]) == 1
    shown = capsys.readouterr().err.removeprefix("unbroken: ").splitlines()
    shown = [line.removeprefix(f"{tmp_path / 'task.toml'}: ") for line in shown]
    assert [line[: len(begin)] for line, begin in zip(shown, lines, strict=True)] == lines


def test_a_mistake_in_an_option_of_a_python_recipe_is_found_before_torch_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(f'recipe = "{RECIPES}/lookup.py"\nwarm_up.seed = 1\n')
    commands = [(["own.toml"], "own.toml: warm_up.seed must be a field of the recipe")]
    for name in ("lookup.py", "lookup_agent.py", "guess.py"):
        recipe = str(RECIPES / name)
        commands += [
            ([recipe, "--loop.num-step", "3"], "did you mean --loop.num-steps or"),
            ([recipe, "--seed", "x"], "--seed must be a valid integer, got 'x'"),
        ]
    commands.append(([str(RECIPES / "guess.py")], "model must be given, by --model or in the recipe's TOML"))
    _expect_without_torch(tmp_path, commands)


def _expect_without_torch(folder: Path, commands: Sequence[tuple[list[str], str]]) -> None:
    """Each `train` command fails with its message, and in all that time nothing heavy is loaded."""
    words = [sys.executable, "-c", SEVERAL, json.dumps([["train", *words] for words, _ in commands])]
    done = subprocess.run(words, capture_output=True, text=True, cwd=folder, check=False)
    assert done.returncode == 0, done.stderr
    *errors, rest = done.stderr.split("loaded: []\n")
    assert rest == "", "something was loaded"
    for (options, message), error in zip(commands, errors, strict=True):
        assert message in error, options


@tool
def look_up(key: str) -> str:
    """Look up a key.

    Args:
        key: The key.
    """
    return key


def test_prompts_above_the_context_are_found_by_their_rows(tmp_path: Path) -> None:
    """Those of many bytes are tokenised; one that is long without tools, and one whose tools are long."""
    lengths = [1, 5, 200, 20, 150]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": "k7? " * n}) + "\n" for n in lengths))
    rows, renderer = Rows(DataConfig(file=file), seed=0), load_renderer(save_tiny_model(tmp_path / "model"))
    all_ids = [len(renderer.render([{"role": "user", "content": "k7? " * n}]).token_ids) for n in lengths]
    rows.check_prompts([], renderer, max(all_ids) + 1)
    with pytest.raises(InvalidInputError) as raised:
        rows.check_prompts([], renderer, min(all_ids[2], all_ids[4]))
    expected = (
        f"are too long: 2 ({all_ids[2]} tokens), 4 ({all_ids[4]} tokens). Leave them out, or take a longer context"
    )
    assert expected in str(raised.value)
    assert "prompts.jsonl must have prompts shorter than the context" in str(raised.value)
    with pytest.raises(InvalidInputError, match=r"too long: 0 \("):
        rows.check_prompts([look_up], renderer, all_ids[0] + 1)


class AreaProcessor(CountingProcessor):
    """Gives an image an id for each pixel."""

    def count_features(self, width: int, height: int, settings: str = "{}") -> int:
        return width * height


@pytest.mark.usefixtures("datasets_cache")
def test_prompts_that_are_too_long_by_their_images_are_found_by_the_headers(tmp_path: Path) -> None:
    """What is short is not decoded: of one image nothing is left but its header."""
    (tmp_path / "large.png").write_bytes(encode_picture(picture(40, 40)).data)
    (tmp_path / "small.png").write_bytes(encode_picture(picture(20, 20)).data[:60])
    images = [["small.png"], ["large.png"], ["small.png", "small.png"], ["large.png", "large.png"], []]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": "a", "image": each}) + "\n" for each in images))
    rows = Rows(DataConfig(file=file, images="image"), seed=0)
    tokens = vision_tokenizer()
    areas = AreaProcessor(
        tokens.convert_tokens_to_ids(PAD), num_ids=lambda image, _: math.prod(check_image(image, ImageLimits()))
    )
    inputs = ImageInputs(processor=areas)
    renderer = TemplateRenderer(tokens, images=inputs)
    rows.check_prompts([], renderer, 5000, inputs)
    assert areas.num_expanded == 0
    with pytest.raises(InvalidInputError, match=r"too long: 1 \(16\d\d tokens\), 3 \(32\d\d tokens\)\. Leave"):
        rows.check_prompts([], renderer, 1000, inputs)
    assert areas.num_expanded == 3


@pytest.mark.usefixtures("datasets_cache")
def test_what_the_context_cannot_hold_is_refused_before_the_model_is_loaded(tmp_path: Path, capsys) -> None:
    """The model has no weights here."""
    model = save_tiny_model(tmp_path / "model")
    (model / "model.safetensors").unlink()
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "k7? " * 3000}) + "\n")
    (tmp_path / "rewards.py").write_text("def score(completions): ...\n")
    (tmp_path / "task.toml").write_text(TASK)
    length = json.loads((model / "config.json").read_text())["max_position_embeddings"]
    train = partial(_train, tmp_path, model, capsys)
    message = f"rollouts.sampling.max_tokens must be at most {length}, the context of the model and its engine"
    assert f"{message}, got {length + 1}" in train("--rollouts.sampling.max-tokens", str(length + 1))
    shorter = ("--engine.embedded.context-length", "64", "--rollouts.sampling.max-tokens", "65")
    assert "rollouts.sampling.max_tokens must be at most 64" in train(*shorter)
    assert f"shorter than the context of {length} tokens, and these rows are too long: 0 (" in train()


@pytest.mark.usefixtures("datasets_cache")
def test_a_model_whose_turns_no_id_ends_is_refused_before_it_is_loaded_and_takes_one_from_the_config(
    tmp_path: Path, capsys
) -> None:
    model = save_tiny_model(tmp_path / "model")
    (model / "model.safetensors").unlink()
    template = templates.ONE_END_FOR_REASONING_AND_TURN.replace("<|end|>", "{{ eos_token }}")
    (model / "chat_template.jinja").write_text(template)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "rewards.py").write_text("def score(completions): ...\n")
    (tmp_path / "task.toml").write_text(TASK)
    train = partial(_train, tmp_path, model, capsys)
    assert "stop_token_ids must have an id that ends a turn of text" in train()
    assert "stop_token_ids" not in train("--rollouts.sampling.stop-token-ids", "5")  # the next error: it has no weights


WRONG = """
import torch
from unbroken.training.objective.losses import TokenLosses

def one_for_all(logprobs_N, batch, clip):
    return TokenLosses(-(logprobs_N * batch.advantages_N).mean(), torch.zeros_like(logprobs_N, dtype=torch.bool))

def a_column(logprobs_N, batch, clip):
    return TokenLosses(-(logprobs_N * batch.advantages_N)[:, None], torch.zeros_like(logprobs_N, dtype=torch.bool))

def alone(logprobs_N, batch, clip):
    return -logprobs_N * batch.advantages_N

def without_gradient(logprobs_N, batch, clip):
    return TokenLosses(-logprobs_N.detach(), torch.zeros_like(logprobs_N, dtype=torch.bool))

def misspelt(logprobs_N, batch, clip):
    return TokenLosses(-logprobs_N * batch.advantage, logprobs_N > 0)

def too_few(rewards):
    return rewards[1:]

def no_numbers(rewards):
    return None
"""
LATE = {
    ("--loss=F:one_for_all",): "loss one_for_all must return TokenLosses(losses_N, clipped_N), one of each for every "
    "token: shapes [(4,), (4,)] for 4 tokens, got [(), (4,)]",
    ("--loss=F:a_column",): "got [(4, 1), (4,)]",
    ("--loss=F:alone",): "got [(4,)]",
    ("--loss=F:without_gradient",): "loss without_gradient must depend on the logprobs",
    ("--loss=F:misspelt",): "TokenLosses(-logprobs_N * batch.advantage, ",
    ("--advantages=F:too_few",): "must return 2 finite numbers for rewards [0. 1.], got [1.]",
    ("--advantages=F:no_numbers",): "must return 2 finite numbers for rewards [0. 1.], got None",
    ("--rollouts.sampling.stop-strings", '["END"]'): "rollouts.sampling.stop_strings must be left out with engine.kind "
    "embedded, which knows ids and no text, got ['END']: take rollouts.sampling.stop_token_ids",
    ("--evaluation.sampling.stop-strings", '["END"]'): "evaluation.sampling.stop_strings must be left out with",
    ("--engine.embedded.context-length", "100000"): "context_length must be at most ",
    ("--model-settings.kwargs", '{layer_types = ["sliding_attention", "full_attention"], sliding_window = 16}'): "the "
    "model has sliding_attention layers (sliding_window=16), which this engine cannot cache exactly at context_length=",
    ("--model-settings.kwargs", "{vocab_size = 9}"): "model must have an embedding for each id of its tokenizer, got ",
}
"""Options, and a part of the error."""


@pytest.mark.usefixtures("datasets_cache")
def test_what_only_a_step_would_have_told_is_refused_before_the_model_is_loaded(tmp_path: Path, capsys) -> None:
    """The model has no weights here: what loads it fails otherwise."""
    model = save_tiny_model(tmp_path / "model")
    (model / "model.safetensors").unlink()
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "rewards.py").write_text("def score(completions): ...\n")
    (tmp_path / "wrong.py").write_text(WRONG)
    (tmp_path / "task.toml").write_text(TASK)
    train = partial(_train, tmp_path, model, capsys, "--rollouts.group-size=2", "--rollouts.sampling.max-tokens=8")
    for options, message in LATE.items():
        assert message in train(*(each.replace("F:", f"{tmp_path}/wrong.py:") for each in options)), options
    assert "model must be a folder or the hub's name of a model" in train()  # without a mistake it has no weights
    windows = '{layer_types = ["sliding_attention", "full_attention"], sliding_window = 64}'
    shorter = ("--model-settings.kwargs", windows, "--engine.embedded.context-length", "64")
    assert "model must be a folder or the hub's name of a model" in train(*shorter)


@pytest.mark.parametrize(
    ("heads", "key_heads", "parallel", "message"),
    [
        (4, 1, {"tensor": 2}, r"tensor must divide the number of the model's heads of keys, 1, .* got 2: fsdp"),
        (3, 3, {"tensor": 2}, r"tensor must divide the number of the model's heads, 3, .* got 2"),
        (3, 1, {"sequence": 2}, r"sequence must be another number for this model, got 2: its 3 heads cannot"),
        (4, 2, {"tensor": 2}, None),
        (4, 1, {"sequence": 2}, None),  # the head of keys is repeated
        (3, 1, {"fsdp": 2}, None),
    ],
)
def test_heads_that_processes_cannot_share_are_refused_by_the_models_config(heads, key_heads, parallel, message):
    config = Qwen3Config(num_attention_heads=heads, num_key_value_heads=key_heads)
    with nullcontext() if message is None else pytest.raises(InvalidInputError, match=message):
        check_heads(config, ParallelConfig(**parallel))


def test_heads_of_keys_that_no_process_has_a_part_of_may_be_any_number() -> None:
    """DeepSeek's attention has one latent for all of its heads."""
    check_heads(DeepseekV3Config(num_attention_heads=4, num_key_value_heads=1), ParallelConfig(tensor=2))


def _train(folder: Path, model: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    words = ["train", str(folder / "task.toml"), f"--model={model}", f"--output={folder / 'run'}", *options]
    assert main(words) == 1
    return capsys.readouterr().err


def test_the_context_of_a_run_is_that_of_its_engine(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    length = json.loads((model / "config.json").read_text())["max_position_embeddings"]
    colocated, started = EngineKind.COLOCATED, EngineKind.STARTED
    assert find_context_length(model, EngineConfig()) == length
    assert find_context_length(model, EngineConfig(kind=colocated, options=("--max-model-len", "77"))) == 77
    assert find_context_length(model, EngineConfig(kind=started, options=("--max-model-len=78",))) == 78
    assert find_context_length(tmp_path / "nothing", EngineConfig()) is None


def test_a_colocated_engine_without_a_gpu_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's build for CPUs needs none; that for GPUs fails with pages of its own."""
    on_cpu: Any = SimpleNamespace(device=torch.device("cpu"), state=SimpleNamespace())
    for names, versions in (((), {}), (("vllm",), {"vllm": "0.32.0"})):
        monkeypatch.setattr(run, "packages_distributions", lambda names=names: {"vllm": names})
        monkeypatch.setattr(run, "version", versions.get)
        with pytest.raises(InvalidInputError, match=r"engine.kind colocated needs a GPU, or vLLM's build for CPUs"):
            run._check_device(EngineKind.COLOCATED, on_cpu)
    monkeypatch.setattr(run, "version", {"vllm": "0.32.0+cpu"}.get)
    run._check_device(EngineKind.COLOCATED, on_cpu)
    run._check_device(EngineKind.EMBEDDED, on_cpu)
