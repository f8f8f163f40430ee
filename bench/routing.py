"""Sampler against trainer in a mixture of experts, with and without routing replay, beside a dense model's floor.

    OMP_NUM_THREADS=1 python bench/routing.py                          # embedded engine on a CPU, a minute or two
    python bench/routing.py --engine vllm --device cuda --size small --dtypes bfloat16    # two starts of vLLM

Models have random weights. Rollouts have two turns, so that a row's prefix was computed by an earlier request. Version
1 of a sampler has the weights of the trainer's update, published to it. Each line is one sampler and one trainer of the
same weights, or of weights one update later:

    differs     share of recorded experts, in ids times layers, that the trainer's routers would not choose
    k3          estimate of KL(sampler || trainer) over all sampled ids; max: the largest difference of two logprobs
    off         share of ids whose ratio is outside of 0.8 to 1.2
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import gc
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from transformers import Qwen3Config, Qwen3MoeConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from unbroken.engines.base import Engine
from unbroken.engines.transformers import TransformersEngine, TransformersEngineConfig
from unbroken.ledger.export import export_samples
from unbroken.ledger.nodes import Origin
from unbroken.ledger.tree import TokenTree
from unbroken.training.config import OptimizerConfig, TrainerConfig
from unbroken.training.metrics.mismatch import mismatch_of_rows
from unbroken.training.metrics.stats import step_metrics
from unbroken.training.trainer import Trainer
from unbroken.types import SampleRequest, SamplingParams, TrainingSample, token_ids
from unbroken.weights.base import InProcessPublisher


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A model's shape, and how much is sampled from it."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_experts: int
    top_k: int
    expert_size: int
    num_rollouts: int
    turn_ids: int


SIZES = {
    "tiny": Size(vocab_size=512, hidden_size=128, num_layers=4, num_experts=16, top_k=2, expert_size=64,
                 num_rollouts=16, turn_ids=32),
    "small": Size(vocab_size=8192, hidden_size=512, num_layers=12, num_experts=32, top_k=4, expert_size=256,
                  num_rollouts=64, turn_ids=128),
    "medium": Size(vocab_size=32768, hidden_size=1024, num_layers=24, num_experts=64, top_k=8, expert_size=384,
                   num_rollouts=64, turn_ids=256),
}  # fmt: skip


def make_model(size: Size, *, is_dense: bool) -> Any:
    """A random model in float32 whose weights bfloat16 has exactly, so that a sampler in it has the same."""
    shared: dict[str, Any] = {
        "vocab_size": size.vocab_size, "hidden_size": size.hidden_size, "num_hidden_layers": size.num_layers,
        "num_attention_heads": size.hidden_size // 64, "num_key_value_heads": max(size.hidden_size // 128, 1),
        "head_dim": 64, "max_position_embeddings": 4096, "tie_word_embeddings": False,
        "initializer_range": size.hidden_size**-0.5, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    config = (
        Qwen3Config(**shared, intermediate_size=size.top_k * size.expert_size)
        if is_dense
        else Qwen3MoeConfig(
            **shared,
            intermediate_size=size.expert_size,
            num_experts=size.num_experts,
            num_experts_per_tok=size.top_k,
            moe_intermediate_size=size.expert_size,
            norm_topk_prob=True,
        )
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return model.eval()


async def open_engine(
    model: Any, dtype: torch.dtype, arguments: argparse.Namespace, folder: str, *, is_dense: bool
) -> Engine:
    """Open an engine on the model, whose files are written into `folder` if the engine is vLLM."""
    if arguments.engine == "embedded":
        own = copy.deepcopy(model).to(arguments.device, dtype)
        return TransformersEngine(own, config=TransformersEngineConfig(records_routing=not is_dense))
    from unbroken.engines.vllm import VllmEngine, parse_engine_args

    copy.deepcopy(model).to(dtype).save_pretrained(folder)
    options = ["--model", folder, "--skip-tokenizer-init", "--dtype", str(dtype).removeprefix("torch.")]
    options += ["--max-model-len", "2048", "--gpu-memory-utilization", "0.3", "--disable-log-stats"]
    options += [] if is_dense else ["--enable-return-routed-experts"]
    options += ["--enforce-eager"] if arguments.eager else []
    return await VllmEngine.start(parse_engine_args(options))


async def sample_rows(engine: Engine, size: Size, *, is_dense: bool) -> list[TrainingSample]:
    """Rows of two turns each."""
    rng = np.random.default_rng(0)
    prompts = [
        [rng.integers(0, size.vocab_size, int(rng.integers(8, 64))) for _ in range(2)] for _ in range(size.num_rollouts)
    ]
    params = SamplingParams(max_tokens=size.turn_ids, return_routed_experts=not is_dense)

    async def play(number: int) -> list[TrainingSample]:
        tree, end, ids = TokenTree(), None, token_ids([])
        for turn, (given, origin) in enumerate(zip(prompts[number], (Origin.PROMPT, Origin.BRIDGE), strict=True)):
            ids = token_ids([*ids, *given])
            seeded = replace(params, seed=2 * number + turn)
            request = SampleRequest(request_id=f"{number}/{turn}", prompt_ids=ids, params=seeded)
            (sequence,) = (await engine.sample(request)).sequences
            end = tree.add_sampled(sequence, parent=tree.add_given(token_ids(given), origin, parent=end))
            ids = token_ids([*ids, *sequence.completion_ids])
        return export_samples(tree, 1.0 if number % 2 else -1.0)

    groups = await asyncio.gather(*map(play, range(size.num_rollouts)))
    return [row for group in groups for row in group]


def make_trainer(model: Any, version: int, *, replays: bool, precision: str, device: str) -> Trainer:
    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=device == "cpu", mixed_precision=precision)
    config = TrainerConfig(routing_replay=replays, optimizer=OptimizerConfig(learning_rate=1e-5))
    return Trainer(copy.deepcopy(model), config, policy_version=version, accelerator=accelerator)


def measure(
    name: str, model: Any, rows: Sequence[TrainingSample], *, replays: bool, precision: str, device: str
) -> Any:
    """Print one line, and return the model after one update on the rows."""
    version = int(max(row.policy_versions.max() for row in rows))
    trainer = make_trainer(model, version, replays=replays, precision=precision, device=device)
    started = time.perf_counter()
    found = mismatch_of_rows(rows, trainer.logprobs(list(rows)))
    seconds = time.perf_counter() - started
    metrics = step_metrics(trainer.step(list(rows)))
    differs = metrics["mismatch/routing_differs"]
    share = "     -" if differs is None else f"{differs:6.2%}"
    print(
        f"{name:44} {'replay' if replays else 'live':6} {share}  {found.k3:9.2e} {found.max_abs:9.2e} "
        f"{found.share_off_20pct:7.2%}  {seconds:6.2f}",
        flush=True,
    )
    updated = copy.deepcopy(model)
    updated.load_state_dict({name: tensor.cpu() for name, tensor in trainer.named_weights()}, strict=False)
    return updated


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", choices=("embedded", "vllm"), default="embedded")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", choices=tuple(SIZES), default="tiny")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["bfloat16", "float32"])
    arguments = parser.parse_args()
    size = SIZES[arguments.size]
    print(f"{size}\n{'sampler, trainer, weights':44} {'':6} {'differs':>6}  {'k3':>9} {'max':>9} {'off':>7}  {'s':>6}")
    for is_dense in (True, False):
        for dtype in arguments.dtypes:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    await compare(size, dtype, arguments, folder, is_dense=is_dense)
                except Exception:  # e.g. a GPU's attention kernels without float32: the other lines still count
                    traceback.print_exc()


async def compare(size: Size, dtype: str, arguments: argparse.Namespace, folder: str, *, is_dense: bool) -> None:
    """Print the lines of one sampler: its first weights, and those after an update, under which it samples again."""
    kind = "dense" if is_dense else "experts"
    model = make_model(size, is_dense=is_dense)
    engine = await open_engine(model, getattr(torch, dtype), arguments, folder, is_dense=is_dense)
    choices = (False,) if is_dense else (False, True)
    for version in range(2):
        rows = await sample_rows(engine, size, is_dense=is_dense)
        num_bytes = sum(row.routed_experts.nbytes for row in rows if row.routed_experts is not None)
        num_ids = sum(len(row.token_ids) for row in rows)
        print(f"{kind}, {dtype} sampler, version {version}: {num_ids} ids, {num_bytes / num_ids:.0f} bytes an id")
        updated = after = model
        for precision in ("no", "bf16"):
            trained = "float32" if precision == "no" else "bfloat16"
            for name, weights in (("same", model), ("one update later", None)):
                for replays in choices:
                    options: dict[str, Any] = {"replays": replays, "precision": precision, "device": arguments.device}
                    line = f"{kind}: {dtype}, {trained}, {name}"
                    after = measure(line, updated if weights is None else weights, rows, **options)
                updated = after if weights is not None else updated
                gc.collect()
        if version == 0:
            model = updated
            await InProcessPublisher(engine).publish(model.named_parameters(), policy_version=1)
    await engine.close()


if __name__ == "__main__":
    asyncio.run(main())
