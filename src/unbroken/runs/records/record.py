"""A trajectory as a record: plain JSON with everything known about it (docs/rollouts.md describes each key).

Worked example: the prompt 1 2, the sampled 3 4, the bridge 5, the sampled 6, with the advantage 0.5.

    token_ids          1 2 3 4 5 6
    segments           [0, 2) prompt    [2, 4) sampled    [4, 5) bridge    [5, 6) sampled
    rollout_logprobs   of the sampled ids, in order: 3 4 6
    policy_versions    [[2, 4, 7], [5, 6, 7]]         [start, stop, value]: equal neighbours are one entry
    loss               [[2, 4], [5, 6]]
    advantages         [[2, 4, 0.5], [5, 6, 0.5]]

Ids of a sampled segment without a version were given inside the completion, to close its reasoning (`num_forced`).
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from unbroken.images.loader import find_image_parts
from unbroken.ledger.export import export_samples, find_trained_paths
from unbroken.ledger.nodes import Path
from unbroken.messages import IMAGE_TYPES, get_image_source
from unbroken.rendering.base import Bridge, BridgeOutcome, Closing, Refusal
from unbroken.rollout.failures import format_error, format_frames
from unbroken.rollout.trajectory import Trajectory, TrajectoryGroup, Turn, TurnTimes
from unbroken.runs.records.files import (
    FORMAT,
    MAX_SUMMARIES,
    MAX_TEXT,
    MAX_TEXTS,
    find_records,
    make_first_lines,
    read_records,
    summarize,
    write_records,
)
from unbroken.runs.records.paths import (
    cut_path,
    describe_branch,
    describe_path,
    describe_sampled,
    find_runs,
    to_floats,
)
from unbroken.types import EncodedImage, Logprobs, TrainingSample
from unbroken.untrusted import MAX_DEPTH

if TYPE_CHECKING:
    from unbroken.training.objective.base import LeftOut

_MAX_CALL = 500
"""Characters of a call that could not be read: its ids are in the row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRow:
    """One row of a trajectory, with what the trainer made of it."""

    path: Path
    """Where its ids come from; it may end after the row."""
    row: TrainingSample
    """Without advantages."""
    trained: TrainingSample | None
    """The row that was trained, with its advantages; None if it was not."""
    trainer_logprobs: Logprobs | None
    """[T] before the step's first update; None if they were not computed."""
    entropies: Logprobs | None = None
    """[T] likewise."""
    ranks: NDArray[np.int32] | None = None
    """[T] likewise."""
    left_out: LeftOut | None = None
    """None if the row was not trained, or nothing is known of single tokens."""


def _make_untrained_rows(trajectory: Trajectory) -> list[RecordedRow]:
    """The rows of a trajectory that nobody trains on."""
    pairs = zip(find_trained_paths(trajectory.tree), export_samples(trajectory.tree, 0.0), strict=True)
    return [RecordedRow(path=path, row=row, trained=None, trainer_logprobs=None) for path, row in pairs]


def write_groups(
    folder: FilePath,
    head: Mapping[str, Any],
    groups: Sequence[TrajectoryGroup],
    make_rows: Callable[[Trajectory], Sequence[RecordedRow]] = _make_untrained_rows,
) -> FilePath:
    """Write the file of a step, or of an evaluation of a set: `head` is the first line without what `groups` say.

    Raises:
        MetricsError: it cannot be written.
    """
    images: dict[str, bytes] = {}

    def make_records() -> Iterator[dict[str, Any]]:
        for group in groups:
            for member in group.trajectories:
                rows = make_rows(member)
                images.update(_find_images(member, [each.row for each in rows]))
                yield make_record(group.group_id, member, rows, data=group.data)

    number = sum(len(group.trajectories) for group in groups)
    return _write(folder, {**head, "num_kept": len(groups)}, make_records(), number, images)


