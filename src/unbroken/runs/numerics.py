"""`unbroken numerics MODEL`: whether sampler and trainer compute the same bits for a model on this machine.

The same rows are sampled by the embedded engine in three ways, and scored by the trainer's own forward pass, which has
other shapes: several rows at once, each as a whole.

    one pass    the engine scores whole rows: neither a cache nor other rows
    alone       ids one by one, with a cache, no other row beside
    together    conversations of several turns, which come and go: batches of all sizes, prompts in pieces, prefixes
                that are cached
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from unbroken.engines.transformers import TransformersEngine, TransformersEngineConfig
from unbroken.errors import InvalidInputError
from unbroken.exactness import find_other_bits
from unbroken.training.metrics.mismatch import Mismatch, mismatch
from unbroken.training.model.logprobs import PolicyLogprobs
from unbroken.types import Logprobs, Numerics, SampleRequest, SamplingParams, TokenIds, token_ids

NUM_TURNS = 3
_NUM_ALONE = 4
_ROWS_PER_PASS = 5
_CHUNK_SIZE = 256
_CERTAIN = -1e-4
"""A logprob above is 0 but for rounding, by whatever arithmetic."""
_MEAN_GIVEN = 16
"""Ids of a prompt, or of what comes between two turns; their number is drawn from a geometric distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRow:
    """A row as one of the ways sampled it."""

    token_ids: TokenIds
    logprobs: Logprobs
    """[T] by the engine; NaN where the id was not sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericsReport:
    """Sampler against trainer, with one setting of `Numerics`."""

    numerics: Numerics
    refused: str | None = None
    """Why this model cannot have it here; then nothing was measured."""
    ways: dict[str, Mismatch]
    proves_nothing: bool = False
    """Whether ids are so certain, or so alike, that any arithmetic would give equal logprobs."""
    ids_per_cpu_s: float = 0.0
    """That the engine sampled together."""
    trained_ids_per_cpu_s: float = 0.0
    """Of forward and backward passes."""

    @property
    def is_exact(self) -> bool:
        """Whether every logprob was equal, and need not have been."""
        return bool(self.ways) and not self.proves_nothing and all(way.equal_share == 1.0 for way in self.ways.values())


async def compare_numerics(model: Any, *, num_rows: int, max_tokens: int, seed: int) -> list[NumericsReport]:
    """Compare with each setting; `model` is copied."""
    return [
        await _compare(copy.deepcopy(model), copy.deepcopy(model), numerics, num_rows, max_tokens, seed)
        for numerics in Numerics
    ]


def describe(model: Any, reports: Sequence[NumericsReport]) -> str:
    """The report as text."""
    num_threads = torch.get_num_threads()
    lines = [
        f"{type(model).__name__}, {model.num_parameters():,} parameters, {model.dtype} on {model.device}, "
        f"{num_threads} thread{'s' * (num_threads > 1)}, torch {torch.__version__}",
        "",
        f"{'':8}{'sampled':12}{'tokens':>8}{'equal':>9}{'largest difference':>20}{'k3':>10}",
    ]
    for report in reports:
        if report.refused is not None:
            lines.append(f"{report.numerics:8}refused: {report.refused}")
        for way, found in report.ways.items():
            share = f"{100 * found.equal_share:.1f} %"
            lines.append(
                f"{report.numerics:8}{way:12}{found.num_tokens:>8}{share:>9}{found.max_abs:>20.2g}{found.k3:>10.1e}"
            )
        if report.ways:
            sampled, trained = f"{report.ids_per_cpu_s:,.0f}", f"{report.trained_ids_per_cpu_s:,.0f}"
            lines.append(f"{'':8}{sampled} ids a CPU second sampled, {trained} trained")
    if (module := find_other_bits(model)) is not None:
        lines += ["", f"the first module that has other bits for a row beside a longer one: {module}"]
    exact = next(report for report in reports if report.numerics is Numerics.EXACT)
    verdict = 'exact, with trainer.numerics = "exact"' if exact.is_exact else "not exact here"
    if exact.proves_nothing:
        verdict = "none: these weights are too certain of their ids for rounding to show"
    return "\n".join([*lines, "", f"verdict: {verdict}"])


async def _compare(
    sampling: Any, training: Any, numerics: Numerics, num_rows: int, max_tokens: int, seed: int
) -> NumericsReport:
    try:
        engine = TransformersEngine(sampling, config=TransformersEngineConfig(numerics=numerics))
        policy = PolicyLogprobs(training, chunk_size=_CHUNK_SIZE, numerics=numerics)
    except InvalidInputError as error:
        return NumericsReport(numerics=numerics, refused=str(error), ways={})
    try:
        started = time.process_time()
        together = await asyncio.gather(*(_play(engine, [seed, number], max_tokens) for number in range(num_rows)))
        sampled_s = time.process_time() - started
        alone = [await _play(engine, [seed, num_rows + number], max_tokens) for number in range(_NUM_ALONE)]
        whole = [await _score(engine, row) for row in together]
    finally:
        await engine.close()
    started = time.process_time()
    ways = {name: _compare_rows(policy, rows) for name, rows in (("one pass", whole), ("alone", alone))}
    ways["together"] = _compare_rows(policy, together)
    trained_s = time.process_time() - started
    sampled = np.concatenate([row.logprobs[~np.isnan(row.logprobs)] for row in together])
    num_trained = sum(len(row.token_ids) for row in (*whole, *alone, *together))
    return NumericsReport(
        numerics=numerics,
        ways=ways,
        proves_nothing=bool(np.mean(sampled > _CERTAIN) >= 0.02 or len(np.unique(sampled)) < len(sampled) / 2),
        ids_per_cpu_s=ways["together"].num_tokens / sampled_s,
        trained_ids_per_cpu_s=num_trained / trained_s,
    )


async def _play(engine: TransformersEngine, seed: Sequence[int], max_tokens: int) -> SampledRow:
    """A conversation of random ids, whose turns end at random."""
    rng = np.random.default_rng(list(seed))
    longest = engine.context_length // NUM_TURNS - 1
    ids, logprobs = token_ids([]), np.zeros(0, dtype=np.float32)
    for turn in range(NUM_TURNS):
        given = rng.integers(0, engine.vocab_size, min(int(rng.geometric(1 / _MEAN_GIVEN)), max(longest // 2, 1)))
        params = SamplingParams(
            max_tokens=min(int(rng.geometric(2 / max_tokens)), max_tokens, max(longest // 2, 1)),
            temperature=0.9,
            seed=int(rng.integers(2**31)),
        )
        ids = token_ids([*ids, *given])
        name = f"{'-'.join(map(str, seed))}-{turn}"
        (sequence,) = (await engine.sample(SampleRequest(request_id=name, prompt_ids=ids, params=params))).sequences
        ids = token_ids([*ids, *sequence.completion_ids])
        unknown = np.full(len(given), np.nan, dtype=np.float32)
        logprobs = np.concatenate([logprobs, unknown, sequence.rollout_logprobs])
    return SampledRow(token_ids=ids, logprobs=logprobs)


async def _score(engine: TransformersEngine, row: SampledRow) -> SampledRow:
    scored = await engine.score(row.token_ids, temperature=0.9)
    logprobs = np.concatenate([np.full(1, np.nan, dtype=np.float32), scored.logprobs])
    return SampledRow(token_ids=row.token_ids, logprobs=np.where(np.isnan(row.logprobs), np.float32(np.nan), logprobs))


def _compare_rows(policy: PolicyLogprobs, rows: Sequence[SampledRow]) -> Mismatch:
    """Score the rows, several in a pass, with their backward pass, which training would make."""
    trained: list[np.ndarray[Any, Any]] = []
    for first in range(0, len(rows), _ROWS_PER_PASS):
        part = rows[first : first + _ROWS_PER_PASS]
        shape = len(part), max(len(row.token_ids) for row in part)
        ids_BT, mask_BT = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.bool)
        for lane, row in enumerate(part):
            ids_BT[lane, : len(row.token_ids)] = torch.from_numpy(row.token_ids.astype(np.int64))
            mask_BT[lane, : len(row.token_ids)] = torch.from_numpy(~np.isnan(row.logprobs))
        logprobs_N = policy(ids_BT, mask_BT, 0.9).logprobs_N
        torch.autograd.backward(logprobs_N.sum())
        trained.append(logprobs_N.detach().numpy())
    policy.zero_grad(set_to_none=True)
    sampled = np.concatenate([row.logprobs[~np.isnan(row.logprobs)] for row in rows])
    return mismatch(np.concatenate(trained), sampled)
