"""The teachers of a run (`RunConfig.teacher`): models in this process and at servers, and which of them scores what.

Nothing of a teacher is trusted: before the first step each token of the policy's tokenizer must have the same id in the
teacher's, or the teacher would score another text than was sampled.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from anyio.from_thread import BlockingPortal, start_blocking_portal

from unbroken.decoder_config import DecoderConfig
from unbroken.errors import (
    EngineError,
    ImageError,
    InvalidInputError,
    MessagesError,
    OutageError,
    ServerBusyError,
    ServerUnreachableError,
    TemplateError,
    missing_extra,
)
from unbroken.exactness import fix_rotary
from unbroken.images.loader import find_image_parts
from unbroken.images.processor import ImageInputs, ImageProcessor, find_model_file, load_image_processor
from unbroken.ledger.nodes import Origin
from unbroken.ledger.tree import TokenTree
from unbroken.messages import Message, ToolSchema, check_conversation, get_image_source
from unbroken.progress import begin
from unbroken.rendering.base import RenderedPrompt, Renderer
from unbroken.rendering.encoding.text_codec import TextCodec
from unbroken.rendering.loader import find_other_token, load_tokenizer
from unbroken.rollout.prompts import Prompt, PromptBuilder, attach_given
from unbroken.rollout.trajectory import Trajectory, TrajectoryGroup, Turn
from unbroken.runs.config import ModelSettings, Precision, RunConfig, TeacherConfig, is_address, read_key
from unbroken.runs.models import load_config, load_model, load_model_renderer, locate
from unbroken.runs.prompts.dataset import read_messages, read_prompt
from unbroken.runs.prompts.images import place_images
from unbroken.training.model.pretrained import ADAPTER_CONFIG
from unbroken.training.teachers import RowScorer, Teachers, TeacherTask
from unbroken.types import (
    EncodedImage,
    ImageSpan,
    Logprobs,
    ScoredSequence,
    TokenIds,
    TopLogprobs,
    TrainingSample,
    token_ids,
)
from unbroken.untrusted import MAX_FACTS_BYTES, read_json_file

if TYPE_CHECKING:
    from unbroken.engines.http import HttpEngine

_logger = logging.getLogger(__name__)
_NUM_AT_ONCE = 32
"""Rows that a server is asked for at the same time."""
_ASK_EVERY_S = 2.0
_NUM_COMPARED = 1000
"""Tokens whose texts are sent to a server together, to compare the ids that it makes of them."""


async def open_teachers(
    stack: AsyncExitStack,
    config: RunConfig,
    source: str | Path,
    *,
    context_length: int,
    images: ImageInputs | None = None,
) -> Teachers | None:
    """Load the teachers of a run whose policy is `source`, or connect to them until the stack is closed; None without.

    `context_length` is that of the engine, which the policy's rotary factors are fixed for too; `images` is how the
    policy takes images, if it does.

    Raises:
        InvalidInputError: there is no such model, it has another tokenizer or image processor, or it is an adapter of
            another model.
        EngineError: a server does not answer, or cannot score at the run's temperature.
    """
    if config.teacher is None:
        return None
    tokenizer, processor = load_tokenizer(str(source)), None if images is None else images.processor
    models: dict[str, Any] = {}
    for name, model in zip(config.teacher.names, config.teacher.models, strict=True):
        begin(f"opening the teacher {name}")
        if is_address(model):
            served = await asyncio.to_thread(partial(_ServedTeacher.open, model, config, tokenizer, processor))
            stack.push_async_callback(asyncio.to_thread, served.close)
            models[name] = served
        else:
            models[name] = _load(str(model), config, source, tokenizer, processor)
            fix_rotary(models[name], context_length)
    top_k = config.teacher.top_k
    if config.teacher.column is None and config.teacher.prompt is None:
        return Teachers(models=models, top_k=top_k)
    contexts = None
    if config.teacher.prompt is not None:
        max_ids = {name: _find_max_ids(each) for name, each in models.items()}
        renderer = load_model_renderer(source, config.renderer, config.rollouts.sampling, images=images)
        contexts = _Contexts(renderer, max_ids)
    return Teachers(models=models, choose=partial(_choose, config.teacher, tuple(models), contexts), top_k=top_k)


def _find_max_ids(teacher: Any) -> int | None:
    """The longest row that a teacher scores; None: any."""
    return teacher.max_ids if isinstance(teacher, RowScorer) else DecoderConfig(teacher.config).max_positions


def _load(model: str, config: RunConfig, source: str | Path, tokenizer: Any, images: ImageProcessor | None) -> Any:
    """Load a teacher, in the type that layers are computed in, into which they are rounded in each product anyway."""
    settings = ModelSettings(
        attn_implementation=config.model_settings.attn_implementation,
        dtype=Precision.BFLOAT16 if config.precision is Precision.BFLOAT16 else Precision.FLOAT32,
    )
    parallel = config.trainer.parallel
    is_bfloat16, takes_images = config.precision is Precision.BFLOAT16, images is not None
    load = partial(load_model, settings=settings, takes_images=takes_images, parallel=parallel, is_bfloat16=is_bfloat16)
    try:
        adapter = find_model_file(model, ADAPTER_CONFIG)
    except OSError:
        adapter = None  # `load_model` has the error
    if adapter is None:
        _check_tokenizer(model, tokenizer)
        if images is not None:
            _check_images(model, images.description, _describe_images(model))
        return load(model)
    if parallel.is_sharded:
        raise InvalidInputError(
            f"trainer.parallel must be left out with the adapter {model} as a teacher: an adapter is not merged into "
            "parts of a model. Give a merged model (unbroken export)"
        )
    _check_base(adapter, source)
    try:
        from peft import PeftModel
    except ModuleNotFoundError as error:
        raise missing_extra(error, "an adapter as a teacher needs the lora extra", "lora") from error
    return PeftModel.from_pretrained(load(source), str(adapter.parent)).merge_and_unload()


def _check_base(adapter: Path, source: str | Path) -> None:
    """Raise `InvalidInputError` unless an adapter is one of the policy's first model."""
    try:
        base = dict(read_json_file(adapter, max_bytes=MAX_FACTS_BYTES)).get("base_model_name_or_path")
    except (OSError, ValueError, TypeError) as error:
        raise InvalidInputError(f"teacher.models must be models or adapters, got {adapter}: {error}") from None
    if base is None or locate(str(base)) != locate(source):
        raise InvalidInputError(
            f"teacher.models must be models, or adapters of the policy's model {str(source)!r}, and "
            f"base_model_name_or_path in {adapter} is {base!r}: if that model has moved, change it there"
        )