def merge_records(folder: FilePath, head: Mapping[str, Any]) -> FilePath:
    """Write one file in place of those that a step has; raises as `write_groups` and `read_records` do."""
    paths = {rank: path for (step, rank), path in find_records(folder).items() if step == head["step"]}
    chosen = [paths[0]] if 0 in paths else list(paths.values())  # a kill left others after they were merged
    records = itertools.chain.from_iterable(itertools.islice(read_records(path), 1, None) for path in chosen)
    return _write(folder, {**head, "num_kept": head["num_groups"]}, records, head["num_rollouts"], {})


def _write(
    folder: FilePath,
    head: Mapping[str, Any],
    records: Iterable[Mapping[str, Any]],
    number: int,
    images: Mapping[str, bytes],
) -> FilePath:
    """Write `number` records, and the images that are there when they were made."""
    summaries: list[dict[str, Any]] = []
    max_text = min(MAX_TEXT, MAX_TEXTS // max(number, 1))

    def make_lines() -> Iterator[Mapping[str, Any]]:
        for record in records:
            if number <= MAX_SUMMARIES:
                summaries.append(summarize(record, max_text=max_text))
            yield record

    def make_head() -> list[dict[str, Any]]:
        first = {"kind": "step", "format": FORMAT, **head}
        return make_first_lines(first, summaries) if summaries else [first]

    step = head["step"]
    path = write_records(folder, step, head["rank"], make_lines(), images=images, make_head=make_head)
    for (other, rank), old in find_records(folder).items():
        if other == step and rank >= head["num_processes"]:  # of an attempt with more processes, or merged
            old.unlink(missing_ok=True)
    return path


def describe_rewards(groups: Sequence[Sequence[float | None]]) -> dict[str, Any]:
    """The keys of a first line that say what all groups of a process are, those that are not kept too."""
    rewards = np.array([reward for group in groups for reward in group if reward is not None])
    return {
        "num_groups": len(groups),
        "num_rollouts": sum(map(len, groups)),
        "rewards": [len(rewards), float(rewards.mean()), float(rewards.std())] if len(rewards) else [0, None, None],
    }


def make_record(
    group_id: str, trajectory: Trajectory, rows: Sequence[RecordedRow], *, data: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The record of a trajectory; `data` is its row of a data set."""
    turn_rewards = trajectory.turn_rewards or [None] * len(trajectory.turns)
    times = trajectory.times or [None] * len(trajectory.turns)
    return {
        "kind": "trajectory",
        "group": group_id,
        "trajectory": trajectory.trajectory_id,
        "status": trajectory.status.value,
        "error": None if (error := trajectory.error) is None else format_error(error) + format_frames(error),
        "reward": trajectory.reward,
        "reward_parts": to_json(trajectory.reward_parts),
        "reward_weights": dict(trajectory.reward_weights),
        "span_rewards": [list(span) for span in trajectory.span_rewards],
        "wall_time_s": round(trajectory.wall_time_s, 4),
        "counters": trajectory.counters.as_dict(),
        "data": to_json(data),
        "tools": to_json(trajectory.tools),
        "messages": to_json(_get_messages(trajectory)),
        "turns": [
            _make_turn(turn, reward, of_turn)
            for turn, reward, of_turn in zip(trajectory.turns, turn_rewards, times, strict=True)
        ],
        "rows": [_make_row(row, trajectory) for row in rows],
    }


def _get_messages(trajectory: Trajectory) -> Sequence[Mapping[str, Any]]:
    """The messages that rows refer to."""
    return trajectory.messages if trajectory.conversations is None else trajectory.conversations.messages


def to_json(value: Any, room: int = MAX_DEPTH - 10) -> Any:
    """A message, or a part of one, in JSON that readers take: what has other types, is nested deeper than `room` or is
    no finite number in float64 becomes text. Of an image there is its SHA-256, if a rollout has it.
    """
    if isinstance(value, Mapping) and room:
        if value.get("type") in IMAGE_TYPES:
            source = get_image_source(value)
            digest = {"sha256": source.sha256} if isinstance(source, EncodedImage) else {}
            return {"type": value["type"], **digest}
        return {str(key): to_json(item, room - 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and room:
        return [to_json(item, room - 1) for item in value]
    if isinstance(value, (int, float)):
        return value if abs(value) <= sys.float_info.max else str(value)
    return value if value is None or isinstance(value, str) else str(value)


def _find_images(trajectory: Trajectory, rows: Sequence[TrainingSample]) -> dict[str, bytes]:
    """The files of all images that the record of a trajectory names, by their SHA-256."""
    sources: list[Any] = [span.image for row in rows for span in row.images]
    sources += [get_image_source(part) for _, part in find_image_parts(_get_messages(trajectory))]
    return {source.sha256: source.data for source in sources if isinstance(source, EncodedImage)}


def _make_turn(turn: Turn, reward: float | None, times: TurnTimes | None) -> dict[str, Any]:
    return {
        "reward": reward,
        "finish_reason": turn.sequence.finish_reason.value,
        "cut_by": None if turn.cut_by is None else turn.cut_by.value,
        "bridge": isinstance(turn.bridge, Bridge),
        "refusal": turn.bridge.reason.value if isinstance(turn.bridge, Refusal) else None,
        "fork": None if turn.fork is None else turn.fork.value,
        "message": to_json(turn.message),
        "call_statuses": [call.status.value for call in turn.parsed.tool_calls],
        "unread_calls": [call.full_text[:_MAX_CALL] for call in turn.parsed.failures],
        "closing": _make_closing(turn.bridge),
        "times": None if times is None else _round_times(asdict(times)),
        **describe_sampled(turn.policy, turn.sequence),
    }


def _make_closing(bridge: BridgeOutcome | None) -> dict[str, Any] | None:
    if not isinstance(bridge, Bridge) or bridge.closing is Closing.NONE:
        return None
    return {"how": bridge.closing.value, "num_ids": bridge.num_closing}


def _round_times(value: Any) -> Any:
    """Times in whole microseconds."""
    if isinstance(value, dict):
        return {name: _round_times(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_round_times(item) for item in value]
    return round(value, 6) if isinstance(value, float) else value


def _make_row(recorded: RecordedRow, trajectory: Trajectory) -> dict[str, Any]:
    row, trained = recorded.row, recorded.trained
    sampled = row.sampled_mask
    loss = (row if trained is None else trained).loss_mask
    return {
        **_describe_branch(cut_path(recorded.path, len(row.token_ids)), trajectory),
        "trainer_logprobs": None
        if recorded.trainer_logprobs is None
        else to_floats(recorded.trainer_logprobs[sampled]),
        "entropies": None if recorded.entropies is None else to_floats(recorded.entropies[sampled]),
        "ranks": None if recorded.ranks is None else recorded.ranks[sampled].tolist(),
        "temperature": row.temperature,
        "is_trained": trained is not None,
        "loss": _spans(loss),
        "clipped": None if recorded.left_out is None else _spans(recorded.left_out.clipped),
        "corrected": None if recorded.left_out is None else _spans(recorded.left_out.corrected),
        "advantages": [] if trained is None else find_runs(trained.advantages, where=loss),
        "images": [{"start": each.offset, "stop": each.stop, "sha256": each.sha256} for each in row.images],
    }


def _describe_branch(path: Path, trajectory: Trajectory) -> dict[str, Any]:
    """Its ids and turns; of a session's branch its own messages too, and its tools where they are not the trajectory's.

    Tools of an agent may have more text than its ids: rows do not repeat them.
    """
    if trajectory.conversations is None:
        nodes = {each.node for each in path.segments}
        turns = [number for number, turn in enumerate(trajectory.turns) if turn.end.node in nodes]
        return {**describe_path(path), "turns": turns}
    branch = describe_branch(path, trajectory.conversations)
    tools = branch.pop("tools")
    return branch if tuple(tools) == trajectory.tools else {**branch, "tools": to_json(tools)}


def _spans(mask: NDArray[np.bool_]) -> list[list[int]]:
    return [run[:2] for run in find_runs(mask, where=mask)]
