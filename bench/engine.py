"""Time 64 concurrent multi-turn episodes: `TransformersEngine` against `generate()` turn by turn.

    OMP_NUM_THREADS=1 python bench/engine.py

Both sides do the same work on the same tiny random model: every episode has 3 or 4 turns; a turn samples a number of
ids that was drawn beforehand (about 25), then gets about 20 ids (the tool's reply). Ids are random, so lengths are
forced: by `max_tokens` here, by a stopping criterion per row there.

The turn-by-turn side is what a rollout loop without an engine does: one left-padded `generate()` over all live
episodes, then the tools' replies, then the next. It feeds the whole history again each turn, and each turn lasts as
long as its longest row: nobody goes on before all are through. That is what it is, and a part of the difference. It is
measured with and without the logprobs of what was sampled, which training needs and `generate()` makes you pay for.
With --wave, `generate_batch`, the continuous batching of transformers, runs the first turns too, for the record.

Rounds alternate, and the ratio is the median of the rounds' ratios, so that a busy machine bothers both sides alike.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM, StoppingCriteria, StoppingCriteriaList
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from unbroken.engines.transformers import TransformersEngine
from unbroken.types import SampleRequest, SamplingParams, TokenIds

VOCAB_SIZE = 640
PAD_ID = 0


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


def make_episodes(num_episodes: int, seed: int) -> list[Episode]:
    """Episodes with the demo's lengths: prompts of about 60 ids, 3 or 4 turns of about 25 sampled and 20 given ids."""
    rng = np.random.default_rng(seed)

    def ids(low: int, high: int) -> TokenIds:
        return rng.integers(1, VOCAB_SIZE, rng.integers(low, high + 1), dtype=np.int32)

    return [
        Episode(
            prompt_ids=ids(55, 65),
            turns=tuple(
                Turn(num_sampled=int(rng.integers(15, 36)), given_ids=ids(17, 23)) for _ in range(rng.integers(3, 5))
            ),
        )
        for _ in range(num_episodes)
    ]


def make_model(seed: int) -> Any:
    """The demo's model with random weights."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=128,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.08,
        pad_token_id=PAD_ID,
        eos_token_id=None,
    )
    return Qwen3ForCausalLM._from_config(config, attn_implementation="sdpa").eval()


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

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:  # noqa: D102
        return self._ends <= input_ids.shape[1]


@torch.inference_mode()
def run_generate(model: Any, episodes: list[Episode], *, logprobs: bool) -> None:
    """All live episodes take each turn together, in one left-padded batch."""
    token_ids = [episode.prompt_ids for episode in episodes]
    for number in range(max(len(episode.turns) for episode in episodes)):
        live = [index for index, episode in enumerate(episodes) if number < len(episode.turns)]
        turns = [episodes[index].turns[number] for index in live]
        width = max(len(token_ids[index]) for index in live)
        prompts = torch.full((len(live), width), PAD_ID)
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
    wave = [
        Episode(prompt_ids=e.prompt_ids, turns=(Turn(num_sampled=25, given_ids=e.turns[0].given_ids),))
        for e in episodes
    ]
    ours = engine_run(wave)
    config = GenerationConfig(max_new_tokens=25, do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=PAD_ID)
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
    rate = 25 * len(wave) / ours
    return f"first turns only: engine {rate:,.0f} ids/s, generate_batch {sampled / theirs:,.0f} ids/s ({sampled} ids)"


def measure(num_episodes: int, num_rounds: int, seed: int, *, wave: bool) -> None:
    """Run the rounds and print the table."""
    model = make_model(seed)
    episodes = make_episodes(num_episodes, seed)
    num_sampled = sum(turn.num_sampled for episode in episodes for turn in episode.turns)

    def engine_run(todo: list[Episode] = episodes) -> float:
        async def run() -> float:
            engine = TransformersEngine(make_model(seed))
            start = time.perf_counter()
            await run_engine(engine, todo)
            seconds = time.perf_counter() - start
            await engine.close()
            return seconds

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