def _check_tokenizer(model: str, tokenizer: Any) -> None:
    """Raise `InvalidInputError` unless each token of the policy's tokenizer has the same id in that of the model."""
    if (difference := find_other_token(tokenizer, load_tokenizer(model))) is not None:
        raise InvalidInputError(
            f"teacher.models must have the policy's tokenizer, and {model!r} has {difference} in the policy's: it "
            "would score another text. Take a teacher of the same family"
        )


def _describe_images(model: str) -> str | None:
    """The settings of a model's image processor; None if it takes no images."""
    try:
        processor = load_image_processor(model)
    except InvalidInputError as error:
        raise InvalidInputError(f"teacher.models must take images as the policy does: {error}") from None
    # A text model's folder may have its family's processor, and no vision tower.
    has_tower = load_config(model, ModelSettings(), takes_images=True) is not None
    return processor.description if processor is not None and has_tower else None


def _check_images(model: str, own: str, other: str | None) -> None:
    """Raise `InvalidInputError` unless a teacher makes the same ids and pixels of an image as the policy."""
    rule = "teacher.models must have the policy's image processor"
    if other is None:
        raise InvalidInputError(
            f"{rule}, and {model!r} takes no images, or does not say how: take a teacher of the same family (a server "
            "of unbroken serve), or images = false if no row has one"
        )
    ours, theirs = json.loads(own), json.loads(other)
    for name in sorted({*ours, *theirs}):
        if ours.get(name) != theirs.get(name):
            raise InvalidInputError(
                f"{rule}, and {model!r} has {name} {theirs.get(name)!r} where the policy has {ours.get(name)!r}: it "
                "would see another picture. Take a teacher of the same family"
            )


