"""GRPO on a tiny image-text model: trajectories with images in prompts and tool replies, beside some of text only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from support.image_rows import Vision
from support.rows import build_samples, group, trajectory
from support.sequences import sampled
from support.vision import PAD, Family, picture
from unbroken.counters import Counters
from unbroken.images.decoder import encode_picture
from unbroken.images.placeholders import expand_placeholders
from unbroken.ledger.nodes import Origin, Position
from unbroken.ledger.tree import TokenTree
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.training.config import OptimizerConfig, TrainerConfig
from unbroken.training.objective.advantages import grpo_advantages
from unbroken.training.trainer import Trainer
from unbroken.types import TrainingSample, token_ids

pytest.importorskip("torchvision", reason="the image processors of transformers need it")

IMAGE = f"<|vision_start|>{PAD}<|vision_end|>"
PROMPT = f"<|im_start|>user\n{IMAGE}and {IMAGE}: which is larger?<|im_end|>\n<|im_start|>assistant\n"
TOOL_REPLY = f"\n<|im_start|>user\n<tool_response>\n{IMAGE}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
TEXT_PROMPT = "<|im_start|>user\nwhich is larger?<|im_end|>\n<|im_start|>assistant\n"
PICTURES = (picture(56, 56, seed=1), picture(112, 56, seed=2), picture(28, 84, seed=3))
REWARDED, OTHER = 41, 42


@pytest.mark.parametrize(("family", "num_steps"), [("qwen2_5_vl", 2), ("llava", 1)])
def test_grpo_moves_both_towers_and_raises_what_was_rewarded(tmp_path, family: Family, num_steps: int):
    vision = Vision.make(tmp_path, family)
    trainer = Trainer(
        vision.model(),
        TrainerConfig(optimizer=OptimizerConfig(learning_rate=1e-3), tokens_per_micro_batch=120),
        images=vision.images,
    )
    before = {name: weight.clone() for name, weight in trainer.named_weights()}
    preferred = [preference(vision, trainer)]
    for step in range(num_steps):
        rows = scored(build_samples(rollouts(vision, version=step), grpo_advantages, Counters()), trainer)
        assert [len(row.images) for row in rows] == [3, 3, 3, 3, 0, 0]
        stats = trainer.step(rows)
        assert np.isfinite([stats.loss, stats.grad_norm]).all()
        assert stats.grad_norm > 0
        assert stats.mismatch.max_abs < 1e-5
        assert stats.mean_ratio == pytest.approx(1, abs=1e-5)
        preferred.append(preference(vision, trainer))
    assert preferred == sorted(preferred)
    assert preferred[-1] > preferred[0] + 0.1
    for tower in ("vis", "language_model"):
        of_tower = {name: weight for name, weight in trainer.named_weights() if tower in name}
        num_changed = sum(not torch.equal(weight, before[name]) for name, weight in of_tower.items())
        assert num_changed > len(of_tower) / 3, tower  # LLaVA throws away what its tower's last layer makes


def rollouts(vision: Vision, *, version: int) -> list[TrajectoryGroup]:
    """A group that saw three images each, the third in a tool's reply, and a group without any."""
    seen = [
        replace(trajectory(reward), tree=tree_with_images(vision, answer, version))
        for reward, answer in ((1.0, REWARDED), (0.0, OTHER), (1.0, REWARDED), (0.0, OTHER))
    ]
    read = [
        trajectory(reward, prompt=vision.encode(TEXT_PROMPT), completion=sampled(answer, 5, versions=[version] * 2))
        for reward, answer in ((1.0, REWARDED), (0.0, OTHER))
    ]
    return [group(*seen), group(*read)]


def tree_with_images(vision: Vision, answer: int, version: int) -> TokenTree:
    tree = TokenTree()
    asked = add_given(tree, vision, PROMPT, PICTURES[:2], None)
    called = tree.add_sampled(sampled(answer, 7, 8, versions=[version] * 3), parent=asked)
    replied = add_given(tree, vision, TOOL_REPLY, PICTURES[2:], called)
    tree.add_sampled(sampled(answer, 9, versions=[version] * 2), parent=replied)
    return tree


def add_given(tree: TokenTree, vision: Vision, text: str, pictures: Sequence, parent: Position | None) -> Position:
    ids, spans = expand_placeholders(
        token_ids(vision.encode(text)), [encode_picture(one) for one in pictures], vision.images
    )
    return tree.add_given(ids, Origin.PROMPT if parent is None else Origin.BRIDGE, parent=parent, images=spans)


def scored(rows: Sequence[TrainingSample], trainer: Trainer) -> list[TrainingSample]:
    """The rows as if the trainer's weights had sampled them."""
    return [replace(row, rollout_logprobs=found) for row, found in zip(rows, trainer.logprobs(rows), strict=True)]


def preference(vision: Vision, trainer: Trainer) -> float:
    """How much likelier the rewarded answer to the images is than the other one, in natural logarithms."""
    asked = ["<|im_start|>user\n", *PICTURES[:2], ": which is larger?<|im_end|>\n<|im_start|>assistant\n"]
    found = trainer.logprobs([vision.row(*asked, (answer,)) for answer in (REWARDED, OTHER)])
    return float(found[0][-1] - found[1][-1])
