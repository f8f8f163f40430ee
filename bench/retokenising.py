"""What retokenised rows cost in learning, and what exact numerics is worth: the same task, model and sampler.

    python bench/retokenising.py --output runs/cost                                  # 5 seeds x 3 kinds on a CPU
    python bench/retokenising.py --shape 110m --device cuda --jobs 15 --shared-model --learning-rate 1e-4  # on GPUs
    python bench/retokenising.py --kinds bits,exact,bf16,bf16-tis --output runs/cost # numerics; finished runs are kept

The task is the demo's (`src/unbroken/demo/lookup.py`), every prompt asks for JSON with spaces, which is the chat
template's own style. All kinds begin with the same warmed-up weights, problems and seeds of sampling, and sample by
`TransformersEngine` with exact histories; only what the trainer gets differs:

    exact      the ids that were sampled
    template   the usual pipeline: decode, parse, render the whole conversation with the template, tokenise again
    compact    the same, where what renders calls writes JSON without spaces

The usual pipeline is a careful one (`unbroken.retokenising`): messages keep their white space, arguments are objects,
one that cannot be parsed stays text. The loss is on what stands between the assistant's header and the end of its turn,
both found in the new ids. Old logprobs are the trainer's own, computed before the step, for all kinds; the sampler's
logprobs are not in the loss, unless the kind ends in -tis: then an id that is still there has its own, and those of a
replaced stretch share the sum of those that are gone. k3 is that of `unbroken.retokenising.ratios`: such a stretch is
one ratio, and log-ratios are cut at 20.

Each run is a process. `steps.jsonl` of a run has a line for each step; `table.md` and `table.json` are written after
each run. Finished runs stay in `--output`, so the same command goes on. `differ` is the share of rows with other ids.
A run has collapsed if a step's mean reward falls below half of what five steps before it had.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import random
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from staleness import find_gpus, run_command
from unbroken.demo.config import LookupConfig, WarmUpConfig
from unbroken.demo.lookup import JsonStyle, LookupTask, lookup_env
from unbroken.demo.model import build_model, build_tokenizer, warm_up
from unbroken.engines.transformers import TransformersEngine
from unbroken.engines.transformers.config import TransformersEngineConfig
from unbroken.ledger.nodes import Origin, Position
from unbroken.ledger.tree import TokenTree, export_samples
from unbroken.rendering.template import TemplateRenderer
from unbroken.retokenising.comparison import Retokenised, TemplateTexts, compare_trajectory
from unbroken.retokenising.ratios import MAX_LOG_RATIO, pair_logprobs
from unbroken.rollout.limits import Limits
from unbroken.rollout.tool_env import ToolEnv
from unbroken.rollout.trajectory import Trajectory, TrajectoryGroup
from unbroken.runs.collector import Collector, Problems, Sampler
from unbroken.runs.config import EngineConfig, EngineKind, Precision, RolloutConfig
from unbroken.runs.recipe import Task
from unbroken.runs.run import open_run
from unbroken.training.config import LoopConfig, OldLogprobs, OptimizerConfig, TrainerConfig
from unbroken.training.groups import GroupSource
from unbroken.training.loop import open_steps
from unbroken.training.loss_config import Correction, CorrectionKind
from unbroken.training.metrics.mismatch import mismatch
from unbroken.training.metrics.writer import Metrics
from unbroken.training.observer import RunObserver, StepRollouts
from unbroken.training.trainer import Trainer
from unbroken.types import FinishReason, Logprobs, Numerics, SampledSequence, SamplingParams, VersionSpan
from unbroken.weights.folders import atomic_folder

PARTS = 8
"""Parts of a run whose mean rewards are in the table."""
WINDOW = 5
"""Steps of the mean that a later step is compared with, to say whether a run has collapsed."""
SAMPLER_COLUMNS = ("reward/mean", "rollout/num_sampled_tokens", "seconds/collect", "seconds/train", "seconds/step")
COLUMNS = (
    *SAMPLER_COLUMNS, "train/grad_norm", "train/clip_fraction", "train/corrected_fraction", "train/k3", "train/entropy",
    "train/num_rows", "mismatch/k3", "mismatch/max_abs",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What the trainer gets, and how it computes."""

    rows: str = "exact"
    """exact, template or compact."""
    correction: str = "none"
    precision: str | None = None
    """None: `--precision`."""
    numerics: str = "fast"


