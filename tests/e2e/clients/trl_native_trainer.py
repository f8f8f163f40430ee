"""Train with TRL's own `GRPOTrainer` in server mode, and print what the server made of it, as JSON:
`trl_native_trainer.py URL MODEL_FOLDER OUTPUT_FOLDER DEVICE NUM_STEPS`. On the device `cpu` weights go over gloo.
"""

from __future__ import annotations

import itertools
import json
import sys
import warnings
from collections import Counter
from typing import Any

import numpy as np

warnings.simplefilter("ignore")

import requests  # noqa: E402
import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from support.processes import free_port  # noqa: E402

URL, FOLDER, OUTPUT, DEVICE = sys.argv[1:5]
ON_CPU = DEVICE == "cpu"
NUM_STEPS = int(sys.argv[5])
SEQUENCES = [[5, 6, 7, 8, 9, 10], [20, 21, 22, 23], [100, 50, 25, 12, 6]]


def server_logprobs() -> list[list[float]]:
    """What the server gives the sequences' ids."""
    body = {"model": "tiny", "prompt": SEQUENCES, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 1}
    answer = requests.post(f"{URL}/v1/completions", json=body, timeout=120).json()
    return [
        [
            entry[str(token_id)]["logprob"]
            for entry, token_id in zip(choice["prompt_logprobs"][1:], ids[1:], strict=True)
        ]
        for choice, ids in zip(answer["choices"], SEQUENCES, strict=True)
    ]


@torch.no_grad()
def own_logprobs(model: Any) -> list[list[float]]:
    """What a model gives them."""
    found, was_training = [], model.training
    for ids in SEQUENCES:
        row = torch.tensor([ids], device=model.device)
        logprobs = model.eval()(row).logits[0, :-1].float().log_softmax(-1)
        found.append(logprobs.gather(-1, row[0, 1:, None])[:, 0].tolist())
    model.train(was_training)
    return found


def distance(rows: list[list[float]], others: list[list[float]]) -> float:
    pairs = zip(itertools.chain(*rows), itertools.chain(*others), strict=True)
    return max(abs(a - b) for a, b in pairs)


def version() -> int:
    found: int = requests.get(f"{URL}/version", timeout=30).json()["policy_version"]
    return found


def share_of_vowels(completions: list[Any], **_: Any) -> list[float]:
    texts = [completion[0]["content"] for completion in completions]
    return [sum(character in "aeiou" for character in text) / max(len(text), 1) for text in texts]


Row = tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]
"""prompt_ids, completion_ids and rollout logprobs, the latter rounded to float32."""


def answered_rows(answer: dict[str, Any]) -> list[Row]:
    """The rows that the server sampled for a request of TRL's client."""
    num_siblings = len(answer["completion_ids"]) // len(answer["prompt_ids"])
    return [
        (tuple(answer["prompt_ids"][k // num_siblings]), tuple(ids), tuple(np.float32(each[0]) for each in logprobs))
        for k, (ids, logprobs) in enumerate(zip(answer["completion_ids"], answer["logprobs"], strict=True))
    ]


def trained_rows(inputs: dict[str, Any]) -> list[Row]:
    """The rows of a pass of TRL's trainer, without their padding."""
    rows = []
    for k in range(len(inputs["prompt_ids"])):
        prompt, real = inputs["prompt_mask"][k].bool(), inputs["completion_mask"][k].bool()
        columns = (inputs["prompt_ids"][k][prompt], inputs["completion_ids"][k][real])
        logprobs = inputs["sampling_per_token_logps"][k][real].float().cpu().numpy()
        rows.append((*(tuple(ids.tolist()) for ids in columns), tuple(logprobs)))
    return rows


class Record:
    """What the server answered, what TRL trained on, and how far apart both score fixed sequences at each sampling."""

    def __init__(self, trainer: Any) -> None:
        self.sampled: list[Row] = []
        self.trained: list[Row] = []
        self.apart: list[float] = []
        client, compute_loss = trainer.vllm_generation.vllm_client, trainer._compute_loss
        generate = client.generate

        def generate_and_keep(*args: Any, **options: Any) -> Any:
            self.apart.append(distance(server_logprobs(), own_logprobs(trainer.model)))
            answer = generate(*args, **options)
            self.sampled += answered_rows(answer)
            return answer

        def keep_and_compute_loss(model: Any, inputs: dict[str, Any]) -> Any:
            self.trained += trained_rows(inputs)
            return compute_loss(model, inputs)

        client.generate, trainer._compute_loss = generate_and_keep, keep_and_compute_loss

    def counts(self) -> dict[str, Any]:
        """How many rows were sampled, and trained exactly as they were; the distances."""
        exact = Counter(self.sampled) & Counter(self.trained)
        sums = {"sampled": len(self.sampled), "trained": len(self.trained), "exact": exact.total()}
        return sums | {"apart": self.apart}


def main() -> None:
    from trl import GRPOConfig, GRPOTrainer, __version__

    if ON_CPU:
        from support.trl_over_gloo import replace_nccl_in_trl

        replace_nccl_in_trl()
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": f"say {word}"}]} for word in "abcdefgh"])
    before = {"server": server_logprobs(), "trainer": own_logprobs(model), "version": version()}
    trainer = GRPOTrainer(
        model,
        share_of_vowels,
        args=GRPOConfig(
            output_dir=OUTPUT,
            use_cpu=ON_CPU,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=12,
            max_steps=NUM_STEPS,
            learning_rate=1e-2 if ON_CPU else 1e-3,
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            use_vllm=True,
            vllm_mode="server",
            vllm_server_base_url=URL,
            vllm_group_port=free_port(),
            vllm_server_timeout=60.0,
        ),
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(FOLDER),
    )
    record = Record(trainer)
    trainer.train()
    trained = {"server": server_logprobs(), "version": version()}
    trainer.vllm_generation.sync_weights()  # TRL syncs before it samples, not after the last step
    client = trainer.vllm_generation.vllm_client
    after = {"server": server_logprobs(), "trainer": own_logprobs(trainer.model), "version": version()}
    try:
        client.update_named_param("oops", torch.zeros(3, device=trainer.accelerator.device))
        refused = "not refused"
    except Exception as error:
        refused = str(error)
    left = {"server": server_logprobs(), "version": version()}
    history = [line for line in trainer.state.log_history if "loss" in line]
    print(
        json.dumps(
            {
                "trl": __version__,
                "before": before,
                "trained": trained,
                "after": after,
                "refused": refused,
                "left": left,
                "history": history,
                "rows": record.counts(),
            }
        )
    )


main()
