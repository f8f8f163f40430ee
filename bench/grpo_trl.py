"""TRL's side of bench/grpo.py: its GRPOTrainer with vLLM in the same process, on the same model, problems and turns.

The model is random and calls no tool, so the parser of its replies is replaced by one that always finds a call. Under
`torchrun` the rows are those of all processes (bench/colocated.py).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpo_steps
import grpo_task
from grpo_task import (
    SETTINGS,
    PeakMemory,
    draw_answer,
    draw_length,
    make_lora,
    print_result,
    prompt_of,
    turn_options,
)

CONTEXT = grpo_task.CONTEXT_LENGTH


class Watch:
    """Times the steps of TRL's trainer and their generation, prints them, and writes them as lines of metrics."""

    def __init__(self, settings: Sequence[str], num_steps: int, memory: PeakMemory, output: Path) -> None:
        self.schedule = [settings[0], *(name for name in settings for _ in range(num_steps))]
        """The setting of each step; the first one warms up."""
        self.seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in settings}
        """Of steps, and of their generation."""
        self.steps: dict[str, list[dict[str, float]]] = {name: [] for name in settings}
        """What the engine did in them."""
        self.peaks = dict.fromkeys(settings, 0.0)
        self.num_calls = 0
        """Calls of the tool in the present step."""
        self.num_turns = 0
        """Turns that were sampled in it."""
        self._counts = grpo_steps.Steps(os.environ[grpo_steps.VARIABLE])
        self._found: dict[str, float] = {}
        self._memory = memory
        self._metrics = output / "metrics/metrics.jsonl"
        self._metrics.parent.mkdir(parents=True, exist_ok=True)
        self._step = 0
        self._started = self._generated = 0.0

    @property
    def setting(self) -> grpo_task.Setting:
        """That of the present step."""
        return SETTINGS[self.schedule[min(self._step, len(self.schedule) - 1)]]

    def begin(self) -> None:
        """Begin a step."""
        self._started, self._generated = time.perf_counter(), 0.0
        self.num_calls = self.num_turns = 0

    def begin_generation(self) -> None:
        """Begin to count the engine's steps."""
        self._counts.restart()

    def note_generation(self, seconds: float, num_sampled: int, num_given: int) -> None:
        """Add the generation of a step: of so many ids, with so many of the tool between them."""
        self._generated += seconds
        self._found = {**self._counts.read(), "sampled": num_sampled, "given": num_given / max(1, self.num_calls)}

    def end(self) -> None:
        """End a step."""
        seconds, peak = time.perf_counter() - self._started, self._memory.restart()
        name = self.schedule[self._step]
        what = "warm-up" if self._step == 0 else name
        print(
            f"step {self._step}, {what}: {seconds:.2f} s, of that collect {self._generated:.2f}, peak {peak:.1f} GiB",
            flush=True,
        )
        found = self._found
        sampled, given = int(found["sampled"]), found["given"]
        grpo_steps.print_steps(found, num_sampled=sampled, num_given=given, collect_s=self._generated)
        line = {"step": self._step, "seconds/step": seconds, "seconds/collect": self._generated}
        with self._metrics.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if self._step:
            self.seconds[name].append((seconds, self._generated))
            self.steps[name].append(self._found)
        self.peaks[name] = max(self.peaks[name], peak)
        self._step += 1
        if self._step > 1:
            self._print_result(name)

    def _print_result(self, name: str) -> None:
        """Print the medians of a setting so far: the time may be up before the next step ends."""
        steps, generation = zip(*self.seconds[name], strict=True)
        step_s, collect_s = statistics.median(steps), statistics.median(generation)
        counts = {key: statistics.median(step[key] for step in self.steps[name]) for key in self.steps[name][0]}
        rest_s = statistics.median(step - sampled for step, sampled in self.seconds[name])
        print_result(
            "trl", name, step_s=step_s, collect_s=collect_s, train_s=rest_s, peak_gib=self.peaks[name], **counts
        )


def run(arguments: argparse.Namespace, settings: Sequence[str]) -> None:
    """Train on settings with the same number of tools, one after the other."""
    import trl.trainer.grpo_trainer as trl_module
    from datasets import Dataset
    from transformers import AutoTokenizer

    has_tools = SETTINGS[settings[0]].num_turns > 1
    num_steps = arguments.trl_tool_steps if has_tools else arguments.num_steps
    grpo_steps.count_steps_here()
    watch = Watch(settings, num_steps, PeakMemory(arguments.device), arguments.output)
    trl_module.parse_response = find_call
    tokenizer = AutoTokenizer.from_pretrained(arguments.folder)
    if has_tools:
        tokenizer.response_schema = {}
    config = make_config(arguments, watch, has_tools=has_tools)
    started = time.perf_counter()
    trainer = make_trainer_class(watch)(
        model=str(arguments.folder),
        reward_funcs=_share_of_a,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": prompt_of(n)} for n in range(arguments.problems * 8)]),
        processing_class=tokenizer,
        tools=[make_tool(watch, arguments)] if has_tools else None,
        callbacks=[make_callback(watch)],
        peft_config=make_lora(arguments.lora) if arguments.lora else None,
    )
    if arguments.device == "cpu":  # where vLLM cannot load weights a second time by TRL's way
        trainer.vllm_generation.sync_weights = lambda: None
    if arguments.turns in grpo_task.DRAWN:
        draw_lengths(trainer.vllm_generation.llm, watch, arguments)
    print(f"TRL and its engine started in {time.perf_counter() - started:.0f} s", flush=True)
    trainer.train()


