"""What a diagnosis looks at: the metrics of a run's steps, some of its rollouts, and how its process ended.

    a running run      its metrics and rollouts, as they come          add_step, RolloutNote.of
    a folder           metrics.jsonl, rollouts/, process.json          read_evidence
    an evaluation      its rollouts, counted as if they were a step    read_evidence

Folders may come from elsewhere: no link is followed, sizes are bounded, and what is damaged is left out.
"""

from __future__ import annotations

import itertools
import json
import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from unbroken.errors import InvalidInputError
from unbroken.ledger.store.sqlite import is_running
from unbroken.runs.folder import DIAGNOSIS_FILE, RECIPE_FILE, find_state
from unbroken.runs.process_file import PROCESS_FILE, count_memory_kills, read_boot
from unbroken.runs.records.files import FOLDER, find_conversation, find_expected, find_records, join_texts, read_records
from unbroken.untrusted import open_inside, read_json

Numbers = Mapping[str, Any]
"""The metrics of a step by name: numbers, or None where there is no number."""

METRICS = ("metrics", "metrics.jsonl")
EVALUATIONS = "evaluations"
NUM_NOTES = 16
"""Rollouts of the newest step that are looked at."""
_NUM_FIRST, _NUM_LAST = 5, 20
_SUPERVISED = "supervised/learning_rate"
"""Only the steps of a warm start have it."""
_MAX_RECORDS = 2000
"""Of an evaluation."""
_MAX_BYTES, _MAX_LINE_BYTES, _MAX_OBJECT_BYTES = 512 << 20, 1 << 20, 10 << 20
_MAX_PROBLEMS = 20
_MAX_TEXT, _MAX_SENTENCE = 200, 2000
_FAILED_CALL = "Error: "
"""How a tool's answer begins if the tool failed (`rollout.tools`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutNote:
    """What a diagnosis needs of one rollout."""

    group: str
    """Siblings, rollouts of one problem, have the same."""
    given: str
    """The end of what the policy said last."""
    replies: str
    """All that the policy said and called."""
    expected: str | None
    """The answer in the row of the data set, if a column has such a name."""
    reward: float | None
    error: str | None
    tool_answer: str | None
    """The beginning of the first answer of a tool that failed."""
    call: str | None = None
    """A tool call: the one that failed, otherwise the first."""
    unread_call: str | None = None
    """The first tool call that could not be read, as it was sampled."""
    has_tools: bool = False
    has_advantage: bool = False
    """Whether an id of it was trained with an advantage that is not 0."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """What each part of the reward was multiplied by, by its name; other parts are notes of an environment."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """The reward's parts, before their weights."""

    @staticmethod
    def of(record: Mapping[str, Any]) -> RolloutNote:
        """Of a rollout's record (docs/rollouts.md)."""
        conversation = find_conversation(record)
        replies = [each for each in conversation if each.get("role") == "assistant"]
        answer, call_id = _find_failed_answer(conversation)
        expected, error = find_expected(record.get("data")), record.get("error")
        unread = (call for turn in record.get("turns") or () for call in turn.get("unread_calls") or ())
        return RolloutNote(
            group=str(record.get("group")),
            given=join_texts(replies[-1:]).strip()[-_MAX_TEXT:],
            replies=join_texts(replies),
            expected=None if expected is None else expected[-_MAX_TEXT:],
            reward=_read_number(record.get("reward")),
            error=None if error is None else str(error)[:_MAX_TEXT],
            tool_answer=answer,
            call=_find_call(replies, call_id),
            unread_call=next((str(call)[:_MAX_TEXT] for call in unread), None),
            has_tools=bool(record.get("tools")),
            has_advantage=_has_advantage(record.get("rows") or ()),
            weights=_read_numbers(record.get("reward_weights")),
            parts=_read_numbers(record.get("reward_parts")),
        )


def _read_numbers(values: Any) -> dict[str, float]:
    items = values.items() if isinstance(values, dict) else ()
    return {str(name): number for name, value in items if (number := _read_number(value)) is not None}


def _has_advantage(rows: Iterable[Mapping[str, Any]]) -> bool:
    return any(value for row in rows for _, _, value in row.get("advantages") or ())


