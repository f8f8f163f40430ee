"""TRL's side of bench/real.py: its GRPOTrainer with vLLM in the same process, on the same problems, in the same order.

It writes a line of metrics for each step, with the names of ours where they mean the same. `sums` is TRL's usual way of
one turn; `tool` is played by a `rollout_func`, which appends each message of the user to the ids that were sampled, so
TRL too trains on the ids of its sampler.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from real_task import CONTEXT, LEARNING_RATE, MAX_TURNS, TURN_IDS, Episode, make_problem

GROUP_SIZE = 8
_MARK = "<mark>"


class Lines:
    """Times the parts of a step, and writes its line."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._mismatch: dict[str, float] = {}
        self._step = 0
        self._began_s = time.perf_counter()

    def begin(self) -> None:
        """The first step begins now."""
        self._began_s = time.perf_counter()

    @contextmanager
    def span(self, name: str, *, part_of: str | None = None) -> Iterator[None]:
        """Add the seconds of the block to a part, and take them away from the part that it is in."""
        began_s = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - began_s
            self._seconds[name] += seconds
            if part_of is not None:
                self._seconds[part_of] -= seconds

    def compare(self, output: dict[str, Any]) -> None:
        """Keep k3 of the sampler against the trainer, as `mismatch/k3` of ours; TRL has its own two numbers."""
        if "sampling_per_token_logps" not in output or "old_per_token_logps" not in output:
            return
        mask = output["completion_mask"] * output.get("tool_mask", 1)
        log_ratio = (output["old_per_token_logps"] - output["sampling_per_token_logps"])[mask.bool()].double()
        k3 = (log_ratio.exp() - 1 - log_ratio).mean().item()
        self._mismatch = {"mismatch/k3": k3, "mismatch/max_abs": log_ratio.abs().max().item()}

    def end(self, logs: dict[str, float]) -> None:
        """End a step, and write its line."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now_s = time.perf_counter()
        wall_s, self._began_s = now_s - self._began_s, now_s
        parts = {f"seconds/{name}": seconds for name, seconds in self._seconds.items()}
        line = {
            "step": self._step, "reward/mean": logs["reward"], **self._mismatch, **parts,
            "seconds/train": wall_s - sum(parts.values()), "seconds/wall": wall_s,
        }  # fmt: skip
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self._seconds.clear()
        self._mismatch = {}
        self._step += 1


def run(arguments: argparse.Namespace) -> None:
    """Train one seed of one task."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    import trl.generation.vllm_generation as vllm_generation
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback

    lines = Lines(arguments.run / "metrics/metrics.jsonl")
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    num_problems = arguments.problems * arguments.steps
    problems = [make_problem(arguments.task, arguments.seed, number) for number in range(num_problems)]
    if (
        arguments.kv_cache_memory_bytes is not None
    ):  # TRL has no such setting, and a share of the memory fails with others
        start = vllm_generation.LLM
        vllm_generation.LLM = lambda **options: start(**options, kv_cache_memory_bytes=arguments.kv_cache_memory_bytes)

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            lines.begin()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if logs and "reward" in logs:
                lines.end(logs)

    has_turns = MAX_TURNS[arguments.task] > 1
    trainer = make_trainer_class(lines)(
        model=str(arguments.model),
        reward_funcs=_own_reward if has_turns else _reward_of(arguments.task, problems),
        args=make_config(arguments),
        train_dataset=Dataset.from_list(
            [{"prompt": list(problem.messages), "number": number} for number, problem in enumerate(problems)]
        ),
        processing_class=tokenizer,
        rollout_func=RolloutFunction(arguments, problems, tokenizer, lines) if has_turns else None,
        callbacks=[Watch()],
    )
    sync = trainer.vllm_generation.sync_weights
    if arguments.device == "cpu":  # where vLLM cannot load weights a second time by TRL's way
        sync = lambda: None  # noqa: E731

    def sync_timed() -> None:
        with lines.span("publish", part_of="collect"):
            sync()

    trainer.vllm_generation.sync_weights = sync_timed
    trainer.train()


def make_config(arguments: argparse.Namespace) -> Any:
    """Make TRL's config: what is the same on all sides, and its defaults."""
    from trl import GRPOConfig

    num_rows = arguments.problems * GROUP_SIZE
    # With a prompt of several turns and 256 rows, logits of the whole vocabulary do not fit into a GPU.
    rows_per_pass = num_rows if MAX_TURNS[arguments.task] == 1 else min(32, num_rows)
    return GRPOConfig(
        output_dir=str(arguments.run / "trl"),
        max_steps=arguments.steps,
        per_device_train_batch_size=rows_per_pass,
        gradient_accumulation_steps=num_rows // rows_per_pass,
        num_generations=GROUP_SIZE,
        max_completion_length=TURN_IDS[arguments.task],
        shuffle_dataset=False,
        temperature=1.0,
        beta=0.0,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        bf16=arguments.device == "cuda",
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
        use_cpu=arguments.device == "cpu",
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=arguments.gpu_memory,
        vllm_max_model_length=CONTEXT,
        vllm_enable_sleep_mode=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=arguments.seed,
    )