def make_config(arguments: argparse.Namespace, watch: Watch, *, has_tools: bool) -> Any:
    """Make TRL's config with the settings of the other side."""
    from trl import GRPOConfig

    options = turn_options(arguments)
    if "stop_token_ids" in options:
        options["stop_token_ids"] = list(options["stop_token_ids"])
    num_rows = arguments.problems * arguments.group_size // int(os.environ.get("WORLD_SIZE", "1"))
    rows_per_pass = min(num_rows, arguments.trl_rows or (16 if has_tools else 32))
    return GRPOConfig(
        output_dir=str(arguments.output),
        max_steps=len(watch.schedule),
        per_device_train_batch_size=rows_per_pass,
        gradient_accumulation_steps=num_rows // rows_per_pass,
        num_generations=arguments.group_size,
        max_completion_length=CONTEXT - 128 if has_tools else options["max_tokens"],
        max_tool_calling_iterations=watch.setting.num_turns - 1 if has_tools else None,
        generation_kwargs={**options, "ignore_eos": True},
        temperature=1.0,
        beta=0.0,
        loss_type="dapo",
        learning_rate=arguments.learning_rate,
        lr_scheduler_type="constant",
        bf16=arguments.mixed_precision == "bf16",
        gradient_checkpointing=False,
        torch_compile=arguments.compile,
        model_init_kwargs={"dtype": "bfloat16" if arguments.lora else "float32"},
        use_cpu=arguments.device == "cpu",
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=arguments.gpu_memory,
        vllm_max_model_length=CONTEXT,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=arguments.seed,
    )


def make_callback(watch: Watch) -> Any:
    """Make TRL's callback that times steps and prints some metrics."""
    from transformers import TrainerCallback

    class Timing(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            watch.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if os.environ.get("RANK", "0") == "0":
                watch.end()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            names = ("completions/mean_length", "sampling/sampling_logp_difference/mean", "reward",
                     "sampling/sampling_logp_difference/max", "tools/call_frequency")  # fmt: skip
            print("   ", {name: logs[name] for name in names if name in (logs or {})}, flush=True)

    return Timing()


def make_trainer_class(watch: Watch) -> Any:
    """Make a subclass of TRL's trainer that times its generation."""
    from trl import GRPOTrainer

    class TimedTrainer(GRPOTrainer):  # type: ignore[misc]
        def _generate(self, prompts: list[Any]) -> Any:
            watch.begin_generation()
            started = time.perf_counter()
            generated = super()._generate(prompts)
            seconds = time.perf_counter() - started
            completions, tool_masks = generated[1], generated[2]
            num_ids = sum(map(len, completions))
            num_sampled = sum(map(sum, tool_masks)) if tool_masks else num_ids
            watch.note_generation(seconds, num_sampled, num_ids - num_sampled)
            return generated

    return TimedTrainer


def make_tool(watch: Watch, arguments: argparse.Namespace) -> Any:
    """Make the tool, which takes as long and answers as much as that of the other side. Rows call it in their order."""
    num_rows = arguments.problems * arguments.group_size // int(os.environ.get("WORLD_SIZE", "1"))

    def find_number(name: str) -> str:
        time.sleep(watch.setting.tool_s)
        turn, row = divmod(watch.num_calls, num_rows)
        watch.num_calls += 1
        return draw_answer(row // arguments.group_size, turn, ragged=arguments.turns != "even")

    find_number.__doc__ = grpo_task.find_number.__doc__
    return find_number


def draw_lengths(llm: Any, watch: Watch, arguments: argparse.Namespace) -> None:
    """Let the turns of `llm` end after as many ids as those of the other side at the same place of a step."""
    generate = llm.generate

    def generate_drawn(prompts: Sequence[Any], sampling_params: Any, **options: Any) -> Any:
        each = []
        for row in range(len(prompts)):
            problem, sibling = divmod(row, arguments.group_size)
            own = sampling_params.clone()
            own.max_tokens = draw_length(arguments, problem=problem, sibling=sibling, turn=watch.num_turns)
            each.append(own)
        watch.num_turns += 1
        return generate(prompts, sampling_params=each, **options)

    llm.generate = generate_drawn


def find_call(tokenizer: Any, ids: Any, **_: Any) -> dict[str, Any]:
    """Parse every reply as its text and one call; replaces TRL's parser."""
    content = tokenizer.decode(ids, skip_special_tokens=True)
    call = {"type": "function", "function": {"name": "find_number", "arguments": {"name": "a"}}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def _share_of_a(completions: list[Any], **_: Any) -> list[float]:
    """The reward of the other side: the share of words that begin with an a."""
    rewards = []
    for messages in completions:
        text = "".join(m["content"] for m in messages if m["role"] == "assistant")
        good, bad = text.count("a"), text.count("b")
        rewards.append(good / max(1, good + bad))
    return rewards
