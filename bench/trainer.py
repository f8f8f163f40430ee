"""The cost of training on T-turn trajectories: one row for a whole trajectory, as here, or one row for each turn.

    OMP_NUM_THREADS=1 python bench/trainer.py
    OMP_NUM_THREADS=1 python bench/trainer.py --prefixes          rows that share prefixes: see bench/prefixes.py

Both train on the same sampled ids with the same logprobs; a row per turn repeats the context before each turn. Prints
the ids that go through the model, in total and per sampled id, and the seconds of a forward pass over all rows with a
tiny model. Rounds alternate.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import prefixes
from unbroken.ledger.export import export_samples
from unbroken.ledger.nodes import Origin
from unbroken.ledger.tree import TokenTree
from unbroken.training.config import TrainerConfig
from unbroken.training.trainer import Trainer
from unbroken.types import NO_VERSION, FinishReason, SampledSequence, TrainingSample, VersionSpan, token_ids

VOCAB_SIZE = 2048


def make_trajectory(num_turns: int, *, prompt: int, turn: int, bridge: int, rng: np.random.Generator) -> TokenTree:
    """A trajectory of random ids without forks."""
    tree = TokenTree()
    end = tree.add_given(rng.integers(VOCAB_SIZE, size=prompt), Origin.PROMPT, parent=None)
    for number in range(num_turns):
        if number:
            end = tree.add_given(rng.integers(VOCAB_SIZE, size=bridge), Origin.BRIDGE, parent=end)
        sampled = SampledSequence(
            completion_ids=token_ids(rng.integers(VOCAB_SIZE, size=turn)),
            rollout_logprobs=np.full(turn, -np.log(VOCAB_SIZE), dtype=np.float32),
            finish_reason=FinishReason.STOP,
            version_spans=(VersionSpan(start=0, stop=turn, policy_version=0),),
        )
        end = tree.add_sampled(sampled, parent=end)
    return tree


def split_into_turns(row: TrainingSample) -> list[TrainingSample]:
    """Cut the row after each turn; each piece has its whole context, and only its last turn in the loss."""
    mask = row.sampled_mask
    ends = [i + 1 for i in range(len(mask)) if mask[i] and (i + 1 == len(mask) or not mask[i + 1])]
    pieces = []
    for start, stop in zip([0, *ends], ends, strict=False):
        own = np.arange(stop) >= start
        pieces.append(
            replace(
                row,
                token_ids=row.token_ids[:stop],
                sampled_mask=mask[:stop] & own,
                loss_mask=row.loss_mask[:stop] & own,
                rollout_logprobs=np.where(mask[:stop] & own, row.rollout_logprobs[:stop], np.nan),
                policy_versions=np.where(mask[:stop] & own, row.policy_versions[:stop], NO_VERSION),
                advantages=np.where(own, row.advantages[:stop], 0),
            )
        )
    return pieces


def make_trainer(*, num_layers: int = 2, hidden_size: int = 64) -> Trainer:
    """A trainer of a tiny model with random weights."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE, hidden_size=hidden_size, num_hidden_layers=num_layers, num_attention_heads=2,
        num_key_value_heads=1, head_dim=hidden_size // 2, intermediate_size=2 * hidden_size,
        max_position_embeddings=32768, tie_word_embeddings=True,
    )  # fmt: skip
    return Trainer(Qwen3ForCausalLM(config), TrainerConfig())


def time_pass(trainer: Trainer, rows: list[TrainingSample]) -> float:
    """Seconds of `logprobs` of all rows, which is a forward pass."""
    start = time.perf_counter()
    trainer.logprobs(rows)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--prompt", type=int, default=300)
    parser.add_argument("--turn", type=int, default=60)
    parser.add_argument("--bridge", type=int, default=90)
    parser.add_argument("--trajectories", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    prefixes.add_parser(parser)
    arguments = parser.parse_args()
    if arguments.prefixes:
        prefixes.measure(arguments)
        return
    trainer, rng = make_trainer(), np.random.default_rng(0)
    print("                      ids          ids per sampled id         seconds")
    print("turns  sampled    one row   per turn  one row  per turn  times  one row  per turn  times")
    for turns in arguments.turns:
        sizes = {"prompt": arguments.prompt, "turn": arguments.turn, "bridge": arguments.bridge}
        trees = [make_trajectory(turns, **sizes, rng=rng) for _ in range(arguments.trajectories)]
        whole = [row for tree in trees for row in export_samples(tree, 1.0)]
        cut = [piece for row in whole for piece in split_into_turns(row)]
        sampled = sum(int(row.sampled_mask.sum()) for row in whole)
        assert sampled == sum(int(row.sampled_mask.sum()) for row in cut)
        ours, theirs = (sum(len(row.token_ids) for row in rows) for rows in (whole, cut))
        taken = [(time_pass(trainer, whole), time_pass(trainer, cut)) for _ in range(arguments.rounds + 1)][1:]
        own, other = (statistics.median(column) for column in zip(*taken, strict=True))
        ratio = statistics.median(b / a for a, b in taken)
        print(
            f"{turns:>5}{sampled:>9}{ours:>11}{theirs:>11}{ours / sampled:>9.1f}{theirs / sampled:>10.1f}"
            f"{theirs / ours:>7.1f}{own:>9.2f}{other:>10.2f}{ratio:>7.1f}"
        )


if __name__ == "__main__":
    main()
