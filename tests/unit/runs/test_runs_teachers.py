"""Teachers of a run: which models may be one, who scores which row, and what a run says without them."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from support.rows import group, row, trajectory
from support.served import save_tiny_model
from support.servers import listening, make_app, scripted_engine, server_tokenizer
from support.slow_logprobs import slow_logprobs
from unbroken.cli import main
from unbroken.engines.transformers import TransformersEngine
from unbroken.errors import InvalidInputError, OutageError
from unbroken.runs.config import RolloutConfig, RunConfig, TeacherConfig
from unbroken.runs.prompts.built_in import Config
from unbroken.runs.python_files import ModelName
from unbroken.runs.settings import build, check_toml, section_of
from unbroken.runs.teachers import open_teachers
from unbroken.training.config import LoopConfig, OutageConfig
from unbroken.types import SamplingParams

ROWS = [
    {"prompt": "1 + 1?", "hint": "It is 2. 1 + 1?", "who": "other"},
    {
        "prompt": "1 + 2?",
        "hint": [{"role": "system", "content": "3"}, {"role": "user", "content": "?"}],
        "who": "itself",
    },
    {"prompt": "1 + 3?", "hint": None, "who": "itself"},
    {"prompt": "1 + 4?", "hint": "It is 5.", "who": None},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A policy, the same model as a teacher, another one, and rows."""
    folder = tmp_path_factory.mktemp("teachers")
    save_tiny_model(folder / "policy")
    for name in ("itself", "other"):
        shutil.copytree(folder / "policy", folder / name)
    change_weights(folder / "other")
    (folder / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in ROWS))
    return folder


def change_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    changed = {name: tensor * 1.1 for name, tensor in load_file(file).items()}
    save_file(changed, file, metadata={"format": "pt"})


def swap_tokens(folder: Path, copied: Path, token_id: int) -> Path:
    """Copy a model; two tokens of the copy have each other's ids."""
    shutil.copytree(folder, copied)
    state = json.loads((copied / "tokenizer.json").read_text())
    vocab = state["model"]["vocab"]
    first, second = (next(token for token, own in vocab.items() if own == each) for each in (token_id, token_id + 1))
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (copied / "tokenizer.json").write_text(json.dumps(state))
    return copied


def make_config(folder: Path, models: Sequence[str], **changes: Any) -> RunConfig:
    """Settings of a run with these teachers, folders beside the policy's or addresses."""
    known = [each if "://" in each else str(folder / each) for each in models]
    own = {"column": "who"} if len(models) > 1 else {}
    teacher = TeacherConfig(models=tuple(map(ModelName, known)), **own)
    return RunConfig(output=folder / "run", loop=LoopConfig(num_steps=1), teacher=teacher, **changes)


def make_words(folder: Path, *options: str) -> list[str]:
    recipe = folder / "recipe.toml"
    recipe.write_text(
        'model = "policy"\nalgorithm = "distillation"\ndata.file = "rows.jsonl"\ndata.shuffle = false\n'
        'teacher = {models = ["itself", "other"], column = "who", prompt = "hint"}\ntrainer.numerics = "exact"\n'
        "rollouts = {problems_per_step = 4, group_size = 1, sampling = {max_tokens = 6}}\nloop.num_steps = 2\n"
    )
    return ["train", "--preflight=false", str(recipe), f"--output={folder / 'run'}", *options]


def test_a_run_without_rewards_learns_from_the_teacher_of_each_row_and_is_verified(folder, capsys):
    assert main(make_words(folder)) == 0
    lines = [json.loads(line) for line in (folder / "run" / "metrics" / "metrics.jsonl").read_text().splitlines()]
    first = lines[0]
    assert first["reward/mean"] is None
    assert first["train/num_rows"] == 4
    assert 0 < first["teacher/token_share"] < 1
    assert first["teacher/kl"] != 0
    assert main(["verify", str(folder / "run")]) == 0
    capsys.readouterr()
    change_weights(folder / "other")
    assert main(make_words(folder, "--loop.num-steps=3")) != 0
    assert "other/model.safetensors must be" in capsys.readouterr().err
    assert main(make_words(folder, "--loop.num-steps=3", "--teacher.models=itself,policy")) != 0
    error = capsys.readouterr().err
    assert re.search(r"teacher\.models must be \[.*other'\] as in the run in .*, got \[.*policy'\]", error), error