KINDS = {
    "exact": Kind(),
    "template": Kind(rows="template"),
    "compact": Kind(rows="compact"),
    "exact-tis": Kind(correction="tis"),
    "template-tis": Kind(rows="template", correction="tis"),
    "compact-tis": Kind(rows="compact", correction="tis"),
    "bits": Kind(numerics="exact"),
    "fp32": Kind(precision="float32"),
    "bf16": Kind(precision="bfloat16"),
    "bf16-tis": Kind(precision="bfloat16", correction="tis"),
}
SHAPES: dict[str, dict[str, int] | None] = {
    "demo": None,
    "tiny": {
        "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
        "intermediate_size": 512,
    },
    "110m": {
        "hidden_size": 1024, "num_hidden_layers": 7, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 64, "intermediate_size": 4096,
    },
}  # fmt: skip
"""None is the demo's own model of 0.1 million parameters."""


def write_model(folder: Path, arguments: argparse.Namespace, *, seed: int, learning_rate: float | None) -> None:
    """Warm up a model, and write it with `success.txt`, the share of tasks that it solves.

    The demo's model is warmed up as in the demo. A larger one is grown from it (`grow_model`), and trained on more
    demonstrations with all of its parameters. With `--spellings`, the tokenizer leaves out this share of its merges in
    these (BPE dropout), so that the model samples the same text in several spellings; what is written does not.
    """
    started = time.monotonic()
    tokenizer = build_tokenizer()
    model: Any = build_model(tokenizer, seed=seed)

    def show(stage: str) -> None:
        print(f"{stage} at {time.monotonic() - started:.0f} s", flush=True)

    shape = SHAPES[arguments.shape]
    dropout = arguments.spellings or None
    tokenizer.backend_tokenizer.model.dropout = dropout if shape is None else None
    if arguments.small_model is None:
        warm_up(model, tokenizer, WarmUpConfig(**json.loads(arguments.warm_up_options)), seed=seed, on_stage=show)
    else:
        model = AutoModelForCausalLM.from_pretrained(arguments.small_model, dtype=torch.float32)
    if shape is not None:
        model = grow_model(model, shape, seed=seed).to(arguments.device)
        print(f"{sum(each.numel() for each in model.parameters()) / 1e6:.1f} million parameters", flush=True)
        tokenizer.backend_tokenizer.model.dropout = dropout
        more = WarmUpConfig(
            learning_rate=learning_rate or 1e-4,
            max_drill_steps=0,
            num_demo_steps=arguments.grown_steps,
            demo_batch_size=32,
            decay_share=1.0,
        )
        is_cuda = arguments.device == "cuda"
        with torch.device(arguments.device), torch.autocast("cuda", torch.bfloat16) if is_cuda else nullcontext():
            warm_up(model, tokenizer, more, seed=seed + 1000, on_stage=show)
    tokenizer.backend_tokenizer.model.dropout = None
    with atomic_folder(folder) as part:
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
    success = asyncio.run(measure_success(model, tokenizer, arguments, seed=seed))
    print(f"warmed up in {time.monotonic() - started:.0f} s, solves {success:.3f}", flush=True)
    (folder / "success.txt").write_text(str(success))