def _find_failed_answer(conversation: Sequence[Mapping[str, Any]]) -> tuple[str | None, Any]:
    """The beginning of the first answer of a tool that failed, and the id of its call."""
    for each in conversation:
        if each.get("role") == "tool":
            # Of a whole message, the tool's name would come first.
            text = join_texts([{"content": each.get("content")}])
            if text.startswith(_FAILED_CALL):
                return text[:_MAX_TEXT], each.get("tool_call_id")
    return None, None


def _find_call(replies: Sequence[Mapping[str, Any]], call_id: Any) -> str | None:
    """The call with this id, or the first one, as NAME(ARGUMENTS)."""
    calls = [call for reply in replies for call in reply.get("tool_calls") or () if "function" in call]
    if not calls:
        return None
    function = next((each for each in calls if call_id is not None and each.get("id") == call_id), calls[0])["function"]
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f"{function.get('name')}({text})"[:_MAX_TEXT]


class _MeanSums(NamedTuple):
    """Sums over the steps whose mean reward is known."""

    total: float = 0.0
    num_steps: int = 0
    num_groups: float = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How the process of a run ended, as far as its folder says."""

    status: str = "unknown"
    """`running`, `finished`, `failed`, `interrupted`, `terminated`, `died` (without a word), or `unknown`."""
    error: str = ""
    """Of one that failed."""
    num_memory_kills: int = 0
    """How many processes the kernel of the machine has ended for memory since this one began; 0 if it is not known."""

    @property
    def is_over(self) -> bool:
        """Whether no step comes any more, as far as is known."""
        return self.status not in ("running", "unknown")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All that a diagnosis looks at. `add_step` makes the next one."""

    first: tuple[Numbers, ...] = ()
    """The first steps of rollouts. Those of a warm start are no such steps: a reward that is missing is not 0."""
    last: tuple[Numbers, ...] = ()
    """The newest ones, which may be the same."""
    newest: Numbers = field(default_factory=dict)
    """The newest step of all, which may be one of a warm start; empty before any."""
    num_steps: int = 0
    """Of both kinds."""
    lowest: float | None = None
    """The lowest reward of all steps."""
    highest: float | None = None
    means: _MeanSums = field(default_factory=_MeanSums)
    """Of the mean rewards of all steps."""
    notes: tuple[RolloutNote, ...] = ()
    """Of the newest step that has any."""
    ending: Ending = field(default_factory=Ending)
    temperature: float | None = None
    """At which is sampled; None if it is not known."""
    gets_harder: bool = False
    """Whether the better the policy, the harder it may have it: a curriculum chooses problems by the results so far, or
    other policies and frozen copies, which become better too, play with it."""
    said: Mapping[str, str] = field(default_factory=dict)
    """What the run has said, by the name of the rule, each with when: `after 5 steps: ...`."""
    is_evaluation: bool = False
    """Whether the only step is an evaluation, or the preflight of one: nothing is trained."""
    is_preflight: bool = False
    """Whether the only step is the rollouts of a preflight."""

    def add_step(self, step: Numbers, *, notes: Sequence[RolloutNote] = ()) -> Evidence:
        """The evidence with one step more, and its rollouts in the place of those before."""
        if _SUPERVISED in step:
            return replace(self, newest=step, num_steps=self.num_steps + 1)
        rewards = {name: _read_number(step.get(f"reward/{name}")) for name in ("min", "max", "mean")}
        return replace(
            self,
            first=self.first if len(self.first) == _NUM_FIRST else (*self.first, step),
            last=(*self.last, step)[-_NUM_LAST:],
            newest=step,
            num_steps=self.num_steps + 1,
            lowest=min(_list_known(self.lowest, rewards["min"]), default=None),
            highest=max(_list_known(self.highest, rewards["max"]), default=None),
            means=self.means if (mean := rewards["mean"]) is None else self._add_mean(mean, step),
            notes=tuple(notes) or self.notes,
        )

    def _add_mean(self, mean: float, step: Numbers) -> _MeanSums:
        total, num_steps, num_groups = self.means
        return _MeanSums(total + mean, num_steps + 1, num_groups + (_read_number(step.get("groups/num")) or 0))

    def get_recent(self, number: int) -> tuple[Numbers, ...]:
        """The last `number` steps of rollouts; none if there are not so many yet, or all of a run that is over."""
        is_complete = self.is_evaluation or self.is_preflight or self.ending.is_over
        return self.last[-number:] if len(self.last) >= number or is_complete else ()


