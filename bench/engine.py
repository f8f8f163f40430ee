"""Time 64 concurrent multi-turn episodes: `TransformersEngine` against `generate()` turn by turn.

    OMP_NUM_THREADS=1 python bench/engine.py

The episodes have the lengths of the demo's teacher: its prompts, 2 to 4 turns of about 16 sampled ids, and replies of
its tool (about 20 ids) between them. Both sides do the same work on the demo's model with random weights. The sampled
ids differ from the teacher's, so lengths are forced: by `max_tokens` here, by a stopping criterion per row there.

The turn-by-turn side is a rollout loop without an engine: one left-padded `generate()` over all live episodes, then the
tools' replies, then the next. It feeds the whole history again each turn, and each turn lasts as long as its longest
row, which is a part of the difference. It is measured with and without the logprobs of the sampled ids, which training
needs and which cost time in `generate()`. With --wave, `generate_batch`, the continuous batching of transformers, runs
the first turns too.

One engine runs all rounds, as in training; its prefix cache is emptied before each, as new weights would empty it.
Rounds alternate, and the ratio is the median of the rounds' ratios, so that a busy machine slows both sides alike.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from unbroken.demo.lookup import LookupTask
from unbroken.demo.model import Teacher, build_model, build_tokenizer
from unbroken.engines.transformers import TransformersEngine
from unbroken.types import SampleRequest, SamplingParams, TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One call of the model and the reply to it."""

    num_sampled: int
    given_ids: TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One scripted conversation."""

    prompt_ids: TokenIds
    turns: tuple[Turn, ...]


def make_episodes(tokenizer: Any, num_episodes: int, seed: int) -> list[Episode]:
    """The teacher's episodes in ids: what it writes is a number of ids to sample, the rest is given."""
    rng = random.Random(seed)
    teacher = Teacher(tokenizer)
    episodes = []
    for _ in range(num_episodes):
        pieces = teacher.demonstrate(LookupTask.draw(rng), rng)
        prompt, *rest = [np.array(ids, dtype=np.int32) for ids in tokenizer([p.text for p in pieces])["input_ids"]]
        nothing = np.zeros(0, dtype=np.int32)
        turns = zip_longest(rest[::2], rest[1::2], fillvalue=nothing)
        episodes.append(
            Episode(
                prompt_ids=prompt, turns=tuple(Turn(num_sampled=len(said), given_ids=given) for said, given in turns)
            )
        )
    return episodes


def make_model(tokenizer: Any, seed: int) -> Any:
    """The demo's model, to sample from until a length is reached."""
    model = build_model(tokenizer, seed=seed).eval()
    model.generation_config.eos_token_id = None
    return model


async def run_engine(engine: TransformersEngine, episodes: list[Episode]) -> None:
    """Every episode is a task of its own, as in a rollout."""
    async with asyncio.TaskGroup() as tasks:
        for index, episode in enumerate(episodes):
            tasks.create_task(_run_episode(engine, episode, name=str(index)))


async def _run_episode(engine: TransformersEngine, episode: Episode, *, name: str) -> None:
    token_ids = episode.prompt_ids
    for number, turn in enumerate(episode.turns):
        params = SamplingParams(max_tokens=turn.num_sampled)
        result = await engine.sample(SampleRequest(request_id=f"{name}/{number}", prompt_ids=token_ids, params=params))
        completion_ids = result.sequences[0].completion_ids
        assert len(completion_ids) == turn.num_sampled
        token_ids = np.concatenate([token_ids, completion_ids, turn.given_ids])


class RowLengths(StoppingCriteria):  # type: ignore[misc]  # transformers is untyped
    """Each row is through after its own number of new ids."""

    def __init__(self, prompt_width: int, num_sampled: list[int]) -> None:
        self._ends = torch.tensor(num_sampled) + prompt_width

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return self._ends <= input_ids.shape[1]


