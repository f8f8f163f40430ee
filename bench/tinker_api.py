"""A step of reinforcement learning by the Tinker API's models beside our own trainer's, on the same rows.

    OMP_NUM_THREADS=1 python bench/tinker_api.py                                       a CPU, a tiny model
    OMP_NUM_THREADS=4 python bench/tinker_api.py --shape 4b --median 560 --rows 96     a GPU
    OMP_NUM_THREADS=1 python bench/tinker_api.py --served transformers --rows 16       through a server

Both train a LoRA of rank 32 on all linear layers of one Qwen3 with random weights, by PPO's clipped loss, one update a
step: the trainer by `Trainer.step`, the models by a `forward_backward` and an `optim_step`, without a server between.
Rows have a prompt of half their ids, whose logprobs the API returns too. Rounds alternate. `--models` then counts what
further adapters on the same base take.

`--served ENGINE` then makes the same steps by the SDK against `unbroken serve --tinker`, which starts meanwhile. With
`--sampled`, each step is that of a loop: new weights for a sampler, a completion of each prompt, as long as the row's,
and these are trained, with spans. Options after `--` are the server's.
"""

from __future__ import annotations

import argparse
import gc
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import peft
import tinker
import torch
from accelerate import Accelerator
from tinker import types
from tinker.types import AdamParams, LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from grpo_task import SHAPES, UNTIED
from packing import make_rows
from unbroken.tinker.losses import Datum
from unbroken.tinker.models import Models
from unbroken.training.config import OptimizerConfig, SharedPrefixes, TrainerConfig
from unbroken.training.trainer import Trainer
from unbroken.types import NO_VERSION, TrainingSample

ON_GPU = torch.cuda.is_available()
RANK = 32


def now() -> float:
    if ON_GPU:
        torch.cuda.synchronize()
    return time.perf_counter()


