"""The demo as a user runs it, with fewer steps: what it promises, checked on all of its own rollouts."""

import asyncio
import copy
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from support.browser import CHROMIUM, Browser
from support.loops import Callbacks
from support.pages import Page
from support.steps import train
from unbroken.demo.config import LookupConfig, WarmUpConfig
from unbroken.demo.lookup import lookup_problems
from unbroken.demo.report import make_report
from unbroken.demo.run import run_demo
from unbroken.engines.transformers import TransformersEngine
from unbroken.errors import InvalidInputError
from unbroken.ledger.tree import export_samples
from unbroken.rendering.loader import load_tokenizer
from unbroken.rendering.template import TemplateRenderer
from unbroken.retokenising.changes import Cause
from unbroken.runs.collector import Collector, Sampler
from unbroken.runs.config import EvaluationConfig
from unbroken.training.config import LoopConfig, OptimizerConfig, TrainerConfig
from unbroken.training.metrics.mismatch import mismatch_of_rows
from unbroken.training.metrics.writer import MetricsWriter
from unbroken.training.objective.advantages import grpo_advantages
from unbroken.training.objective.policy_gradient import PolicyGradient
from unbroken.training.trainer import Trainer
from unbroken.weights.base import InProcessPublisher

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The settings of a short demo that has run."""
    defaults = LookupConfig()
    config = replace(
        defaults,
        seed=11,
        output=tmp_path_factory.mktemp("demo") / "demo",
        warm_up=WarmUpConfig(num_demo_steps=150),
        rollouts=replace(defaults.rollouts, problems_per_step=4),
        loop=replace(defaults.loop, num_steps=3),
        evaluation=EvaluationConfig(num_problems=16),
    )
    assert "exact (ours)" in make_report(asyncio.run(run_demo(config))).to_text()
    return config


@pytest.fixture(scope="module")
def demo_model(demo):
    """The demo's tokenizer, and the model that it starts from, which makes tool calls now and then."""
    folder = demo.output / "model"
    return load_tokenizer(folder), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def demo_sampler(engine, tokenizer):
    return Sampler(
        engine=engine,
        renderer=TemplateRenderer(tokenizer),
        config=LookupConfig().rollouts,
        problems=lookup_problems("train", 5),
        seed=(5,),
    )


def largest_difference(trainer, rows):
    return mismatch_of_rows(rows, trainer.logprobs(rows)).max_abs


async def test_i4_trainer_and_engine_agree_on_every_rollout_of_every_step(demo_model, tmp_path):
    tokenizer, model = demo_model
    engine = TransformersEngine(copy.deepcopy(model))
    sampler = demo_sampler(engine, tokenizer)
    trainer = Trainer(
        copy.deepcopy(model),
        TrainerConfig(optimizer=OptimizerConfig(learning_rate=5e-4)),
        objective=PolicyGradient(lambda rewards: grpo_advantages(rewards + np.arange(len(rewards)))),
    )
    differences, versions = [], []

    async def check(rollouts):
        groups = rollouts.groups
        rows = [row for g in groups for t in g.trajectories for row in export_samples(t.tree, advantage=1.0)]
        assert len(rows) == 64
        assert sum(len(t.turns) > 1 for g in groups for t in g.trajectories) > 10
        differences.append(largest_difference(trainer, rows))
        versions.append({int(v) for row in rows for v in row.policy_versions[row.sampled_mask]})

    with MetricsWriter(tmp_path) as metrics:
        await train(
            Collector(replace(sampler, config=replace(sampler.config, problems_per_step=8))),
            trainer=trainer,
            publisher=InProcessPublisher(engine),
            metrics=metrics,
            config=LoopConfig(num_steps=4),
            observer=Callbacks(on_rollouts=check),
        )
    await engine.close()
    assert max(differences) < TOLERANCE
    assert versions == [{0}, {1}, {2}, {3}]


async def test_i4_one_changed_id_is_seen(demo_model):
    tokenizer, model = demo_model
    engine = TransformersEngine(copy.deepcopy(model))
    group = await demo_sampler(engine, tokenizer).sample_group(0, size=1)
    await engine.close()
    (trajectory,) = group.trajectories
    trainer = Trainer(copy.deepcopy(model), TrainerConfig())
    (row,) = export_samples(trajectory.tree, advantage=1.0)
    assert largest_difference(trainer, [row]) < TOLERANCE
    last_sampled = int(np.flatnonzero(row.sampled_mask)[-1])
    for position in range(last_sampled + 1):
        ids = row.token_ids.copy()
        ids[position] = (ids[position] + 1) % len(tokenizer)
        assert largest_difference(trainer, [replace(row, token_ids=ids)]) > TOLERANCE, position


def test_the_demo_writes_its_summary_and_a_report_that_opens_offline(demo):
    summary = json.loads((demo.output / "summary.json").read_text())
    assert summary["steps"] == 3
    assert summary["rollouts"] == 3 * 4 * 8
    assert 0 <= summary["success_before"] <= 1
    assert 0 <= summary["success_after"] <= 1
    assert summary["seconds"] > 0
    assert summary["exact"]["max_abs"] < TOLERANCE
    assert summary["exact"]["share_off_20pct"] == 0
    assert summary["exact"]["share_differ"] == 0
    for style in ("canonical", "compact"):
        row = summary["retokenized"][style]
        assert {"share_differ", "k3", "share_off_20pct", "causes"} <= set(row)
        assert row["num_rollouts"] == 8
        assert set(row["causes"]) == {cause.value for cause in Cause}
    assert summary["counters"]["bridges/derived"] > 0

    page = Page((demo.output / "report.html").read_text())
    assert page.loads == []
    curves, example, usual = page.data
    assert [len(curve["points"]) for curve in curves] == [3, 1, 1]
    assert {token["origin"] for token in example} == {"prompt", "sampled", "bridge", "message"}
    assert any(token["note"] for token in example)
    assert usual
    steps = [json.loads(line) for line in (demo.output / "metrics" / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [0, 1, 2]


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
def test_the_report_opens_in_a_browser_without_a_network(demo, browser: Browser):
    browser.open((demo.output / "report.html").as_uri(), width=400)
    browser.wait("document.querySelectorAll('.grid .cell').length > 20")
    assert browser.run("document.querySelectorAll('.curve polyline').length") == 1
    assert browser.run("document.querySelectorAll('.curve circle').length") == 2
    assert browser.run("document.documentElement.scrollWidth") <= 400


def test_a_second_demo_replaces_the_first_and_keeps_other_files(tmp_path):
    short = LookupConfig(
        output=tmp_path,
        warm_up=WarmUpConfig(max_drill_steps=1, num_demo_steps=1),
        rollouts=replace(LookupConfig().rollouts, problems_per_step=1),
        loop=LoopConfig(num_steps=2),
        evaluation=EvaluationConfig(num_problems=2),
    )
    asyncio.run(run_demo(short))
    thesis = tmp_path / "thesis.tex"
    thesis.write_text("")
    asyncio.run(run_demo(replace(short, seed=12, loop=LoopConfig(num_steps=1))))
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 1
    assert thesis.exists()


def test_a_demo_does_not_touch_a_folder_of_other_files(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(InvalidInputError, match="output must be an empty folder or that of a run"):
        asyncio.run(run_demo(LookupConfig(output=tmp_path)))
    assert (tmp_path / "thesis.tex").exists()
