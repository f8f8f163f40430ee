"""A training step with shared prefixes, against the same rows computed whole: FLOPs, seconds and GiB.

    OMP_NUM_THREADS=1 python bench/trainer.py --prefixes                                  tiny, on a CPU
    python bench/trainer.py --prefixes --device cuda --limit-s 400                        0.6B, on a GPU

    siblings   one group of 8 that begin with the same prompt
    agent      a tree of 16 branches: the history that goes on is rendered without the reasoning of each turn
    search     a tree of 16 branches: each leaves another one at a turn in its second half

A Qwen3 with random weights, bfloat16 autocast on a GPU. Rounds alternate. FLOPs are those of the products, counted by
hand: three times 2 for each weight and id, for each loss token and entry of the vocabulary, and for each attended pair.
Gradients of a first step are compared with those of whole rows, relative to their norm; "padded" are the same rows laid
out otherwise, which shows what rounding alone does. Updates are made, and are too small to change a weight.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator

from packing import SHAPES, make_model
from unbroken.errors import InvalidInputError
from unbroken.ledger.export import export_samples
from unbroken.ledger.nodes import Origin, Position
from unbroken.ledger.tree import TokenTree
from unbroken.training.config import OptimizerConfig, Packing, SharedPrefixes, TrainerConfig
from unbroken.training.metrics.stats import StepStats
from unbroken.training.model import tree_attention
from unbroken.training.model.lanes import MAX_PASS_IDS
from unbroken.training.model.tree import merge_rows
from unbroken.training.trainer import Trainer
from unbroken.types import FinishReason, SampledSequence, TrainingSample, VersionSpan, token_ids

NUM_SIBLINGS, NUM_BRANCHES = 8, 16
LONGEST = 32_768
WAYS: dict[str, dict[str, Any]] = {
    "rows": {"shared_prefixes": SharedPrefixes.NEVER},
    "padded": {"shared_prefixes": SharedPrefixes.NEVER, "packing": Packing.NEVER},
    "shared": {"shared_prefixes": SharedPrefixes.ALWAYS},
}
TOO_SMALL = 1e-30
"""A learning rate that changes no weight, so that gradients can be compared at any step."""
TIMED = ("rows", "shared")


class TreeMaker:
    """Makes trees of random ids, whose lengths are those of the H200's scenarios divided by `scale`."""

    def __init__(self, vocab_size: int, scale: int) -> None:
        self._vocab_size = vocab_size
        self._scale = scale
        self._rng = np.random.default_rng(0)

    def make_siblings(self) -> list[TokenTree]:
        """A prompt of 4,096 ids and completions of 512."""
        prompt = self._draw(4096)
        trees = []
        for _ in range(NUM_SIBLINGS):
            tree = TokenTree()
            self._sample(tree, tree.add_given(prompt, Origin.PROMPT, parent=None), 512)
            trees.append(tree)
        return trees

    def make_agent(self) -> list[TokenTree]:
        """A prompt of 2,200 ids and 16 turns: 240 sampled ids, of which, with a tool's result, 200 stay."""
        tree = TokenTree()
        history = tree.add_given(self._draw(2200), Origin.PROMPT, parent=None)
        for _ in range(NUM_BRANCHES):
            self._sample(tree, history, 240)
            history = tree.add_given(self._draw(200), Origin.BRIDGE, parent=history)
        return [tree]

    def make_search(self) -> list[TokenTree]:
        """A prompt of 1,600 ids and branches of 10 turns of 60 sampled and 190 given ids."""
        tree = TokenTree()
        turns = [[tree.add_given(self._draw(1600), Origin.PROMPT, parent=None)]]
        self._go_on(tree, turns[0])
        while len(turns) < NUM_BRANCHES:
            other = turns[int(self._rng.integers(len(turns)))]
            turns.append(other[: int(self._rng.integers(5, 10)) + 1])
            self._go_on(tree, turns[-1])
        return [tree]

    def _go_on(self, tree: TokenTree, ends: list[Position]) -> None:
        """Add turns to a branch, of which `ends` has the end of each, until it has ten."""
        while len(ends) <= 10:
            end = self._sample(tree, ends[-1], 60)
            ends.append(tree.add_given(self._draw(190), Origin.BRIDGE, parent=end) if len(ends) < 10 else end)

    def _draw(self, length: int) -> Any:
        return token_ids(self._rng.integers(self._vocab_size, size=max(1, length // self._scale)))

    def _sample(self, tree: TokenTree, parent: Position, length: int) -> Position:
        ids = self._draw(length)
        sampled = SampledSequence(
            completion_ids=ids,
            rollout_logprobs=np.full(len(ids), -np.log(self._vocab_size), dtype=np.float32),
            finish_reason=FinishReason.STOP,
            version_spans=(VersionSpan(start=0, stop=len(ids), policy_version=0),),
        )
        return tree.add_sampled(sampled, parent=parent)


def add_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of this measurement."""
    parser.add_argument("--prefixes", action="store_true", help="measure shared prefixes instead (bench/prefixes.py)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--shape", choices=SHAPES, help="default: tiny on a CPU, 0.6b on a GPU")
    parser.add_argument("--scenarios", nargs="+", choices=["siblings", "agent", "search"])
    parser.add_argument("--scale", type=int, help="divides all lengths; default: 16 on a CPU, 1 on a GPU")
    parser.add_argument("--tokens-per-pass", type=int, help="default: the trainer's choice")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--static-kernel", action="store_true", help="compile FlexAttention for each length")
    parser.add_argument("--limit-s", type=float, default=600, help="no round begins after this")


def measure(arguments: argparse.Namespace) -> None:
    """Print a line for each step, and a table for each scenario, as soon as they are measured."""
    started = time.perf_counter()
    tree_attention.IS_DYNAMIC = False if arguments.static_kernel else None
    on_gpu = arguments.device == "cuda"
    shape = arguments.shape or ("0.6b" if on_gpu else "tiny")
    scale = arguments.scale or (1 if on_gpu else 16)
    accelerator = Accelerator(cpu=not on_gpu, mixed_precision="bf16" if on_gpu else "no")
    maker = TreeMaker(SHAPES[shape]["vocab_size"], scale)
    scenarios: dict[str, Callable[[], list[TokenTree]]] = {
        "siblings": maker.make_siblings,
        "agent": maker.make_agent,
        "search": maker.make_search,
    }
    print(f"{shape} on {accelerator.device}, torch {torch.__version__}, lengths / {scale}", flush=True)
    trainers = {}
    for way, changes in WAYS.items():
        began = time.perf_counter()
        config = TrainerConfig(
            **changes,
            optimizer=OptimizerConfig(learning_rate=TOO_SMALL),
            tokens_per_micro_batch=arguments.tokens_per_pass,
            gradient_checkpointing=arguments.gradient_checkpointing,
        )
        trainers[way] = make_trainer(shape, config, accelerator)
        print(f"trainer of {way}: {time.perf_counter() - began:.1f} s to make", flush=True)
    policy = trainers["shared"].backend.policy
    print(f"trees attend by {policy.tree_mask}, rows are {policy.layout}", flush=True)
    for name in arguments.scenarios or scenarios:
        rows = [row for tree in scenarios[name]() for row in export_samples(tree, 1.0)]
        print_sizes(name, rows)
        compare_gradients(trainers, rows)
        rounds, seconds = [], 0.0
        for number in range(arguments.rounds):
            rounds.append({way: make_step(trainers[way], rows, f"round {number} {way}") for way in TIMED})
            if (seconds := time.perf_counter() - started) > arguments.limit_s:
                break
        print_table(trainers, rows, rounds, shape)
        if seconds > arguments.limit_s:
            print(f"ended after {seconds:.0f} s (--limit-s)", flush=True)
            return


def make_trainer(shape: str, config: TrainerConfig, accelerator: Accelerator) -> Trainer:
    """A trainer; if the compiler fails for lanes of any length, with a kernel for each length."""
    try:
        return _prove(Trainer(make_model(shape, LONGEST), config, accelerator=accelerator))
    except InvalidInputError as error:
        if tree_attention.IS_DYNAMIC is False:
            raise
        print(f"{error}\nagain with --static-kernel", flush=True)
        tree_attention.IS_DYNAMIC = False
        tree_attention._get_kernel.cache_clear()
        torch.compiler.reset()
        return _prove(Trainer(make_model(shape, LONGEST), config, accelerator=accelerator))


def _prove(trainer: Trainer) -> Trainer:
    """What the first step would begin with."""
    with trainer.backend.computing():
        trainer.backend.measure()
    return trainer


class Measured(NamedTuple):
    """One step."""

    stats: StepStats
    peak_bytes: int
    """Beyond what the trainers hold between steps; 0 on a CPU."""


def make_step(trainer: Trainer, rows: Sequence[TrainingSample], name: str) -> Measured:
    """Make a step, and print it."""
    on_gpu = torch.cuda.is_available()
    before = torch.cuda.memory_allocated() if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    stats = trainer.step(rows)
    peak = torch.cuda.max_memory_allocated() - before if on_gpu else 0
    print(f"  {name:<16}{stats.seconds:>9.3f} s    gradient norm {stats.grad_norm:.5f}", flush=True)
    return Measured(stats, peak)


def print_sizes(name: str, rows: Sequence[TrainingSample]) -> None:
    """How many ids a scenario has, and how many without repetitions."""
    num_ids = sum(len(row.token_ids) for row in rows)
    num_nodes = len(merge_rows([row.token_ids for row in rows]).token_ids_T)
    num_trained = sum(int(row.loss_mask.sum()) for row in rows)
    print(
        f"\n{name}: {len(rows)} rows of {num_ids} ids, {num_nodes} in a tree ({num_ids / num_nodes:.1f} times fewer), "
        f"{num_trained} trained",
        flush=True,
    )


def compare_gradients(trainers: dict[str, Trainer], rows: Sequence[TrainingSample]) -> None:
    """Warm up, and compare the gradients of this step; all have the same weights, which no step changes."""
    expected: list[torch.Tensor] = []
    for way, trainer in trainers.items():
        found = step_and_keep_gradient(trainer, rows, f"warm-up {way}")
        expected = expected or found
        whole = sum(float(each.double().square().sum()) for each in expected) ** 0.5
        off = sum(float((a - b).double().square().sum()) for a, b in zip(found, expected, strict=True)) ** 0.5
        print(f"    gradient differs by {off / whole:.2e} of its norm from that of {next(iter(trainers))}", flush=True)


def step_and_keep_gradient(trainer: Trainer, rows: Sequence[TrainingSample], name: str) -> list[torch.Tensor]:
    """Make a step, and copy the gradient that it applies to the CPU."""
    kept: list[torch.Tensor] = []

    def keep(optimizer: Any, _arguments: Any, _options: Any) -> None:
        kept.extend(p.grad.detach().cpu() for group in optimizer.param_groups for p in group["params"])

    hook = trainer.backend.optimizer.optimizer.register_step_pre_hook(keep)
    try:
        make_step(trainer, rows, name)
        return kept
    finally:
        hook.remove()


def print_table(
    trainers: dict[str, Trainer], rows: Sequence[TrainingSample], rounds: Sequence[dict[str, Measured]], shape: str
) -> None:
    """The medians of the rounds."""
    print("way       passes    TFLOPs   times   seconds   times   row ids/s   shared   GiB of a step")
    num_ids = sum(len(row.token_ids) for row in rows)
    seconds = {way: statistics.median(taken[way].stats.seconds for taken in rounds) for way in TIMED}
    counted = {way: count_flops(trainers[way], rows, shape) for way in TIMED}
    for way in TIMED:
        num_passes, flops = counted[way]
        last = rounds[-1][way]
        print(
            f"{way:<8}{num_passes:>8}{flops / 1e12:>10.3f}{counted['rows'][1] / flops:>8.2f}{seconds[way]:>10.3f}"
            f"{seconds['rows'] / seconds[way]:>8.2f}{num_ids / seconds[way]:>12,.0f}{last.stats.shared_share:>9.1%}"
            f"{last.peak_bytes / 2**30:>9.2f}",
            flush=True,
        )
    print(f"auto {'shares' if would_share(trainers['shared'], rows) else 'does not share'}", flush=True)


def would_share(trainer: Trainer, rows: Sequence[TrainingSample]) -> bool:
    """Whether `SharedPrefixes.AUTO` would."""
    policy = trainer.backend.policy
    policy._shared_prefixes = SharedPrefixes.AUTO
    passes = policy.plan_rows([row.token_ids for row in rows], trainer.backend._pass_size or MAX_PASS_IDS)
    policy._shared_prefixes = SharedPrefixes.ALWAYS
    return any(planned.is_tree for planned in passes)


def count_flops(trainer: Trainer, rows: Sequence[TrainingSample], shape: str) -> tuple[int, float]:
    """The passes over all rows, as this trainer plans them, and the FLOPs of their products, forward and backward."""
    policy = trainer.backend.policy
    sizes = SHAPES[shape]
    weights = sum(p.numel() for p in policy.parameters() if p.dim() == 2) - sizes["vocab_size"] * sizes["hidden_size"]
    of_pair = 2 * sizes["num_hidden_layers"] * sizes["num_attention_heads"] * sizes["head_dim"]
    of_head = sizes["vocab_size"] * sizes["hidden_size"] * sum(int(row.loss_mask.sum()) for row in rows)
    num_fed = num_pairs = 0
    passes = policy.plan_rows([row.token_ids for row in rows], trainer.backend._pass_size or MAX_PASS_IDS)
    for planned in passes:
        ids = [rows[index].token_ids for index in planned.rows]
        if planned.is_tree:
            tree = merge_rows(ids)
            num_fed += len(tree.token_ids_T)
            num_pairs += int((tree.depths_T + 1).sum())
        else:
            num_fed += sum(map(len, ids))
            num_pairs += sum(len(each) * (len(each) + 1) // 2 for each in ids)
    return len(passes), 3.0 * 2.0 * (weights * num_fed + of_pair * num_pairs + of_head)
