"""Train with TRL's own `GRPOTrainer` in server mode, and print what the server made of it, as JSON:
`trl_native_trainer.py URL MODEL_FOLDER OUTPUT_FOLDER DEVICE`. On the device `cpu` weights go over gloo.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

warnings.simplefilter("ignore")

import requests  # noqa: E402
import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from support.packed_sender import free_port  # noqa: E402

URL, FOLDER, OUTPUT, DEVICE = sys.argv[1:]
ON_CPU = DEVICE == "cpu"
NUM_STEPS = 3
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
    found = []
    for ids in SEQUENCES:
        row = torch.tensor([ids], device=model.device)
        logprobs = model.eval()(row).logits[0, :-1].float().log_softmax(-1)
        found.append(logprobs.gather(-1, row[0, 1:, None])[:, 0].tolist())
    return found


def version() -> int:
    found: int = requests.get(f"{URL}/version", timeout=30).json()["policy_version"]
    return found


def share_of_vowels(completions: list[Any], **_: Any) -> list[float]:
    texts = [completion[0]["content"] for completion in completions]
    return [sum(character in "aeiou" for character in text) / max(len(text), 1) for text in texts]


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
            output_dir=OUTPUT, use_cpu=ON_CPU, bf16=False, gradient_checkpointing=False, report_to="none",
            per_device_train_batch_size=8, num_generations=4, max_completion_length=12, max_steps=NUM_STEPS,
            learning_rate=1e-2, save_strategy="no", logging_steps=1, disable_tqdm=True, use_vllm=True,
            vllm_mode="server", vllm_server_base_url=URL, vllm_group_port=free_port(), vllm_server_timeout=60.0,
        ),
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(FOLDER),
    )  # fmt: skip
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
                "trl": __version__, "before": before, "trained": trained, "after": after, "refused": refused,
                "left": left, "history": history,
            }
        )
    )  # fmt: skip


main()