def test_a_run_learns_the_most_likely_ids_of_a_teacher_and_is_verified(folder):
    output = folder / "top"
    assert main([*make_words(folder)[:-1], f"--output={output}", "--teacher.top-k=3"]) == 0
    lines = [json.loads(line) for line in (output / "metrics" / "metrics.jsonl").read_text().splitlines()]
    assert all(line["teacher/forward_kl"] > 0 and 0 < line["teacher/top_mass"] < 1 for line in lines)
    assert all(line["mismatch/equal_share"] == 1 for line in lines)
    assert main(["verify", str(output)]) == 0


async def test_a_server_gives_the_same_most_likely_ids_as_its_model_here(folder):
    sample = replace(row([1, 2, 3, 7], sampled=[2, 3]), temperature=0.7)
    model = AutoModelForCausalLM.from_pretrained(folder / "other")
    config = make_config(folder, ["itself"], rollouts=RolloutConfig(sampling=SamplingParams(temperature=0.7)))
    engine = TransformersEngine(AutoModelForCausalLM.from_pretrained(folder / "other"))
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(listening(make_app(engine)))
        config = replace(config, teacher=TeacherConfig(models=(ModelName(url),), top_k=3))
        teachers = await open_teachers(stack, config, folder / "policy", context_length=256)
        (scorer,) = teachers.models.values()
        assert teachers.top_k == 3
        ((_, found),) = await asyncio.to_thread(partial(scorer.score, [sample], num_top=3))
    logits = model(input_ids=torch.tensor([[1, 2, 3, 7]])).logits[0, 1:3].detach() / 0.7
    expected = torch.log_softmax(logits, -1).topk(3)
    assert np.array_equal(found.token_ids, expected.indices.numpy())
    assert found.logprobs == pytest.approx(expected.values.numpy(), rel=1e-5)


async def open_one(folder: Path, *models: str, **changes: Any) -> Any:
    async with AsyncExitStack() as stack:
        config = make_config(folder, models, **changes)
        return await open_teachers(stack, config, folder / "policy", context_length=256)


async def test_a_teacher_with_another_tokenizer_is_refused_with_the_token(folder):
    swap_tokens(folder / "policy", folder / "tokens", 5)
    with pytest.raises(InvalidInputError, match=r"must have the policy's tokenizer, and .* has the id 6 for the token"):
        await open_one(folder, "tokens")


async def test_an_adapter_is_a_teacher_on_the_policys_first_model_alone(folder):
    peft = pytest.importorskip("peft")
    base = AutoModelForCausalLM.from_pretrained(folder / "policy")
    adapted = peft.get_peft_model(base, peft.LoraConfig(target_modules="all-linear", init_lora_weights=False))
    adapted.save_pretrained(folder / "adapter")
    teachers = await open_one(folder, "adapter")
    sample = row([1, 2, 3, 7], sampled=[2, 3])
    (expected,), (found,) = (slow_logprobs(each, [sample]) for each in (adapted.eval(), teachers.models["adapter"]))
    assert torch.allclose(found, expected, atol=1e-5)
    file = folder / "adapter" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": str(folder / "other")}))
    with pytest.raises(InvalidInputError, match="or adapters of the policy's model"):
        await open_one(folder, "adapter")


async def test_a_group_has_the_teacher_and_the_prompt_of_its_row(folder):
    config = make_config(folder, ["itself", "other"])
    config = replace(config, teacher=replace(config.teacher, prompt="hint"))
    async with AsyncExitStack() as stack:
        teachers = await open_teachers(stack, config, folder / "policy", context_length=256)
    groups = [replace(group(trajectory(None)), data={"index": 0, "columns": each}) for each in ROWS]
    tasks = [teachers.find_task(each) for each in groups]
    assert [task and task.teacher for task in tasks] == ["other", "itself", "itself", None]
    prompts = [task.prompt_ids for task in tasks[:3]]
    assert "user\nIt is 2. 1 + 1?<|im_end|>\n<|im_start|>assistant\n" in server_tokenizer().decode(prompts[0])
    assert "system\n3" in server_tokenizer().decode(prompts[1])
    assert prompts[2] is None
    for columns, words in (({"who": "nobody", "hint": None}, "got 'nobody'"), ({"who": "other"}, "got 'hint'")):
        with pytest.raises(InvalidInputError, match=words):
            teachers.find_task(replace(groups[0], data={"index": 0, "columns": columns}))