def grow_model(small: Any, shape: Mapping[str, int], *, seed: int) -> Any:
    """Make a model of `shape`, with heads of 64, that computes what the demo's `small` one does, up to rounding.

    The small one's weights are a part of each matrix; the rest is random where it reads and zero where it writes
    (`o_proj`, `down_proj`, further layers and further columns of the embedding), and is trained from there. Norms
    divide by a mean over more numbers, so their weights are smaller. A rotary pair of a head of 16 has the frequency of
    every fourth one of a head of 64.
    """
    torch.manual_seed(seed)
    narrow = small.config
    width, size = narrow.hidden_size, narrow.head_dim
    changed = {
        **shape,
        "layer_types": ["full_attention"] * shape["num_hidden_layers"],
        "rms_norm_eps": narrow.rms_norm_eps * width / shape["hidden_size"],
        "initializer_range": 0.02,
    }
    config = Qwen3Config(**{**narrow.to_dict(), **changed})
    model = Qwen3ForCausalLM(config)
    stride = config.head_dim // size
    assert stride * size == config.head_dim, "rotary pairs of the small heads must be among those of the large ones"
    half = torch.arange(size // 2) * stride
    dims = torch.cat([half, half + config.head_dim // 2])
    scale = (width / config.hidden_size) ** 0.5

    def heads(number: int) -> torch.Tensor:
        rows: torch.Tensor = torch.arange(number)[:, None] * config.head_dim + dims
        return rows.flatten()

    queries, values = heads(narrow.num_attention_heads), heads(narrow.num_key_value_heads)
    inner = torch.arange(narrow.intermediate_size)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.fill_(1.0 if "q_norm" in name or "k_norm" in name else scale)
            elif any(part in name for part in ("o_proj", "down_proj", "embed_tokens")):
                weight.zero_()
        model.model.embed_tokens.weight[:, :width] = small.model.embed_tokens.weight
        model.model.norm.weight[:width] = small.model.norm.weight * scale
        for large, own in zip(model.model.layers, small.model.layers, strict=False):
            for name in ("input_layernorm", "post_attention_layernorm"):
                getattr(large, name).weight[:width] = getattr(own, name).weight * scale
            wide, own_attention = large.self_attn, own.self_attn
            wide.q_proj.weight[: narrow.num_attention_heads * config.head_dim] = 0.0
            wide.k_proj.weight[: narrow.num_key_value_heads * config.head_dim] = 0.0
            for name, rows in (("q_proj", queries), ("k_proj", values), ("v_proj", values)):
                getattr(wide, name).weight[rows, :width] = getattr(own_attention, name).weight
            wide.o_proj.weight[:width, queries] = own_attention.o_proj.weight
            # norms of a head, and the scores' divisor, which is the root of its size
            wide.q_norm.weight[dims] = own_attention.q_norm.weight
            wide.k_norm.weight[dims] = own_attention.k_norm.weight / stride**0.5
            for name in ("gate_proj", "up_proj"):
                getattr(large.mlp, name).weight[inner, :width] = getattr(own.mlp, name).weight
            large.mlp.down_proj.weight[:width, inner] = own.mlp.down_proj.weight
    return model


async def measure_success(model: Any, tokenizer: Any, arguments: argparse.Namespace, *, seed: int) -> float:
    """The share of tasks that a model solves."""
    engine = TransformersEngine(model)
    sampler = Sampler(
        engine=engine,
        renderer=TemplateRenderer(tokenizer),
        config=make_rollouts(arguments),
        problems=make_problems("warm-up", seed),
        seed=(seed, 2),
    )
    try:
        return await sample_success(sampler, arguments.num_problems)
    finally:
        await engine.close()


async def sample_success(sampler: Sampler, num_problems: int) -> float:
    """The mean reward of one rollout of each problem."""
    groups = await sampler.sample_groups(range(num_problems), size=1)
    return float(np.mean([each.reward or 0.0 for group in groups for each in group.trajectories]))


def make_rollouts(arguments: argparse.Namespace) -> RolloutConfig:
    """How rollouts are sampled."""
    return RolloutConfig(
        problems_per_step=arguments.problems,
        group_size=arguments.group_size,
        sampling=SamplingParams(max_tokens=40),
        limits=Limits(max_turns=6, timeout_s=300.0),
    )


def make_problems(name: str, seed: int) -> Problems:
    """Tasks whose prompts ask for JSON as the chat template writes it. Another `name` gives other tasks."""

    def draw(number: int) -> ToolEnv:
        return lookup_env(LookupTask.draw(random.Random(f"{seed} {name} {number}"), JsonStyle.CANONICAL))

    return Problems(env=draw)


class UsualPipeline:
    """Makes of each rollout what the usual pipeline trains on."""

    def __init__(self, tokenizer: Any, *, is_compact: bool) -> None:
        """`tokenizer` is the caller's own copy."""
        if is_compact:
            as_is = "'arguments': call.function.arguments} | tojson)"
            assert as_is in tokenizer.chat_template
            compact = as_is.replace("tojson", "tojson(separators=(',', ':'))")
            tokenizer.chat_template = tokenizer.chat_template.replace(as_is, compact)
        self._texts = TemplateTexts(tokenizer=tokenizer, template_renderer=TemplateRenderer(tokenizer))
        self._header, self._newline = self._texts.encode("<|im_start|>assistant"), self._texts.encode("\n")
        self._end = tokenizer.eos_token_id

    def compare(self, trajectory: Trajectory) -> Retokenised:
        """The rollout's ids and what becomes of them."""
        found = compare_trajectory(self._texts, trajectory)
        assert found is not None, "the demo's template refuses no conversation"
        return found

    def rebuild(self, trajectory: Trajectory, compared: Retokenised) -> Trajectory:
        """The rollout with a tree of the new ids, whose sampled nodes are those that the loss is on."""
        ids = compared.retokenised_ids.tolist()
        mask = self.find_assistant(ids)
        logprobs = align_logprobs(compared, len(ids))
        (version,) = trajectory.tree.sampled_versions
        temperature = trajectory.turns[0].sequence.temperature
        tree, start = TokenTree(), 0
        position: Position | None = None
        for is_sampled, run in itertools.groupby(mask):
            stop = start + len(list(run))
            if not is_sampled:
                origin = Origin.PROMPT if position is None else Origin.BRIDGE
                position = tree.add_given(ids[start:stop], origin, parent=position)
            else:
                assert position is not None, "a conversation begins with a prompt"
                sequence = SampledSequence(
                    completion_ids=np.array(ids[start:stop], np.int32),
                    rollout_logprobs=logprobs[start:stop],
                    finish_reason=FinishReason.STOP,
                    version_spans=(VersionSpan(start=0, stop=stop - start, policy_version=version),),
                    temperature=temperature,
                )
                position = tree.add_sampled(sequence, parent=position)
            start = stop
        return replace(trajectory, tree=tree)

    def find_assistant(self, ids: Sequence[int]) -> list[bool]:
        """Whether each id is in a turn of the assistant, its end included; so is one that is a part of the header too.

        Worked example: header `1 2`, newline 3, two newlines 4, end 9: of `5 1 2 3 7 9 5` the ids `7 9` are, and of
        `5 1 2 4 7 9 5` the ids `4 7 9`.
        """
        mask, size, position = [False] * len(ids), len(self._header), 0
        while position < len(ids):
            if list(ids[position : position + size]) != self._header:
                position += 1
                continue
            position += size
            position += list(ids[position : position + 1]) == self._newline
            while position < len(ids):
                mask[position] = True
                position += 1
                if ids[position - 1] == self._end:
                    break
        return mask


def align_logprobs(compared: Retokenised, num_ids: int) -> Logprobs:
    """[num_ids] the sampler's logprobs for the new ids, 0 where ids were only inserted.

    An id that is still there has its own; in a replaced stretch each new id has an equal part of the sampled ids' sum.
    """
    sampled = np.nan_to_num(np.asarray(compared.rollout_logprobs, np.float64))
    aligned = np.zeros(num_ids, np.float32)
    position = other = 0
    for gap in sorted((change.gap for change in compared.changes), key=lambda gap: gap.after):
        (start, stop), (first, last) = gap.before, gap.after
        aligned[other:first] = sampled[position:start]
        if last > first:
            aligned[first:last] = sampled[start:stop].sum() / (last - first)
        position, other = stop, last
    aligned[other:] = sampled[position:]
    return aligned


@dataclass(kw_only=True)
class ChangedRows(GroupSource):
    """The groups of another source, with the rows of the usual pipeline."""

    source: GroupSource
    pipeline: UsualPipeline
    compared: dict[str, Retokenised]
    """The comparison of each rollout of the step, by its id."""

    def __post_init__(self) -> None:
        self.groups_per_step = self.source.groups_per_step

    async def sample(self, number: int) -> TrajectoryGroup:
        """Sample a group, and change what is trained on."""
        group = await self.source.sample(number)
        return replace(group, trajectories=tuple(self._change(each) for each in group.trajectories))

    def _change(self, trajectory: Trajectory) -> Trajectory:
        compared = self.pipeline.compare(trajectory)
        self.compared[trajectory.trajectory_id] = compared
        return self.pipeline.rebuild(trajectory, compared)


def measure_step(
    trainer: Trainer, groups: Sequence[TrajectoryGroup], compared: Mapping[str, Retokenised]
) -> dict[str, float]:
    """The trainer, before its update, against the sampler: all rollouts of the step; and how many rows differ."""
    members = [each for group in groups for each in group.trajectories]
    rows = [export_samples(each.tree, advantage=0.0) for each in members]
    scored = iter(trainer.logprobs([row for of_member in rows for row in of_member]))
    pairs: list[tuple[float, float]] = []
    num_differ = 0
    for member, of_member in zip(members, rows, strict=True):
        one = compared.get(member.trajectory_id)
        num_differ += one is not None and one.differs
        for row in of_member:
            logprobs = next(scored).astype(np.float64)
            if one is None:
                mask = row.loss_mask
                pairs += zip(logprobs[mask].tolist(), row.rollout_logprobs[mask].tolist(), strict=True)
            else:  # a row ends with its last id in the loss
                rest = np.full(len(one.retokenised_ids) - len(logprobs), np.nan)
                pairs += pair_logprobs(one, np.append(logprobs, rest), [change.gap for change in one.changes])
    trained, sampled = np.asarray([pair for pair in pairs if np.isfinite(pair).all()]).T
    log_ratio = np.clip(trained - sampled, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    found = mismatch(sampled + log_ratio, sampled)
    return {
        "k3": found.k3, "off": found.share_off_20pct, "equal": found.equal_share, "max_abs": found.max_abs,
        "differ": num_differ / len(members),
    }  # fmt: skip


@dataclass(kw_only=True)
class Watch(RunObserver):
    """Writes a line for each step."""

    trainer: Trainer
    compared: dict[str, Retokenised]
    file: Path
    found: dict[str, float] = field(default_factory=dict)

    async def on_rollouts(self, rollouts: StepRollouts) -> None:
        """Score a step's rows before the update."""
        self.found = measure_step(self.trainer, rollouts.groups, self.compared) if rollouts.is_trained else {}
        self.compared.clear()

    def on_step(self, step: int, metrics: Metrics) -> None:
        """Write a step's line."""
        line = {"step": step, **self.found, **{name: metrics.get(name) for name in COLUMNS}}
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")


async def make_run(kind: Kind, seed: int, model: Path, output: Path, arguments: argparse.Namespace) -> None:
    """One run: evaluate, train, evaluate."""
    is_cpu = arguments.device == "cpu"
    precision = Precision(kind.precision or arguments.precision)
    options = tuple(arguments.engine_options.split())
    config = LookupConfig(
        output=output,
        seed=seed,
        precision=precision,
        engine=EngineConfig(
            kind=EngineKind(arguments.engine),
            options=options,
            embedded=TransformersEngineConfig(max_batch=arguments.problems * arguments.group_size),
        ),
        rollouts=make_rollouts(arguments),
        trainer=TrainerConfig(
            # Retokenised rows have the logprobs of other ids: their mismatch is what is measured.
            max_policy_k3=None if kind.rows == "exact" else math.inf,
            optimizer=OptimizerConfig(
                learning_rate=arguments.learning_rate, betas=(0.9, 0.99), warmup_updates=arguments.warmup_updates
            ),
            num_minibatches=arguments.minibatches,
            tokens_per_micro_batch=arguments.micro_batch,
            old_logprobs=OldLogprobs.RECOMPUTE,
            correction=Correction(kind=CorrectionKind(kind.correction)),
            numerics=Numerics(kind.numerics),
            seed=seed,
        ),
        loop=LoopConfig(num_steps=arguments.num_steps, max_empty_steps=None),
    )
    train_on, evaluate_on = make_problems("train", seed), make_problems("evaluation", seed)
    accelerator = Accelerator(cpu=is_cpu, mixed_precision="bf16" if precision is Precision.BFLOAT16 else "no")
    begun = time.monotonic()
    task = Task(model=model, train_on=train_on, evaluate_on=evaluate_on)
    async with open_run(config, task, accelerator=accelerator) as run:
        source: GroupSource = Collector(run.sampler)
        compared: dict[str, Retokenised] = {}
        if kind.rows != "exact":
            tokenizer = AutoTokenizer.from_pretrained(model)
            pipeline = UsualPipeline(tokenizer, is_compact=kind.rows == "compact")
            source = ChangedRows(source=source, pipeline=pipeline, compared=compared)

        watch = Watch(trainer=run.trainer, compared=compared, file=output / "steps.jsonl")
        watch.before_update = run.engine.before_update
        sampler = replace(run.sampler, problems=evaluate_on, seed=(seed, 1))
        before = await sample_success(sampler, arguments.num_problems)
        print(f"success before: {before:.3f}, {time.monotonic() - begun:.0f} s", flush=True)
        async with open_steps(
            source,
            trainer=run.trainer,
            publisher=run.engine.publisher,
            metrics=None,
            config=config.chosen_loop,
            observer=watch,
        ) as steps:
            await steps.run()
        after = await sample_success(sampler, arguments.num_problems)
    result = {"before": before, "after": after, "seconds": time.monotonic() - begun, "rewards": read_rewards(output)}
    (output / "result.json").write_text(json.dumps(result))


def read_steps(output: Path) -> list[dict[str, Any]]:
    """The lines that a run has written so far."""
    path = output / "steps.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def read_rewards(output: Path) -> list[float]:
    """The mean reward of each step."""
    return [step["reward/mean"] or 0.0 for step in read_steps(output)]


def has_collapsed(rewards: Sequence[float]) -> bool:
    """Whether a step's mean reward falls below half of the mean of `WINDOW` steps before it."""
    means = np.convolve(rewards, np.full(WINDOW, 1 / WINDOW), mode="valid")[:-1]
    return len(rewards) > WINDOW and bool((np.asarray(rewards[WINDOW:]) < np.maximum.accumulate(means) / 2).any())


def summarize(name: str, outputs: Sequence[Path]) -> dict[str, Any]:
    """The numbers of the runs of one kind, over its seeds; those that have not finished count as far as they came."""
    found = [(read_steps(each), each / "result.json") for each in outputs]
    runs = [(steps, json.loads(path.read_text()) if path.exists() else {}) for steps, path in found if steps]
    num_steps = min((len(steps) for steps, _ in runs), default=0)

    def curve(key: str) -> list[list[float | None]]:
        """[runs][steps], None where a step has no row to train."""
        return [[step.get(key) for step in steps[:num_steps]] for steps, _ in runs]

    return {
        "kind": name,
        "num_runs": len(runs),
        "num_steps": num_steps,
        "before": [result.get("before") for _, result in runs],
        "after": [result.get("after") for _, result in runs],
        "collapsed": sum(has_collapsed(read_rewards(each)) for each in outputs),
        "curves": {key: curve(key) for key in ("k3", "off", "equal", "max_abs", "differ", *COLUMNS)},
    }


def write_table(arguments: argparse.Namespace) -> str:
    """Write `table.json` with the curves of all runs, and `table.md`, and return the latter."""
    names = arguments.kinds.split(",")
    rows = [summarize(name, [get_output(name, seed, arguments) for seed in arguments.seeds]) for name in names]
    rows = [row for row in rows if row["num_steps"]]
    (arguments.output / "table.json").write_text(json.dumps(rows))
    lines = [
        "| rows | runs, steps | success before -> after (each seed) | mean | mean reward of each eighth | "
        "rows that differ | k3, median | ratios off > 20 % | gradient norm: mean, largest | clipped | collapsed |",
        "|---" * 11 + "|",
        *map(make_line, rows),
    ]
    text = "\n".join(lines) + "\n"
    (arguments.output / "table.md").write_text(text)
    return text


def make_line(row: Mapping[str, Any]) -> str:
    """The line of one kind; means are over runs and the steps that trained a row."""
    curves = {key: np.asarray(values, np.float64) for key, values in row["curves"].items()}
    curves = {key: np.where(np.isnan(curves["k3"]), np.nan, values) for key, values in curves.items()} | {
        "reward": curves["reward/mean"]
    }
    after = [each for each in row["after"] if each is not None]
    pairs = zip(row["before"], row["after"], strict=True)
    ends = ["-" if each is None else f"{before:.2f} -> {each:.3f}" for before, each in pairs]
    error = np.std(after, ddof=1) / len(after) ** 0.5 if len(after) > 1 else float("nan")
    eighths = [np.mean(part) for part in np.array_split(curves["reward"], PARTS, axis=1) if part.size]
    cells = [
        row["kind"],
        f"{row['num_runs']}, {row['num_steps']}",
        ", ".join(ends),
        f"{np.mean(after):.3f} ± {error:.3f}" if after else "-",
        " ".join(f"{each:.2f}" for each in eighths),
        f"{np.nanmean(curves['differ']):.1%}",
        f"{np.nanmedian(curves['k3']):.1e}",
        f"{np.nanmean(curves['off']):.2%}",
        f"{np.nanmean(curves['train/grad_norm']):.2g}, {np.nanmax(curves['train/grad_norm']):.2g}",
        f"{np.nanmean(curves['train/clip_fraction']):.2%}",
        f"{row['collapsed']} of {row['num_runs']}",
    ]
    return f"| {' | '.join(cells)} |"


def get_output(name: str, seed: int, arguments: argparse.Namespace) -> Path:
    """The folder of a run."""
    folder: Path = arguments.output / f"{name}-{seed}"
    return folder


def get_model(seed: int, arguments: argparse.Namespace) -> Path:
    """The folder of a seed's model."""
    folder: Path = arguments.output / ("model" if arguments.shared_model else f"model-{seed}")
    return folder


def start_part(part: str, log: Path, arguments: argparse.Namespace, deadline: float | None, *, number: int = 0) -> bool:
    """Run a part of this script in a process of its own, on the GPU of its number; whether it ended well."""
    command = [sys.executable, __file__, *sys.argv[1:], "--part", part]
    gpus = find_gpus() if arguments.device == "cuda" else [""]
    return run_command(command, log, deadline=deadline, gpus=gpus[number % len(gpus)])


def do_part(part: str, arguments: argparse.Namespace) -> None:
    """A part of the script: `model SEED FOLDER [RATE]` or `run KIND SEED`."""
    torch.set_num_threads(1)
    if part.startswith("model"):
        _, seed, folder, *rate = part.split()
        rates = [float(each) for each in rate]
        write_model(arguments.output / folder, arguments, seed=int(seed), learning_rate=rates[0] if rates else None)
        return
    _, name, seed = part.split()
    output = get_output(name, int(seed), arguments)
    asyncio.run(make_run(KINDS[name], int(seed), get_model(int(seed), arguments), output, arguments))


def warm_up_models(arguments: argparse.Namespace, deadline: float | None) -> None:
    """Write the models that are not there. With several learning rates, side by side, the best one is taken."""
    for seed in arguments.seeds[:1] if arguments.shared_model else arguments.seeds:
        model = get_model(seed, arguments)
        rates = arguments.warm_up_rates.split(",")
        if not model.exists():
            folders = {rate: model.with_name(f"{model.name}-at-{rate or 'default'}") for rate in rates}

            def warm_up(rate: str, seed: int = seed, folders: dict[str, Path] = folders) -> float:
                folder = folders[rate]
                part = f"model {seed} {folder.name} {rate}"
                is_done = start_part(part, folder.with_name(f"{folder.name}.log"), arguments, deadline)
                return float((folder / "success.txt").read_text()) if is_done else -1.0

            with ThreadPoolExecutor(len(rates)) as pool:
                success = dict(zip(rates, pool.map(warm_up, rates), strict=True))
            print(f"warm-up of seed {seed}, success by learning rate: {success}", flush=True)
            best = max(rates, key=lambda rate: success[rate])
            if success[best] < 0:
                raise SystemExit(f"the warm-up of seed {seed} failed, see {folders[best]}.log")
            folders[best].rename(model)


def make_case(case: tuple[int, int, str], arguments: argparse.Namespace, deadline: float | None) -> None:
    """Make one run, unless it has a result."""
    number, seed, name = case
    output = get_output(name, seed, arguments)
    if (output / "result.json").exists():
        return
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    is_done = start_part(f"run {name} {seed}", output / "log.txt", arguments, deadline, number=number)
    steps = read_steps(output)
    last = np.mean(read_rewards(output)[-WINDOW:]) if steps else float("nan")
    print(
        f"{output.name}: {'done' if is_done else 'STOPPED'} after {len(steps)} steps, last rewards {last:.2f}",
        flush=True,
    )


def main() -> None:
    """Make all runs, one seed after the other, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default="exact,template,compact", help=f"of {', '.join(KINDS)}")
    parser.add_argument("--seeds", type=lambda text: [int(part) for part in text.split(",")], default=[0, 1, 2, 3, 4])
    parser.add_argument("--shape", choices=list(SHAPES), default="demo")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--precision", choices=["float32", "bfloat16"], default="float32", help="of the trainer's layers"
    )
    parser.add_argument("--engine", choices=["embedded", "colocated"], default="embedded")
    parser.add_argument("--engine-options", default="", help="of vLLM, with --engine colocated")
    parser.add_argument("--num-steps", type=int, default=40)
    parser.add_argument("--problems", type=int, default=16, help="of a step")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--minibatches", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--warmup-updates", type=int, default=10)
    parser.add_argument("--warm-up-options", default="{}", help="of `WarmUpConfig`, as JSON")
    parser.add_argument("--warm-up-rates", default="", help="learning rates of these to try, side by side")
    parser.add_argument("--small-model", type=Path, help="a warmed-up model of the demo's shape, from another run")
    parser.add_argument("--grown-steps", type=int, default=200, help="of the warm-up, after a larger model is grown")
    parser.add_argument("--micro-batch", type=int, help="ids of a pass of the trainer; none: as many as fit")
    parser.add_argument("--spellings", type=float, default=0.0, help="share of merges left out in demonstrations")
    parser.add_argument("--shared-model", action="store_true", help="one warm-up for all seeds")
    parser.add_argument("--num-problems", type=int, default=256, help="of an evaluation")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--limit-s", type=float, help="end what is not done after so many seconds")
    parser.add_argument("--output", type=Path, default=Path("runs/retokenising"))
    parser.add_argument("--part", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.output = arguments.output.resolve()
    arguments.output.mkdir(parents=True, exist_ok=True)
    if arguments.part:
        do_part(arguments.part, arguments)
        return
    deadline = None if arguments.limit_s is None else time.monotonic() + arguments.limit_s
    warm_up_models(arguments, deadline)
    names = arguments.kinds.split(",")
    cases = [(number, *case) for number, case in enumerate(itertools.product(arguments.seeds, names))]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        runs = [pool.submit(partial(make_case, arguments=arguments, deadline=deadline), case) for case in cases]
        for run in as_completed(runs):
            run.result()
            write_table(arguments)
    print(write_table(arguments), end="")


if __name__ == "__main__":
    main()
