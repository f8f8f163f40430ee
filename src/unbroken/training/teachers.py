"""Teachers: other models, which score the ids that the policy has sampled (docs/teachers.md).

A teacher sees a row's own ids, or another prompt before the same completion. Worked example, a row that trains 7 8:

    row of the policy       token_ids 1 2 3 7 8      sampled_mask - - - x x
    prompt of the teacher   9 1 2 3                  the problem, after a hint
    row of the teacher      token_ids 9 1 2 3 7 8    sampled_mask - - - - x x    its logprobs of 7 8 are the row's

After a second turn, 1 2 3 7 8 4 5 6, the ids 4 5 between the turns are the teacher's too only if its own conversation,
rendered as the policy's was, has the same there. Images are those of the teacher's prompt, and then the row's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from unbroken.errors import InvalidInputError, TrainingError
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.training.sums import Sums
from unbroken.types import (
    NO_VERSION,
    ImageSpan,
    Logprobs,
    TokenIds,
    TopLogprobs,
    TrainingSample,
    find_misplaced_span,
)


@runtime_checkable
class RowScorer(Protocol):
    """A teacher that is elsewhere, such as at a server."""

    vocab_size: int
    """Number of ids that it has embeddings for."""
    max_ids: int | None
    """The longest row that it takes; None if there is no such bound."""

    def score(self, rows: Sequence[TrainingSample], *, num_top: int = 0) -> list[tuple[Logprobs, TopLogprobs | None]]:
        """Of each row [T] the logprob of each sampled id at the row's temperature, NaN elsewhere, and with `num_top`
        the most likely ids at each of the S sampled ids, [S, num_top]. Blocks.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherTask:
    """Who scores a trajectory, and in which context."""

    teacher: str
    """Its name."""
    prompt_ids: TokenIds | None = None
    """What the teacher sees in the place of the first prompt; None: the prompt itself."""
    prompt_images: tuple[ImageSpan, ...] = ()
    """The images in `prompt_ids`, in order."""
    unproven: Mapping[str, str] | None = None
    """By the id of a trajectory, why not all of its ids after the first prompt are those of the teacher's conversation:
    it is not scored, and counted by that. Of all others they were compared. None: nobody has compared them, so that
    rows with given ids after the first sampled one are refused."""

    def __post_init__(self) -> None:
        num_ids = 0 if self.prompt_ids is None else len(self.prompt_ids)
        if (problem := find_misplaced_span(self.prompt_images, num_ids, of="prompt_ids")) is not None:
            raise InvalidInputError(f"TeacherTask.prompt_images must be in prompt_ids: {problem}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherLogprobs:
    """What a teacher says of a row."""

    teacher: str
    """Its name."""
    logprobs: Logprobs
    """[T], NaN where the id was not sampled."""
    top: TopLogprobs | None = None
    """[S, K] its most likely ids at each sampled id, with `Teachers.top_k`; those that the policy does not have are
    left out: id 0 with the logprob -inf."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Teachers:
    """The teachers of a trainer, which takes over those that are models."""

    models: Mapping[str, Any]
    """By name: models of transformers, which are frozen, and `RowScorer`s."""
    choose: Callable[[TrajectoryGroup], TeacherTask | None] | None = None
    """Who scores the trajectories of a group; None for nobody. Without it the only teacher scores all rows."""
    top_k: int = 0
    """The policy learns these most likely ids of a teacher at each sampled id; 0: from the sampled ids alone."""

    def __post_init__(self) -> None:
        if not self.models or (self.choose is None and len(self.models) > 1):
            raise InvalidInputError(
                f"Teachers.models must hold exactly one teacher without `choose`, got {sorted(self.models)}"
            )
        if self.top_k < 0:
            raise InvalidInputError(f"Teachers.top_k must be >= 0, got {self.top_k}")
        for name, model in self.models.items() if self.top_k else ():
            # The policy's own vocabulary may be larger: teachers of a family may lack embeddings for ids of padding.
            is_scorer = isinstance(model, RowScorer)
            size: int = model.vocab_size if is_scorer else model.config.get_text_config().vocab_size
            if self.top_k > size:
                raise InvalidInputError(
                    f"top_k must be <= {size}, all ids that the teacher {name!r} has, got {self.top_k}"
                )

    @property
    def default_task(self) -> TeacherTask | None:
        """What is done with rows of no group; None: nobody scores them."""
        return TeacherTask(teacher=next(iter(self.models))) if self.choose is None else None

    def find_task(self, group: TrajectoryGroup) -> TeacherTask | None:
        """Who scores the trajectories of a group; raises `InvalidInputError` if there is no such teacher."""
        if self.choose is None:
            return self.default_task
        task = self.choose(group)
        if task is not None and task.teacher not in self.models:
            raise InvalidInputError(
                f"group {group.group_id} must have one of the teachers {', '.join(self.models)}, got {task.teacher!r}"
            )
        return task


@dataclass(frozen=True, slots=True)
class TeacherSums(Sums):
    """Sums over the loss tokens that one teacher has scored."""

    num_tokens: int = 0
    kl_sum: float = 0.0
    """Of logprob - teacher's logprob, by the old logprobs."""
    num_worse: int = 0
    """Tokens that the teacher finds less likely than the policy does."""
    top_mass_sum: float = 0.0
    """Of the probability that the teacher gives to its most likely ids together, with `Teachers.top_k`."""

    @classmethod
    def of(cls, gaps: NDArray[np.float64], masses: NDArray[np.float64]) -> TeacherSums:
        """Of a row, by logprob - teacher's logprob at each of its loss tokens, and the `masses` of its top ids."""
        return cls(len(gaps), float(gaps.sum()), int((gaps > 0).sum()), float(masses.sum()))


def make_teacher_row(row: TrainingSample, task: TeacherTask) -> TrainingSample:
    """The row as its teacher sees it.

    Raises:
        InvalidInputError: the row has another prompt, and ids between its turns, which were rendered after the policy's
            prompt, and nobody has compared them with the teacher's (`TeacherTask.unproven`). Or it was sampled from
            another distribution than the model's own.
    """
    if task.prompt_ids is None:
        return row
    start = int(row.sampled_mask.argmax())
    if task.unproven is None and not row.sampled_mask[start:].all():
        raise InvalidInputError(
            f"a teacher with its own prompt must have rows of one turn, or TeacherTask.unproven, got one with given "
            f"ids among its {len(row.token_ids) - start} from the first sampled one on"
        )
    check_plain(row, whose="a teacher with its own prompt")
    length = len(task.prompt_ids)
    later = (replace(span, offset=span.offset - start + length) for span in row.images if span.offset >= start)

    def move(values: NDArray[Any], given: float) -> NDArray[Any]:
        return np.concatenate([np.full(length, given, dtype=values.dtype), values[start:]])

    return replace(
        row,
        token_ids=np.concatenate([task.prompt_ids, row.token_ids[start:]]),
        sampled_mask=move(row.sampled_mask, False),
        loss_mask=move(row.loss_mask, False),
        rollout_logprobs=move(row.rollout_logprobs, np.nan),
        policy_versions=move(row.policy_versions, NO_VERSION),
        advantages=move(row.advantages, 0),
        images=(*task.prompt_images, *later),
        routed_experts=None,
    )


def check_teacher_rows(
    name: str, rows: Sequence[TrainingSample], *, vocab_size: int, max_ids: int | None, is_elsewhere: bool
) -> None:
    """Raise `InvalidInputError` if a teacher has no embedding for an id, or no place for a row; or if the sampler's
    logits were changed, and those of the teacher cannot be, because it `is_elsewhere`.
    """
    for row in rows:
        if is_elsewhere:
            check_plain(row, whose=f"teacher {name!r}, which is elsewhere,")
        kept = row.token_ids if row.kept_ids is None else row.kept_ids.token_ids
        named = [row.token_ids.max(), kept.max(initial=0), *(span.controls.largest_id for span in row.controls)]
        if (largest := int(max(named))) >= vocab_size:
            raise InvalidInputError(
                f"teacher {name!r} must have an embedding for each id of a row, got id {largest}, and its vocabulary "
                f"ends at {vocab_size - 1}: it is of another tokenizer, or has no embeddings for ids of padding"
            )
        if max_ids is not None and len(row.token_ids) > max_ids:
            raise InvalidInputError(
                f"teacher {name!r} must have room for each row, got one of {len(row.token_ids)} ids, and its context "
                f"is {max_ids}: lower rollouts.sampling.max_tokens or rollouts.limits.max_tokens"
            )


def check_plain(row: TrainingSample, *, whose: str) -> None:
    """Raise `InvalidInputError` if a row was not sampled from a model's own distribution, which is `whose`."""
    if row.kept_ids is not None or row.controls:
        what = "kept_ids" if row.kept_ids is not None else "controls"
        raise InvalidInputError(
            f"{whose} must have rows without {what}, and one has some: it was sampled from another distribution than a "
            "model's own over all ids, the only one that is known there. An agent asked for it, or a script gave it"
        )


def attach_scores(
    row: TrainingSample, task: TeacherTask, scored: tuple[Logprobs, TopLogprobs | None], *, vocab_size: int
) -> TeacherLogprobs:
    """A teacher's logprobs of its own row, at the places of the policy's, which has embeddings for `vocab_size` ids.

    Raises `TrainingError` if one of a sampled id is not finite: the distance would be infinite.
    """
    num_shared = len(row.token_ids) - int(row.sampled_mask.argmax())
    logprobs = np.full(len(row.token_ids), np.nan, dtype=np.float32)
    logprobs[-num_shared:] = scored[0][-num_shared:]
    if not np.isfinite(logprobs[row.sampled_mask]).all():
        place = int(np.flatnonzero(row.sampled_mask & ~np.isfinite(logprobs))[0])
        raise TrainingError(
            f"teacher {task.teacher!r} gives id {row.token_ids[place]} at position {place} of {len(row.token_ids)} the "
            f"logprob {logprobs[place]}: the distance to it is infinite, and no update is made"
        )
    top = scored[1]
    if top is not None:
        # An id without an embedding of the policy's counts with all the others, which it has no probability of either.
        is_known = top.token_ids < vocab_size
        top = TopLogprobs(
            token_ids=np.where(is_known, top.token_ids, 0), logprobs=np.where(is_known, top.logprobs, -np.inf)
        )
    return TeacherLogprobs(teacher=task.teacher, logprobs=logprobs, top=top)


def summarize_teachers(
    sums: Mapping[str, TeacherSums], *, num_tokens: int, forward_kl: float | None = None
) -> dict[str, float | None]:
    """The metrics of a step with `num_tokens` loss tokens; with several teachers also of each, without any none.

    `forward_kl` is that of the step's updates, if they learned a teacher's most likely ids.
    """
    if not sums:
        return {}
    whole = sum(sums.values(), TeacherSums())
    found: dict[str, float | None] = {
        "teacher/kl": whole.kl_sum / whole.num_tokens if whole.num_tokens else None,
        "teacher/worse_share": whole.num_worse / whole.num_tokens if whole.num_tokens else None,
        "teacher/token_share": whole.num_tokens / num_tokens,
    }
    if forward_kl is not None:
        found |= {"teacher/forward_kl": forward_kl, "teacher/top_mass": whole.top_mass_sum / whole.num_tokens}
    if len(sums) > 1:
        for name, each in sums.items():
            found[f"teacher/kl/{name}"] = each.kl_sum / each.num_tokens if each.num_tokens else None
            found[f"teacher/token_share/{name}"] = each.num_tokens / num_tokens
    return found