async def test_a_server_scores_the_sampled_ids_and_its_death_is_said(folder):
    sample = row([1, 2, 3, 7], sampled=[2, 3])
    config = make_config(folder, ["itself"])
    async with AsyncExitStack() as stack:
        async with listening(make_app(scripted_engine("hi", logprob=-0.5))) as url:
            served = replace(config.teacher, models=(ModelName(url),))
            config = replace(config, teacher=served, loop=LoopConfig(num_steps=1, outages=OutageConfig(wait_s=0)))
            teachers = await open_teachers(stack, config, folder / "policy", context_length=256)
            (scorer,) = teachers.models.values()
            ((found, none),) = await asyncio.to_thread(scorer.score, [sample])
        assert none is None
        assert np.array_equal(found, np.float32([np.nan, np.nan, -0.5, -0.5]), equal_nan=True)
        with pytest.raises(OutageError, match=r"did not score a row for 0 s .* the same command continues"):
            await asyncio.to_thread(partial(scorer.score, [sample]))


async def test_a_server_with_another_tokenizer_is_refused(folder):
    swapped = swap_tokens(folder / "policy", folder / "swapped", 40)
    async with listening(make_app(scripted_engine("hi"))) as url, AsyncExitStack() as stack:
        with pytest.raises(InvalidInputError, match=r"the one at http.* has the id 4[01] for"):
            await open_teachers(stack, make_config(folder, [url]), swapped, context_length=256)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"algorithm": "distillation"}, r"teacher\.models must be given with algorithm distillation"),
        (
            {"algorithm": "distillation", "teacher.models": ["a"], "trainer.teacher_weight": 0.0},
            "which learns from nothing else",
        ),
        ({"trainer.teacher_weight": 1.0}, r"trainer\.teacher_weight must be left out without teacher\.models"),
        ({"teacher.models": ["a", "x/a"], "teacher.column": "who"}, "end in different names"),
        ({"teacher.models": ["a", "b"]}, "column must be given exactly with several models"),
        ({"advantages": "zero"}, "must have another term to train on, and got none"),
        (
            {"algorithm": "distillation", "teacher.models": ["a"], "trainer.zero_variance": "drop"},
            "must have another term to train on, and got none",
        ),
        ({"teacher.models": ["a"], "loss": "gspo"}, "take gspo_token"),
        (
            {"teacher.models": ["http://a"], "rollouts.sampling.top_k": 4},
            "without parameters that cut or change logits",
        ),
        ({"teacher.models": ["http://a"], "rollouts.sampling.presence_penalty": 0.5}, "without parameters that cut or"),
        (
            {"teacher.models": ["a"], "teacher.top_k": 4, "rollouts.sampling.min_p": 0.1},
            r"with teacher\.prompt, teacher\.top_k",
        ),
        ({"teacher.models": ["a"], "teacher.top_k": -1}, "top_k must be >= 0, got -1"),
        ({"teacher.models": ["a"], "trainer.routing_replay": True}, "routing_replay must be False with a teacher"),
        ({"teacher.models": ["a"], "trainer.kl_weight": 1.0, "trainer.kl.place": "reward"}, r"kl\.place must be loss"),
    ],
)
def test_what_a_teacher_cannot_score_exactly_is_refused_by_name(settings, words):
    fields = section_of(RunConfig).all_fields()
    values = {name: check_toml(fields[name].hint, value, name=name) for name, value in settings.items()}
    with pytest.raises(InvalidInputError, match=words):
        build(section_of(RunConfig), {"output": Path("run"), "loop.num_steps": 1, **values})


def test_a_teachers_prompt_is_for_rows_of_data(folder):
    given = {"output": folder / "run", "loop.num_steps": 1, "model": ModelName(folder / "policy")}
    given |= {"data.file": folder / "rows.jsonl", "teacher.models": (ModelName("a"),), "teacher.prompt": "hint"}
    without = {name: value for name, value in given.items() if name != "data.file"}
    for environment in ("a.py:Env", "verifiers:letters"):  # the second has agents, and rows of its own
        with pytest.raises(InvalidInputError, match=r"data\.file must be given with teacher\.prompt"):
            build(section_of(Config), {**without, "environment": environment})
    with pytest.raises(InvalidInputError, match=r"data\.system must be left out with teacher\.prompt"):
        build(section_of(Config), {**given, "data.system": "Add.", "environment": "a.py:Env"})
    with pytest.raises(InvalidInputError, match="rewards must hold at least one function"):
        build(section_of(Config), given)