def choose_evenly(groups: Sequence[Sequence[Any]], number: int = NUM_NOTES) -> list[Any]:
    """Up to `number` members, at least two of a group: the first of each, then the second, and so on.

    Worked example, 4 of the groups A B C D with three members each: A0 C0 A1 C1.
    """
    most = number // 2
    spread = [groups[k * len(groups) // most] for k in range(most)] if len(groups) > most else groups
    rounds = itertools.chain.from_iterable(itertools.zip_longest(*spread))
    return list(itertools.islice((each for each in rounds if each is not None), number))


def read_evidence(folder: Path) -> Evidence:
    """Read the folder of a run or an evaluation, of one that ended, that runs, or whose process died."""
    evidence = read_run(folder, read_ending(folder))
    records = _read_newest(folder, FOLDER)
    if evidence.num_steps == 0 and not records and (evaluated := _read_evaluation(folder)):
        notes = tuple(map(RolloutNote.of, choose_evenly(_group(evaluated))))
        return replace(evidence, is_evaluation=True).add_step(count_records(evaluated), notes=notes)
    return replace(evidence, notes=tuple(map(RolloutNote.of, choose_evenly(_group(records)))))


def read_run(folder: Path, ending: Ending) -> Evidence:
    """The evidence of a run's settings and its steps' metrics, without its rollouts."""
    settings = (read_object(folder, RECIPE_FILE) or {}).get("settings")
    known = settings if isinstance(settings, dict) else {}
    evidence = Evidence(
        ending=ending,
        temperature=_read_number(known.get("rollouts.sampling.temperature")),
        gets_harder=any(known.get(name) is not None for name in ("curriculum", "policies.names")),
        said=_read_said(folder),
    )
    for step in read_steps(folder):
        evidence = evidence.add_step(step)
    return evidence


def _read_said(folder: Path) -> dict[str, str]:
    said = (read_object(folder, DIAGNOSIS_FILE) or {}).get("said")
    items = said.items() if isinstance(said, dict) else ()
    return {name: words[:_MAX_SENTENCE] for name, words in items if isinstance(words, str)}


def read_steps(folder: Path) -> list[Numbers]:
    """The metrics of a run's steps, in order; a step that stands there twice counts as it was the last time."""
    steps: dict[int, Numbers] = {}
    for line in read_objects(folder, *METRICS)[0]:
        if type(step := line.get("step")) is int:
            steps[step] = {name: _read_number(each) for name, each in line.items()}
    return [steps[step] for step in sorted(steps)]


def count_records(records: Iterable[Mapping[str, Any]]) -> Numbers:
    """The metrics of rollouts, as far as their records tell, by the names that those of a step have."""
    counts: Counter[str] = Counter()
    rewards: list[float] = []
    parts: list[Mapping[str, float]] = []
    for record in records:
        turns = record.get("turns") or []
        counts["rollout/num_trajectories"] += 1
        counts["rollout/num_turns"] += len(turns)
        counts["rollout/num_tool_calls"] += sum(len(turn.get("call_statuses") or ()) for turn in turns)
        for name, times in (record.get("counters") or {}).items():
            counts[f"counters/{name}"] += times
            if not name.startswith("status/"):
                counts[f"counters/{name.partition('/')[0]}"] += times
        if (
            record.get("status") not in ("failed", "aborted", "unscored")
            and (reward := record.get("reward")) is not None
        ):
            rewards.append(float(reward))
            parts.append(_read_numbers(record.get("reward_parts")))
    counts["rollout/num_trainable"] = len(rewards)
    counts["counters/dropped_rows/unscored"] = counts["counters/status/unscored"]
    mean = sum(rewards) / len(rewards) if rewards else None
    bounds = {"reward/min": min(rewards, default=None), "reward/max": max(rewards, default=None), "reward/mean": mean}
    return {**counts, **bounds, **_average_parts(parts)}


def _average_parts(parts: Sequence[Mapping[str, float]]) -> Numbers:
    """The mean of each part of the reward, over the rollouts that have it."""
    names = dict.fromkeys(name for each in parts for name in each)
    return {f"reward/{name}_mean": fmean(each[name] for each in parts if name in each) for name in names}


def read_ending(folder: Path) -> Ending:
    """How the process of a run ended, by `process.json`; by its lock if that could not be written."""
    found = read_object(folder, PROCESS_FILE)
    if found is None:
        state = find_state(folder)
        return Ending(status="unknown" if state == "ended" else state)  # without a lock it may never have begun
    status, process = str(found.get("status")), found.get("process")
    if status != "running":
        return Ending(status=status, error=str(found.get("error") or ""))
    if found.get("host") != socket.gethostname() or type(process) is not int or is_running(process):
        return Ending(status="running")
    before, now = found.get("memory_kills"), count_memory_kills()
    is_same_boot = found.get("boot") == read_boot()  # the kernel counts from its start
    num_kills = now - before if is_same_boot and type(before) is int and now is not None else 0
    return Ending(status="died", num_memory_kills=num_kills)


def read_object(folder: Path, *parts: str) -> dict[str, Any] | None:
    """Read a file of one JSON object in a folder; None if it is missing or damaged."""
    try:
        with open_inside(folder, *parts) as file:
            return _parse_object(file.read(_MAX_OBJECT_BYTES + 1), max_bytes=_MAX_OBJECT_BYTES)
    except OSError:
        return None


def read_objects(folder: Path, *parts: str) -> tuple[list[dict[str, Any]], list[str]]:
    """The objects of a file of JSON lines in a folder, in order, and what is wrong with the first of its other lines.

    A last line without its end is being written, or was when the run was killed: it is left out.
    """
    name, objects, problems = parts[-1], list[dict[str, Any]](), list[str]()
    num_bytes = 0
    try:
        with open_inside(folder, *parts) as file:
            for number in itertools.count(1):
                line = file.readline(_MAX_LINE_BYTES + 1)
                num_bytes += len(line)
                # The rest of a line without an end would have to be read to find the next one: gigabytes, if it lies.
                if len(line) > _MAX_LINE_BYTES or num_bytes > _MAX_BYTES:
                    problems.append(f"line {number} of {name} is too long, or the file: the rest is left out")
                    break
                if not line.endswith(b"\n"):
                    break
                if (found := _parse_object(line, max_bytes=_MAX_LINE_BYTES)) is not None:
                    objects.append(found)
                elif len(problems) < _MAX_PROBLEMS:
                    problems.append(f"line {number} of {name} is not a JSON object, and is left out")
    except FileNotFoundError:
        return [], []
    except OSError as error:
        return [], [f"{name} cannot be read: {error.strerror or error}"]
    return objects, problems


def _parse_object(data: bytes, *, max_bytes: int) -> dict[str, Any] | None:
    try:
        value = read_json(data, max_bytes=max_bytes)
    except InvalidInputError:
        return None
    return value if isinstance(value, dict) else None


def _read_newest(folder: Path, name: str, *, most: int = 4 * NUM_NOTES) -> list[Mapping[str, Any]]:
    """The first records of the newest step in a folder of rollouts, of the first process that kept any."""
    if (folder / name).is_symlink():
        return []
    paths = find_records(folder / name)
    newest = max((step for step, _ in paths), default=None)
    path = next((path for (step, _), path in paths.items() if step == newest), None)
    return [] if path is None else list(_read_members(path, most))


def _read_members(path: Path, most: int) -> Iterator[Mapping[str, Any]]:
    try:
        yield from itertools.islice(read_records(path), 1, most + 1)
    except InvalidInputError:
        return


def _read_evaluation(folder: Path) -> list[Mapping[str, Any]]:
    """The records of the newest evaluation of each set, and of each model of an evaluation of several."""
    found: list[Mapping[str, Any]] = []
    for root in sorted({path.parent for pattern in (EVALUATIONS, f"*/{EVALUATIONS}") for path in folder.glob(pattern)}):
        sets = root / EVALUATIONS
        for each in sorted(sets.iterdir()) if sets.is_dir() and not (sets.is_symlink() or root.is_symlink()) else ():
            for path in find_records(each).values() if not each.is_symlink() else ():
                found += _read_members(path, _MAX_RECORDS - len(found))
    return found


def _group(records: Iterable[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        groups.setdefault(str(record.get("group")), []).append(record)
    return list(groups.values())


def _read_number(value: Any) -> float | None:
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _list_known(*values: float | None) -> list[float]:
    return [value for value in values if value is not None]