class _Gap(StrEnum):
    """Why a rollout's ids are not shown to be those of the teacher's conversation. The names are metrics."""

    FORKED = "forked"
    """A prompt of its own did not continue the turn before, or its messages were replaced."""
    OTHER_TOOLS = "other_tools"
    """It had other tools than the first rollout of its group, whose tools the teacher's prompt shows."""
    OTHER_IMAGES = "other_images"
    """It began with other images than the first rollout of its group, whose images the teacher's prompt shows."""
    OTHER_PROMPT = "other_prompt"
    """Its own first messages are other ids by the run's template: its agent asked with options of its own."""
    NO_BRIDGE = "no_bridge"
    """After the teacher's prompt there is no bridge: its next prompt would not begin with the ids so far."""
    OTHER_IDS = "other_ids"
    """After the teacher's prompt there would be other ids between two turns, as where a template repeats a text."""
    TOO_LONG = "too_long"
    """After the teacher's prompt the last turn would end beyond the teacher's context."""


class _Given(NamedTuple):
    """What a rollout was given before a turn: of the first turn its prompt."""

    messages: Sequence[Message]
    token_ids: TokenIds
    images: tuple[ImageSpan, ...]
    """Offsets count from the first of these ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opening:
    """How the teacher's conversation begins, in the place of what rollouts were given before their first turn."""

    messages: Sequence[Message]
    tools: Sequence[ToolSchema]
    images: Sequence[EncodedImage]
    """Of the rollouts, and so of its messages."""
    prompt: RenderedPrompt


class _Contexts:
    """The conversations of a teacher with prompts of its own, rendered as the policy's are.

    A rollout of two turns, with a hint before the same question:

        the policy     Q | said | tool reply | said        its row          1 2 3 | 7 8 | 4 5 | 9
        the teacher    hint Q | said | tool reply | said   the teacher's    6 1 2 3 | 7 8 | ? ? | 9

    What is sampled is the same. `? ?` is what the renderer's bridge has after the teacher's messages; the rollout is
    scored only if that is 4 5, with the same images in it. And only if this renderer makes 1 2 3 of Q: a gateway may
    have rendered it with options that an agent asked for, and then 6 1 2 3 is what nobody would have sampled from.
    """

    def __init__(self, renderer: Renderer, max_ids: Mapping[str, int | None]) -> None:
        """`max_ids` has the context of each teacher; None: without end."""
        self._renderer = renderer
        self._max_ids = max_ids
        self._said: set[_Gap] = set()
        """What was warned of, once each."""

    def make_task(self, teacher: str, cell: Any, group: TrajectoryGroup) -> TeacherTask:
        """The task of a group, from the cell of the prompt's column."""
        spoken = [each for each in group.trajectories if each.num_sampled]
        if not spoken:
            return TeacherTask(teacher=teacher)  # of no row
        opening = self._open(cell, spoken[0], group=group.group_id)
        unproven: dict[str, str] = {}
        for each in spoken:
            gap = self._find_gap(each, opening, max_ids=self._max_ids[teacher])
            if gap is not None:
                unproven[each.trajectory_id] = gap
                self._warn(gap, each.trajectory_id)
        prompt = opening.prompt
        return TeacherTask(teacher=teacher, prompt_ids=prompt.token_ids, prompt_images=prompt.images, unproven=unproven)

    def _open(self, cell: Any, first: Trajectory, *, group: str) -> _Opening:
        """The teacher's prompt, with the tools and the images of the first rollout of a group."""
        images = _find_first_images(first)
        try:
            messages = _read_messages(cell, images)
            prompt = self._renderer.render(messages, tools=first.tools)
        except (MessagesError, ImageError, TemplateError) as error:
            raise InvalidInputError(f"teacher.prompt of group {group} cannot be rendered: {error}") from error
        return _Opening(messages=messages, tools=first.tools, images=images, prompt=prompt)

    def _find_gap(self, trajectory: Trajectory, opening: _Opening, *, max_ids: int | None) -> _Gap | None:
        """Compare what a rollout was given with what this renderer makes of its messages, and of the teacher's."""
        if trajectory.tools != opening.tools:
            return _Gap.OTHER_TOOLS
        if _find_first_images(trajectory) != opening.images:
            return _Gap.OTHER_IMAGES
        given = _split(trajectory)
        if given is None:
            return _Gap.FORKED
        if not self._makes_prompt(given[0], trajectory.tools):
            return _Gap.OTHER_PROMPT
        return self._compare_bridges(trajectory.turns, given, opening, max_ids=max_ids)

    def _makes_prompt(self, given: _Given, tools: Sequence[ToolSchema]) -> bool:
        """Whether this renderer makes a rollout's own first prompt of its messages."""
        try:
            own = self._renderer.render(given.messages, tools=tools)
        except (MessagesError, ImageError, TemplateError):
            return False
        return np.array_equal(own.token_ids, given.token_ids) and own.images == given.images

    def _compare_bridges(
        self, turns: Sequence[Turn], given: Sequence[_Given], opening: _Opening, *, max_ids: int | None
    ) -> _Gap | None:
        """Render the teacher's conversation turn by turn, and compare what is between the turns."""
        tree = TokenTree()
        prompts = PromptBuilder(self._renderer, tree)
        first = opening.prompt
        position = tree.add_given(first.token_ids, Origin.PROMPT, parent=None, images=first.images)
        earlier, last = list(opening.messages), None
        for own, turn in zip(given, turns, strict=True):
            if last is not None:
                prompt = _continue(partial(prompts.extend, last, own.messages, earlier=earlier, tools=opening.tools))
                if prompt is None:
                    return _Gap.NO_BRIDGE
                made = prompt.given
                if not np.array_equal(made.token_ids, own.token_ids) or made.images != own.images:
                    return _Gap.OTHER_IDS
                position = attach_given(tree, last.end, made)
                earlier += [last.message, *own.messages]
            last = replace(turn, prompt_end=position, end=tree.add_sampled(turn.sequence, parent=position))
        is_long = max_ids is not None and last is not None and len(tree.token_ids(last.end)) > max_ids
        return _Gap.TOO_LONG if is_long else None

    def _warn(self, gap: _Gap, name: str) -> None:
        if gap not in self._said:
            self._said.add(gap)
            _logger.warning(
                "the teacher does not score rollout %s: it is not shown that after teacher.prompt its conversation has "
                "the same ids (%s). Such rollouts are counted (counters/teacher_skips/%s) and learn from their rewards "
                "alone, with the algorithm distillation from nothing: see docs/teachers.md",
                name,
                gap,
                gap,
            )


