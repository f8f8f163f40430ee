"""The demo as a user runs it, with fewer steps: what it promises, checked on all of its own rollouts."""

import asyncio
import copy
import json
import random
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from unbroken.demo.model import build_model
from unbroken.demo.progress import Display
from unbroken.demo.run import DemoConfig, Stack, run_demo, tool_schemas
from unbroken.demo.task import LookupTask
from unbroken.demo.tokenizer import build_tokenizer
from unbroken.demo.warmup import Teacher, WarmUpConfig, warm_up
from unbroken.engines.transformers import TransformersEngine
from unbroken.ledger.export import export_samples
from unbroken.rendering.template import TemplateRenderer
from unbroken.training.config import LoopConfig, OptimizerConfig, TrainerConfig
from unbroken.training.loop import train
from unbroken.training.metrics.mismatch import mismatch_of_rows
from unbroken.training.metrics.writer import MetricsWriter
from unbroken.training.objective.advantages import grpo_advantages
from unbroken.training.objective.policy_gradient import PolicyGradient
from unbroken.training.trainer import Trainer
from unbroken.weights.in_process import InProcessPublisher

TOLERANCE = 1e-4
SHORT_WARM_UP = WarmUpConfig(num_demo_steps=150)


@pytest.fixture(scope="module")
def demo_model():
    """Tokenizer, tools and a model that has seen enough to make tool calls now and then."""
    tools = tool_schemas()
    tokenizer = build_tokenizer(tools)
    model = build_model(tokenizer, seed=3)
    warm_up(model, tokenizer, Teacher(tokenizer, tools), SHORT_WARM_UP, seed=3)
    return tokenizer, model


def largest_difference(trainer, rows):
    return mismatch_of_rows(rows, trainer.logprobs(rows)).max_abs


async def test_i4_trainer_and_engine_agree_on_every_rollout_of_every_step(demo_model, tmp_path):
    tokenizer, model = demo_model
    engine = TransformersEngine(copy.deepcopy(model))
    stack = Stack(engine=engine, renderer=TemplateRenderer(tokenizer))
    trainer = Trainer(
        copy.deepcopy(model),
        TrainerConfig(optimizer=OptimizerConfig(learning_rate=5e-4)),
        objective=PolicyGradient(lambda rewards: grpo_advantages(rewards + np.arange(len(rewards)))),
    )
    rng = random.Random(5)
    differences, versions = [], []

    async def collect_and_check():
        groups = await asyncio.gather(*(stack.group(LookupTask.draw(rng), 8) for _ in range(8)))
        rows = [row for g in groups for t in g.trajectories for row in export_samples(t.tree, advantage=1.0)]
        assert len(rows) == 64
        assert sum(len(t.turns) > 1 for g in groups for t in g.trajectories) > 10
        differences.append(largest_difference(trainer, rows))
        versions.append({int(v) for row in rows for v in row.policy_versions[row.sampled_mask]})
        return groups

    with MetricsWriter(tmp_path) as metrics:
        await train(
            collect_and_check,
            trainer=trainer,
            publisher=InProcessPublisher(engine),
            metrics=metrics,
            config=LoopConfig(num_steps=4),
        )
    await engine.close()
    assert max(differences) < TOLERANCE
    assert versions == [{0}, {1}, {2}, {3}]


async def test_i4_one_changed_id_is_seen(demo_model):
    tokenizer, model = demo_model
    engine = TransformersEngine(copy.deepcopy(model))
    stack = Stack(engine=engine, renderer=TemplateRenderer(tokenizer))
    trajectory = await stack.rollout(LookupTask.draw(random.Random(1)))
    await engine.close()
    trainer = Trainer(copy.deepcopy(model), TrainerConfig())
    (row,) = export_samples(trajectory.tree, advantage=1.0)
    assert largest_difference(trainer, [row]) < TOLERANCE
    last_sampled = int(np.flatnonzero(row.sampled_mask)[-1])
    for position in range(last_sampled + 1):
        ids = row.token_ids.copy()
        ids[position] = (ids[position] + 1) % len(tokenizer)
        assert largest_difference(trainer, [replace(row, token_ids=ids)]) > TOLERANCE, position


class Page(HTMLParser):
    """Collects what the report would load from elsewhere, and the classes of its tokens."""

    def __init__(self):
        super().__init__()
        self.loads, self.classes = [], set()

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.loads += [attributes[name] for name in ("src", "href") if name in attributes]
        self.classes.add(attributes.get("class"))


@pytest.mark.slow
def test_the_demo_writes_its_summary_and_a_report_that_opens_offline(tmp_path):
    config = DemoConfig(
        seed=11, output=tmp_path, num_steps=3, tasks_per_step=8, num_eval_tasks=32, warm_up=SHORT_WARM_UP
    )
    with Display() as display:
        result = asyncio.run(run_demo(config, display))
    display.show(result)

    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["steps"] == 3
    assert summary["rollouts"] == 3 * 8 * 8
    assert 0 <= summary["success_before"] <= 1
    assert 0 <= summary["success_after"] <= 1
    assert summary["seconds"] > 0
    assert summary["exact"]["max_abs"] < TOLERANCE
    assert summary["exact"]["share_off_20pct"] == 0
    assert summary["exact"]["share_differ"] == 0
    for style in ("canonical", "compact"):
        row = summary["retokenized"][style]
        assert {"share_differ", "k3", "share_off_20pct", "causes"} <= set(row)
        assert row["num_rollouts"] == 16
    assert summary["counters"]["bridges/derived"] > 0

    page = Page()
    page.feed((tmp_path / "report.html").read_text())
    assert page.loads == []
    assert {"prompt", "sampled", "bridge", "tool", "line"} <= page.classes
    steps = [json.loads(line) for line in (tmp_path / "metrics" / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [0, 1, 2]