def make_trainer_class(lines: Lines) -> Any:
    """Make a subclass of TRL's trainer that times generation, and what it scores: rewards and old logprobs."""
    from trl import GRPOTrainer

    class TimedTrainer(GRPOTrainer):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            with lines.span("score"):
                output = super()._generate_and_score_completions(inputs)
                lines.compare(output)
                return output

        def _generate(self, prompts: list[Any]) -> Any:
            with lines.span("collect", part_of="score"):
                return super()._generate(prompts)

    return TimedTrainer


class RolloutFunction:
    """Plays episodes of several turns, all rows together turn by turn, on the ids that were sampled."""

    def __init__(self, arguments: argparse.Namespace, problems: list[Any], tokenizer: Any, lines: Lines) -> None:
        self._arguments = arguments
        self._tokenizer = tokenizer
        self._lines = lines
        self._problems = {problem.messages[-1]["content"]: problem for problem in problems}

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """See `rollout_func` of GRPOTrainer."""
        rows = [_Row(self._render(messages), self._make_episode(messages)) for messages in prompts]
        playing = rows
        for turn in range(MAX_TURNS[self._arguments.task]):
            if not playing:
                break
            for row, output in zip(playing, self._sample(playing, trainer), strict=True):
                row.add_sampled(output)
                text = self._tokenizer.decode(output.token_ids, skip_special_tokens=True)
                answer = row.episode.reply(text)
                row.is_over = answer is None
                if answer is not None and turn + 1 < MAX_TURNS[self._arguments.task]:
                    row.add_given(self._bridge(answer, is_ended=output.finish_reason == "stop"))
            playing = [row for row in playing if not row.is_over]
        return {
            "prompt_ids": [row.prompt_ids for row in rows],
            "completion_ids": [row.ids for row in rows],
            "logprobs": [row.logprobs for row in rows],
            "env_mask": [row.mask for row in rows],
            "own_reward": [row.episode.reward for row in rows],
        }

    def _make_episode(self, messages: list[Any]) -> Episode:
        return Episode(self._arguments.task, self._problems[messages[-1]["content"]])

    def _sample(self, rows: list[_Row], trainer: Any) -> list[Any]:
        from vllm import SamplingParams

        params = SamplingParams(temperature=1.0, max_tokens=TURN_IDS[self._arguments.task], logprobs=0)
        prompts = [{"prompt_token_ids": [*row.prompt_ids, *row.ids]} for row in rows]
        found = trainer.vllm_generation.llm.generate(prompts, sampling_params=params, use_tqdm=False)
        return [each.outputs[0] for each in found]

    def _render(self, messages: list[Any]) -> list[int]:
        text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _bridge(self, answer: str, *, is_ended: bool) -> list[int]:
        """The ids from the end of a sampled turn to the next generation prompt."""
        before = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _MARK}]
        messages = [*before, {"role": "user", "content": answer}]
        text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        rest = text.partition(_MARK)[2]
        return list(
            self._tokenizer.encode(
                rest.removeprefix(self._tokenizer.eos_token) if is_ended else rest, add_special_tokens=False
            )
        )


class _Row:
    """The ids of one rollout."""

    def __init__(self, prompt_ids: list[int], episode: Episode) -> None:
        self.prompt_ids = prompt_ids
        self.episode = episode
        self.is_over = False
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.mask: list[int] = []

    def add_sampled(self, output: Any) -> None:
        """Add a turn of vLLM, with the logprob of each id."""
        self.ids += output.token_ids
        self.logprobs += [each[one].logprob for one, each in zip(output.token_ids, output.logprobs, strict=True)]
        self.mask += [1] * len(output.token_ids)

    def add_given(self, ids: list[int]) -> None:
        """Add ids that the policy did not sample."""
        self.ids += ids
        self.logprobs += [0.0] * len(ids)
        self.mask += [0] * len(ids)


def _own_reward(own_reward: list[float], **_: Any) -> list[float]:
    """The reward of each episode, which `RolloutFunction` returns."""
    return own_reward


def _reward_of(task: str, problems: list[Any]) -> Any:
    """The reward of single turns."""

    def reward(prompts: list[Any], completions: list[Any], number: list[int], **_: Any) -> list[float]:
        found = []
        for completion, one in zip(completions, number, strict=True):
            episode = Episode(task, problems[one])
            episode.reply(completion[-1]["content"])
            found.append(episode.reward)
        return found

    return reward