def _continue(extend: Callable[[], Prompt]) -> Prompt | None:
    """The prompt, if a bridge makes it; None if it was rendered anew, which may fail too."""
    try:
        prompt = extend()
    except (MessagesError, ImageError, TemplateError):
        return None
    return None if prompt.continued is None else prompt


def _find_first_images(trajectory: Trajectory) -> list[EncodedImage]:
    """The images before the first turn, in order."""
    ends = [turn.prompt_end for turn in trajectory.turns[:1]]
    return [span.image for end in ends for span in trajectory.tree.images(end)]


def _split(trajectory: Trajectory) -> list[_Given] | None:
    """What was given before each turn; None if a prompt does not continue the turn before, or the messages no longer
    have all turns, or the turns not all that was sampled.
    """
    num_sampled = sum(len(turn.sequence.completion_ids) - turn.sequence.num_given for turn in trajectory.turns)
    # Those of a session are all messages, also of sub-agents: a file of rollouts has no others, and verify reads it.
    sessions = trajectory.conversations
    messages: Sequence[Any] = trajectory.messages if sessions is None else sessions.messages
    places = _find_replies(messages, trajectory.turns)
    if num_sampled != trajectory.num_sampled or places is None:
        return None
    found: list[_Given] = []
    so_far, start, tree = token_ids([]), 0, trajectory.tree
    seen: tuple[ImageSpan, ...] = ()
    for place, turn in zip(places, trajectory.turns, strict=True):
        prompt, num_ids = tree.token_ids(turn.prompt_end), len(so_far)
        spans = tree.images(turn.prompt_end)
        # Another image of the same size has the same ids.
        if not np.array_equal(prompt[:num_ids], so_far) or spans[: len(seen)] != seen:
            return None
        images = tuple(replace(span, offset=span.offset - num_ids) for span in spans[len(seen) :])
        found.append(_Given(messages[start:place], prompt[num_ids:], images))
        so_far, seen, start = tree.token_ids(turn.end), spans, place + 1
    return found


def _find_replies(messages: Sequence[Message], turns: Sequence[Turn]) -> list[int] | None:
    """Where in the messages the turns are; None if one is not there. From the end: the first messages may have examples
    of replies.
    """
    places = [len(messages)]
    for turn in reversed(turns):
        earlier = range(places[0] - 1, -1, -1)
        if (place := next((k for k in earlier if messages[k] == turn.message), None)) is None:
            return None
        places.insert(0, place)
    return places[:-1]