def used_mib() -> float:
    """Of the GPU; or of all tensors, because a process keeps memory that it has freed."""
    gc.collect()
    if ON_GPU:
        return float(torch.cuda.memory_allocated()) / 2**20
    stores = [each.untyped_storage() for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    return float(sum({store.data_ptr(): store.nbytes() for store in stores}.values())) / 2**20


def save_model(folder: Path, shape: str, longest: int) -> None:
    torch.manual_seed(0)
    sizes = {**SHAPES[shape], "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    with torch.device("cuda" if ON_GPU else "cpu"):
        config = Qwen3Config(**sizes, max_position_embeddings=longest + 64, tie_word_embeddings=shape not in UNTIED)
        model = Qwen3ForCausalLM(config)
    model.to(torch.bfloat16 if ON_GPU else torch.float32).save_pretrained(folder)
    words = WordLevel({f"w{k}": k for k in range(SHAPES[shape]["vocab_size"])}, unk_token="w0")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token="w0")
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer.save_pretrained(folder)


def make_trainer(folder: Path, accelerator: Accelerator) -> Trainer:
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16 if ON_GPU else torch.float32)
    lora = peft.LoraConfig(r=RANK, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    config = TrainerConfig(
        optimizer=OptimizerConfig(learning_rate=1e-9, max_grad_norm=float("inf")),
        shared_prefixes=SharedPrefixes.NEVER,
    )
    return Trainer(peft.get_peft_model(model, lora), config, accelerator=accelerator)


def make_datum(row: TrainingSample) -> Datum:
    inputs = {"logprobs": np.where(row.sampled_mask, row.rollout_logprobs, 0)[1:], "advantages": row.advantages[1:]}
    return Datum(
        input_ids=row.token_ids[:-1],
        targets=row.token_ids[1:].astype(np.int64),
        inputs={name: values.astype(np.float32) for name, values in inputs.items()},
    )


def time_trainer(trainer: Trainer, rows: list[TrainingSample]) -> tuple[float, float]:
    """Seconds of a step; its passes are not apart from its update."""
    fresh = [
        TrainingSample(
            token_ids=row.token_ids,
            sampled_mask=row.sampled_mask,
            loss_mask=row.loss_mask,
            rollout_logprobs=row.rollout_logprobs,
            policy_versions=np.where(row.sampled_mask, trainer.policy_version, NO_VERSION).astype(np.int32),
            advantages=row.advantages,
        )
        for row in rows
    ]
    started = now()
    trainer.step(fresh)
    seconds = now() - started
    return seconds, seconds


def time_models(models: Models, data: list[Datum], loss: str) -> tuple[float, float]:
    """Seconds of a step, and of its `forward_backward`."""
    started = now()
    models.forward_backward("a", data, loss, {}, backward=True)
    passed = now()
    models.optim_step("a", AdamParams(learning_rate=1e-9))
    return now() - started, passed - started


@contextmanager
def start_server(model: Path, folder: Path, engine: str, options: Sequence[str]) -> Iterator[Callable[[], str]]:
    """Start a server, which ends with the block; the function waits for its URL."""
    store = ["--tinker", "--tinker-store", str(folder / "store")]
    command = [sys.executable, "-m", "unbroken", "serve", str(model), "--served-model-name", "bench", "--port", "0"]
    log, started = folder / "server.log", time.perf_counter()
    with log.open("w") as stream:
        process = subprocess.Popen(
            [*command, "--engine", engine, *store, *options], stdout=stream, stderr=subprocess.STDOUT
        )

    def find_url() -> str:
        while not (found := re.search(r"unbroken serves \S+ at (http://\S+)", log.read_text(errors="replace"))):
            if process.poll() is not None:
                raise SystemExit(f"the server ended: {log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.2)
        print(f"the server has started, {time.perf_counter() - started:.0f} s after its command", flush=True)
        return found[1]

    try:
        yield find_url
    finally:
        process.terminate()
        process.wait(60)


def time_served(
    client: tinker.TrainingClient, rows: Sequence[TrainingSample], *, is_sampled: bool
) -> tuple[float, float]:
    """Seconds of a step through a server, and of its `forward_backward`, as the client sees them."""
    data = sample_data(client, rows) if is_sampled else [make_api_datum(row) for row in rows]
    started = time.perf_counter()
    passes = client.forward_backward(data, "ppo")
    step = client.optim_step(AdamParams(learning_rate=1e-9))
    passes.result()
    passed = time.perf_counter()
    step.result()
    return time.perf_counter() - started, passed - started


def sample_data(client: tinker.TrainingClient, rows: Sequence[TrainingSample]) -> list[types.Datum]:
    """A completion of each row's prompt, of the row's length."""
    started = time.perf_counter()
    sampler = client.save_weights_and_get_sampling_client().result()
    saved = time.perf_counter()
    calls = []
    for number, row in enumerate(rows):
        params = types.SamplingParams(max_tokens=int(row.sampled_mask.sum()), seed=number, stop=[])
        prompt = types.ModelInput.from_ints(row.token_ids[~row.sampled_mask].tolist())
        calls.append(sampler.sample(prompt, num_samples=1, sampling_params=params))
    sequences = [call.result().sequences[0] for call in calls]
    num_ids = sum(len(each.tokens) for each in sequences)
    print(f"weights {saved - started:.2f} s, {num_ids:,} ids sampled in {time.perf_counter() - saved:.2f}", flush=True)
    return [make_api_datum(row, each) for row, each in zip(rows, sequences, strict=True)]


def make_api_datum(row: TrainingSample, sequence: types.SampledSequence | None = None) -> types.Datum:
    """A row, or its prompt with what was sampled, and spans."""
    prompt = row.token_ids[~row.sampled_mask].tolist()
    tokens = row.token_ids[row.sampled_mask].tolist() if sequence is None else sequence.tokens
    logprobs = row.rollout_logprobs[row.sampled_mask].tolist() if sequence is None else sequence.logprobs
    ids, given = [*prompt, *tokens], len(prompt) - 1
    inputs = {
        "target_tokens": ids[1:],
        "logprobs": [0.0] * given + list(logprobs or ()),
        "advantages": row.advantages[1:].tolist(),
    }
    datum = types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)
    if sequence is None:
        return datum
    name = sequence.sequence_id
    return datum.with_provenance(
        model_input=[
            types.PromptProvenanceSpan(sequence_id=name, length=len(prompt)),
            types.SampledProvenanceSpan(sequence_id=name, length=len(tokens) - 1),
        ],
        loss_fn_inputs=[
            types.PromptProvenanceSpan(sequence_id=name, offset=1, length=given),
            types.SampledProvenanceSpan(sequence_id=name, length=len(tokens)),
        ],
    )


def count_memory(models: Models, data: list[Datum], number: int) -> None:
    """What one more model takes: its adapter; and after a step also its averages."""
    before = used_mib()
    for k in range(number):
        models.create(f"more-{k}", LoraConfig(rank=RANK, train_unembed=False))
    made = used_mib()
    for k in range(number):
        models.forward_backward(f"more-{k}", data[:1], "ppo", {}, backward=True)
        models.optim_step(f"more-{k}", AdamParams(learning_rate=1e-9))
    trained = used_mib()
    size = sum(tensor.nbytes for _, tensor in models.adapter("a")) / 2**20
    print(
        f"{number} more adapters of {size:.2f} MiB: {(made - before) / number:.2f} MiB each, "
        f"{(trained - before) / number:.2f} after a step"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--rows", type=int, default=48)
    parser.add_argument("--median", type=int, default=200)
    parser.add_argument("--longest", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", type=int, default=8)
    parser.add_argument("--served", metavar="ENGINE", choices=("transformers", "vllm"))
    parser.add_argument("--sampled", action="store_true")
    parser.add_argument("options", nargs="*", help="options of the server, after --")
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(arguments.median), 0.6, arguments.rows), 16, arguments.longest).astype(int)
    rows = make_rows(lengths.tolist(), SHAPES[arguments.shape]["vocab_size"], rng)
    data = [make_datum(row) for row in rows]
    taken: dict[str, list[tuple[float, float]]] = {"Trainer.step": [], "ppo": []}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        save_model(folder / "model", arguments.shape, arguments.longest)
        find_url = None
        if arguments.served:
            server = start_server(folder / "model", folder, arguments.served, arguments.options)
            find_url = stack.enter_context(server)
        accelerator = Accelerator(mixed_precision="bf16" if ON_GPU else "no")
        trainer = make_trainer(folder / "model", accelerator)
        models = Models(folder / "model", accelerator=accelerator)
        models.create("a", LoraConfig(rank=RANK, train_unembed=False))
        for _ in range(arguments.rounds + 1):
            taken["Trainer.step"].append(time_trainer(trainer, rows))
            taken["ppo"].append(time_models(models, data, "ppo"))
            print(f"Trainer.step {taken['Trainer.step'][-1][0]:.3f} s, ppo {taken['ppo'][-1][0]:.3f}", flush=True)
        if arguments.models:
            count_memory(models, data, arguments.models)
        if find_url is not None:
            del trainer, models, accelerator
            gc.collect()
            torch.cuda.empty_cache()
            service = tinker.ServiceClient(base_url=find_url(), api_key="tml-bench")
            client = service.create_lora_training_client(base_model="bench", rank=RANK, train_unembed=False).result()
            taken["served"] = []
            for _ in range(arguments.rounds + 1):
                taken["served"].append(time_served(client, rows, is_sampled=arguments.sampled))
                step, passes = taken["served"][-1]
                print(f"served: forward_backward {passes:.3f} s, the step {step:.3f}", flush=True)
    num_ids = int(lengths.sum())
    device = torch.cuda.get_device_name() if ON_GPU else f"CPU, {torch.get_num_threads()} threads"
    print(f"{device}, {arguments.shape}: {arguments.rows} rows, {num_ids:,} ids, half of them sampled")
    for name, of_name in taken.items():
        step, passes = (statistics.median(column) for column in zip(*of_name[1:], strict=True))
        ratios = [own[0] / other[0] for own, other in zip(of_name[1:], taken["Trainer.step"][1:], strict=True)]
        print(
            f"{name:<14} step {step:.3f} s, {statistics.median(ratios):.2f} times Trainer.step ({min(ratios):.2f} to "
            f"{max(ratios):.2f})    forward_backward {num_ids / passes:>9,.0f} ids/s"
        )


if __name__ == "__main__":
    main()