@torch.inference_mode()
def run_generate(model: Any, episodes: list[Episode], *, logprobs: bool) -> None:
    """All live episodes take each turn together, in one left-padded batch."""
    token_ids = [episode.prompt_ids for episode in episodes]
    for number in range(max(len(episode.turns) for episode in episodes)):
        live = [index for index, episode in enumerate(episodes) if number < len(episode.turns)]
        turns = [episodes[index].turns[number] for index in live]
        width = max(len(token_ids[index]) for index in live)
        prompts = torch.full((len(live), width), model.config.pad_token_id)
        for row, index in enumerate(live):
            prompts[row, width - len(token_ids[index]) :] = torch.from_numpy(token_ids[index])
        mask = torch.tensor([[0] * (width - len(token_ids[i])) + [1] * len(token_ids[i]) for i in live])
        lengths = [turn.num_sampled for turn in turns]
        output = model.generate(
            prompts,
            attention_mask=mask,
            do_sample=True,
            top_k=0,
            max_new_tokens=max(lengths),
            stopping_criteria=StoppingCriteriaList([RowLengths(width, lengths)]),
            return_dict_in_generate=True,
            output_logits=logprobs,
        )
        if logprobs:
            model.compute_transition_scores(output.sequences, output.logits, normalize_logits=True)
        sequences = output.sequences.numpy().astype(np.int32)
        for row, (index, turn) in enumerate(zip(live, turns, strict=True)):
            completion_ids = sequences[row, width : width + turn.num_sampled]
            assert len(completion_ids) == turn.num_sampled
            token_ids[index] = np.concatenate([token_ids[index], completion_ids, turn.given_ids])


def compare_first_turns(model: Any, engine_run: Callable[[list[Episode]], float], episodes: list[Episode]) -> str:
    """Time one wave of first turns, all of one length as `generate_batch` has one for all, on both engines."""
    num_ids = 25
    wave = [
        Episode(prompt_ids=e.prompt_ids, turns=(Turn(num_sampled=num_ids, given_ids=e.turns[0].given_ids),))
        for e in episodes
    ]
    ours = engine_run(wave)
    config = GenerationConfig(max_new_tokens=num_ids, do_sample=True, top_k=0, eos_token_id=-1)
    # By default it takes most of the machine's memory for its cache, which takes longer than the wave.
    batching = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=2048, return_logprobs=True)
    start = time.perf_counter()
    outputs = model.generate_batch(
        [e.prompt_ids.tolist() for e in wave],
        generation_config=config,
        continuous_batching_config=batching,
        progress_bar=False,
    )
    theirs = time.perf_counter() - start
    sampled = sum(len(output.generated_tokens) for output in outputs.values())
    rate = num_ids * len(wave) / ours
    return f"first turns only: engine {rate:,.0f} ids/s, generate_batch {sampled / theirs:,.0f} ids/s ({sampled} ids)"


def measure(num_episodes: int, num_rounds: int, seed: int, *, wave: bool) -> None:
    """Run the rounds and print the table."""
    tokenizer = build_tokenizer()
    model = make_model(tokenizer, seed)
    episodes = make_episodes(tokenizer, num_episodes, seed)
    num_sampled = sum(turn.num_sampled for episode in episodes for turn in episode.turns)

    engine = TransformersEngine(make_model(tokenizer, seed))

    def engine_run(todo: list[Episode] = episodes) -> float:
        async def run() -> float:
            await engine.reset_prefix_cache()
            start = time.perf_counter()
            await run_engine(engine, todo)
            return time.perf_counter() - start

        return asyncio.run(run())

    def generate_run(*, logprobs: bool) -> float:
        start = time.perf_counter()
        run_generate(model, episodes, logprobs=logprobs)
        return time.perf_counter() - start

    sides: dict[str, Callable[[], float]] = {
        "TransformersEngine": engine_run,
        "generate() turn by turn, with logprobs": lambda: generate_run(logprobs=True),
        "generate() turn by turn, without": lambda: generate_run(logprobs=False),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(num_rounds + 1):
        for name, run in sides.items():
            elapsed = run()
            if number > 0:  # the first round warms up
                seconds[name].append(elapsed)

    ours = seconds["TransformersEngine"]
    print(f"{num_episodes} episodes, {num_sampled} sampled ids, {num_rounds} rounds, {torch.get_num_threads()} threads")
    print(f"{'':40} {'median s':>9} {'ids/s':>8} {'ratio':>6}")
    for name, times in seconds.items():
        ratio = statistics.median(theirs / mine for theirs, mine in zip(times, ours, strict=True))
        median = statistics.median(times)
        print(f"{name:40} {median:9.3f} {num_sampled / median:8,.0f} {ratio:6.2f}")
    if wave:
        print(compare_first_turns(model, engine_run, episodes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--wave", action="store_true", help="also time transformers' generate_batch on first turns")
    arguments = parser.parse_args()
    measure(arguments.episodes, arguments.rounds, arguments.seed, wave=arguments.wave)


if __name__ == "__main__":
    main()