def _read_messages(cell: Any, images: Sequence[EncodedImage]) -> list[Message]:
    """The messages of a cell of the column of `teacher.prompt`, with these images in their places.

    Without places, they come first in the first user message, as those of a data set's column of images do.
    """
    prompt, place = read_prompt(cell), "a cell of the column of teacher.prompt"
    if not isinstance(prompt, (str, list)):
        raise MessagesError(f"{place} must be text or messages, got {prompt!r}")
    messages: list[Any] = (
        [{"role": "user", "content": prompt}] if isinstance(prompt, str) else read_messages(prompt, place=place)
    )
    parts = find_image_parts(messages)
    if own := [name for name, part in parts if get_image_source(part) is not None]:
        raise MessagesError(
            f'{place} must have places for images, {{"type": "image"}}, which get those of the policy\'s prompt, got '
            f"an image of its own in {own[0]}"
        )
    if parts and len(parts) != len(images):
        raise MessagesError(
            f"{place} must have no places for images, or one for each of the {len(images)} of the policy's prompt, "
            f"got {len(parts)}"
        )
    placed = place_images(messages, images, folder=None, place=place)
    check_conversation(placed)
    return placed


def _choose(
    config: TeacherConfig, names: Sequence[str], contexts: _Contexts | None, group: TrajectoryGroup
) -> TeacherTask | None:
    """Who scores the trajectories of a group, by its row of the data set.

    Raises `InvalidInputError` if the row has no such column, or a cell is no prompt.
    """
    columns = _find_columns(config, group)
    teacher = names[0] if config.column is None else columns[config.column]
    if teacher is None:
        return None
    cell = None if config.prompt is None else columns[config.prompt]
    if cell is None or contexts is None:
        return TeacherTask(teacher=teacher)
    return contexts.make_task(teacher, cell, group)


def _find_columns(config: TeacherConfig, group: TrajectoryGroup) -> Mapping[str, Any]:
    """The columns of a group's row, among them those that the teacher needs."""
    columns: Mapping[str, Any] = (group.data or {}).get("columns") or {}
    for field, name in (("column", config.column), ("prompt", config.prompt)):
        if name is not None and name not in columns:
            raise InvalidInputError(
                f"teacher.{field} must be a column of the data set, and the row of group {group.group_id} has "
                f"{', '.join(columns) or 'none'}, got {name!r}"
            )
    return columns


class _ServedTeacher:
    """A teacher at a server, with blocking calls, on an event loop in a thread of its own."""

    def __init__(
        self, url: str, engine: HttpEngine, portal: BlockingPortal, close: Callable[[], None], wait_s: float
    ) -> None:
        self.vocab_size = engine.vocab_size
        self.max_ids: int | None = engine.context_length
        self.close = close
        self._url = url
        self._engine = engine
        self._portal = portal
        self._wait_s = wait_s
        self._is_waiting = False
        """Whether an outage was said: of the rows in flight each sees it."""

    @classmethod
    def open(cls, url: str, config: RunConfig, tokenizer: Any, images: ImageProcessor | None) -> _ServedTeacher:
        """Connect to a server, and compare its tokenizer and image processor; raises as `open_teachers`."""
        assert config.teacher is not None, "it has the server"
        try:
            from unbroken.engines.http import HttpEngine
        except ImportError as error:
            raise missing_extra(error, f"the teacher at {url} needs the client extra", "client") from error
        key = read_key(config.teacher.api_key_file, field="teacher.api_key_file")
        with ExitStack() as stack:
            portal = stack.enter_context(start_blocking_portal())
            connect = partial(HttpEngine.connect, api_key=key, wait_s=config.engine.wait_s, vocab_size=len(tokenizer))
            engine = portal.call(connect, [url])
            stack.callback(portal.call, engine.close)
            portal.call(_compare_tokenizer, url, key, tokenizer, engine.context_length)
            if images is not None:
                _check_images(url, images.description, engine.image_processor)
            # Of stock vLLM only temperature 1 has logprobs of a prompt, and as many as it allows: said before the first
            # step. More than there are ids `Teachers` refuses, for any teacher.
            temperature = config.rollouts.sampling.temperature or 1.0
            num_top = min(config.teacher.top_k, engine.vocab_size)
            portal.call(partial(engine.score, token_ids(range(2)), temperature=temperature, num_top_logprobs=num_top))
            return cls(url, engine, portal, stack.pop_all().close, config.loop.outages.wait_s)

    def score(self, rows: Sequence[TrainingSample], *, num_top: int = 0) -> list[tuple[Logprobs, TopLogprobs | None]]:
        """See `RowScorer`. A server that does not answer is waited for.

        Raises:
            OutageError: it did not answer for `loop.outages.wait_s`.
            EngineError: it refuses a row.
        """
        return self._portal.call(self._score_all, rows, num_top)

    async def _score_all(
        self, rows: Sequence[TrainingSample], num_top: int
    ) -> list[tuple[Logprobs, TopLogprobs | None]]:
        limit = asyncio.Semaphore(_NUM_AT_ONCE)

        async def score(row: TrainingSample) -> tuple[Logprobs, TopLogprobs | None]:
            async with limit:
                return await self._score(row, num_top)

        return list(await asyncio.gather(*map(score, rows)))

    async def _score(self, row: TrainingSample, num_top: int) -> tuple[Logprobs, TopLogprobs | None]:
        deadline_s = time.monotonic() + self._wait_s
        while True:
            try:
                scored = await self._engine.score(
                    row.token_ids, images=row.images, temperature=row.temperature, num_top_logprobs=num_top
                )
                self._is_waiting = False
                return self._read(row, scored), self._read_top(row, scored, num_top)
            except (ServerUnreachableError, ServerBusyError) as error:
                if time.monotonic() >= deadline_s:
                    raise OutageError(
                        f"the teacher at {self._url} did not score a row for {self._wait_s:g} s (loop.outages.wait_s): "
                        f"{error}. Start it again; the same command continues the run from its last checkpoint"
                    ) from error
                if not self._is_waiting:
                    _logger.warning("waiting up to %g s for the teacher at %s: %s", self._wait_s, self._url, error)
                self._is_waiting = True
                await asyncio.sleep(_ASK_EVERY_S)

    def _read(self, row: TrainingSample, scored: ScoredSequence) -> Logprobs:
        logprobs = np.concatenate([np.full(1, np.nan, np.float32), np.asarray(scored.logprobs, dtype=np.float32)])
        if len(logprobs) != len(row.token_ids):
            raise EngineError(
                f"the teacher at {self._url} gave {len(logprobs) - 1} logprobs for {len(row.token_ids)} ids: it must "
                "give one for each after the first"
            )
        return np.where(row.sampled_mask, logprobs, np.float32(np.nan))

    def _read_top(self, row: TrainingSample, scored: ScoredSequence, num_top: int) -> TopLogprobs | None:
        """[S, K] at the sampled ids; the first id of a row is never sampled (I2)."""
        if not num_top:
            return None
        top, shape = scored.top_logprobs, (len(row.token_ids) - 1, num_top)
        if top is None or top.token_ids.shape != shape:
            raise EngineError(
                f"the teacher at {self._url} must give most likely ids of the shape {shape} for {len(row.token_ids)} "
                f"ids and teacher.top_k {num_top}, and gave {None if top is None else top.token_ids.shape}"
            )
        is_sampled = row.sampled_mask[1:]
        return TopLogprobs(token_ids=top.token_ids[is_sampled], logprobs=top.logprobs[is_sampled])


async def _compare_tokenizer(url: str, api_key: str | None, tokenizer: Any, context_length: int) -> None:
    """Raise `InvalidInputError` unless a server makes the policy's ids of the texts of all of the policy's tokens."""
    from unbroken.client import AsyncClient  # of the client extra, which whoever calls this has

    codec = TextCodec(tokenizer)
    texts = [codec.decode([token_id]) for token_id in sorted(tokenizer.get_vocab().values())]
    size = max(1, min(_NUM_COMPARED, context_length // 8))  # the texts of some tokens become several
    async with AsyncClient(url, api_key=api_key) as client:
        for start in range(0, len(texts), size):
            text = " ".join(texts[start : start + size])
            own, other = (
                codec.encode(text, add_special_tokens=False),
                await client.tokenize(text, add_special_tokens=False),
            )
            if not np.array_equal(own, other):
                place = next((k for k, pair in enumerate(zip(own, other, strict=False)) if pair[0] != pair[1]), -1)
                raise InvalidInputError(
                    f"teacher.models must have the policy's tokenizer, and the one at {url} has the id {other[place]} "
                    f"for {codec.decode([own[place]])!r}, which is {own[place]} in the policy's: it would score "
                    "another text. Serve a model of the same family"
                )
