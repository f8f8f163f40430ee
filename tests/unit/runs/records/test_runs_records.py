"""The rollouts that a run keeps: in files that are whole while it goes on, with both sides' logprobs; and its table."""

from __future__ import annotations

import gzip
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoTokenizer

from support import letters_recipe
from support.rows import trajectory
from support.served import save_tiny_model
from unbroken.cli import main
from unbroken.errors import InvalidInputError, MetricsError
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.runs import run as runs_run
from unbroken.runs.observer import MAX_SHOWN, RunProgress
from unbroken.runs.records import recorder
from unbroken.runs.records.files import (
    find_expected,
    find_records,
    parse_line,
    read_lines,
    read_records,
    spread,
    write_records,
)
from unbroken.runs.records.record import write_groups
from unbroken.runs.records.recorder import _estimate_bytes, choose_groups, choose_scored
from unbroken.training.checkpoints import Checkpoints
from unbroken.training.metrics.trackers import TrackerConfig, Trackers
from unbroken.viewer.sources.rollouts import check_record

RECIPE = Path(letters_recipe.__file__)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def train(output: Path, model: Path, *options: str) -> int:
    return main(["train", str(RECIPE), f"--output={output}", f"--model={model}", *options])


@pytest.fixture(scope="module")
def whole(tmp_path_factory, model) -> Path:
    """Two steps of which everything is kept."""
    output = tmp_path_factory.mktemp("whole") / "run"
    assert train(output, model, "--loop.num-steps=2", "--rollout-log.scored-groups=none") == 0
    return output


def read(output: Path, step: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    head, *members = read_records(find_records(output / "rollouts")[step, 0])
    for member in members:
        check_record(member)
    return head, members


def metrics(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics/metrics.jsonl").read_text().splitlines()]


def test_a_step_is_kept_whole_with_what_the_trainer_made_of_it(whole, model):
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert list(find_records(whole / "rollouts")) == [(0, 0), (1, 0)]
    for step in (0, 1):
        head, members = read(whole, step)
        assert (head["kind"], head["format"], head["step"], head["policy_version"]) == ("step", 1, step, step)
        assert (head["num_groups"], head["num_kept"], head["model"]) == (2, 2, str(model))
        assert sum(times for name, times in head["counters"].items() if name.startswith("status/")) == 16
        logged = metrics(whole)[step]
        assert np.mean([member["reward"] for member in members]) == pytest.approx(logged["reward/mean"])
        assert len({member["group"] for member in members}) == 2
        assert len({member["trajectory"] for member in members}) == len(members) == 16
        ours, theirs = [], []
        for member in members:
            (row,) = member["rows"]
            assert row["policy_versions"][0][2] == step
            sampled = [row["token_ids"][n] for run in row["policy_versions"] for n in range(run[0], run[1])]
            text = tokenizer.decode(sampled, skip_special_tokens=True)
            assert text == member["messages"][-1]["content"] or "\ufffd" in text
            ours += row["trainer_logprobs"]
            theirs += row["rollout_logprobs"]
            assert len(row["trainer_logprobs"]) == len(sampled)
            assert row["is_trained"]
            assert all(0 < entropy < np.log(tokenizer.vocab_size + 100) for entropy in row["entropies"])
            assert [rank == 1 for rank in row["ranks"]].count(True) < len(sampled) == len(row["ranks"])
            assert min(row["ranks"]) >= 1
            assert (row["clipped"], row["corrected"]) == ([], [])
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
        for group in {member["group"] for member in members}:
            of_group = [member for member in members if member["group"] == group]
            advantages = [member["rows"][0]["advantages"][0][2] for member in of_group]
            rewards = np.array([member["reward"] for member in of_group])
            np.testing.assert_allclose(advantages, (rewards - rewards.mean()) / rewards.std(), rtol=1e-3)


def test_a_run_keeps_all_groups_of_a_step_by_default_and_fewer_by_choice(tmp_path, model):
    """The trainer scores one of them; without room one is kept, and the first line is that of the whole step."""
    assert train(tmp_path / "default", model, "--loop.num-steps=1") == 0
    head, members = read(tmp_path / "default", 0)
    assert (head["num_groups"], head["num_kept"], len(members)) == (2, 2, 16)
    assert [member["rows"][0]["trainer_logprobs"] is not None for member in members] == [True] * 8 + [False] * 8
    options = ("--loop.num-steps=1", "--rollout-log.max-mb=0.001")
    assert train(tmp_path / "small", model, *options) == 0
    small, kept = read(tmp_path / "small", 0)
    assert (small["num_groups"], small["num_kept"], len(kept), small["num_rollouts"]) == (2, 1, 8, 16)
    rewards = [member["reward"] for member in members]
    assert small["rewards"] == [16, pytest.approx(np.mean(rewards)), pytest.approx(np.std(rewards))]
    assert head["columns"]["reward"] == rewards
    assert train(tmp_path / "some", model, "--loop.num-steps=2", "--rollout-log.scored-groups=0") == 0
    assert list(find_records(tmp_path / "some/rollouts")) == [(0, 0), (1, 0)]
    assert {member["rows"][0]["trainer_logprobs"] for member in read(tmp_path / "some", 1)[1]} == {None}
    assert train(tmp_path / "none", model, "--loop.num-steps=1", "--rollout-log.groups=0") == 0
    assert not (tmp_path / "none/rollouts").exists()


def test_what_is_kept_changes_nothing_about_the_training(whole, tmp_path, model):
    assert train(tmp_path, model, "--loop.num-steps=2", "--rollout-log.groups=0") == 0
    ours, theirs = (
        [(line["reward/mean"], line["train/num_tokens"]) for line in metrics(each)] for each in (tmp_path, whole)
    )
    assert ours == theirs


def test_no_checkpoint_of_a_step_is_written_before_its_rollouts_are(tmp_path, model, monkeypatch):
    """They are written beside the update: here only once it has made its step."""
    updated, found = threading.Event(), []

    def write_late(*arguments: Any) -> Path:
        assert updated.wait(60)
        updated.clear()
        return write_groups(*arguments)

    class Observed(Checkpoints):
        def agree_if_due(self, *arguments: Any, **keywords: Any) -> bool:
            updated.set()
            return super().agree_if_due(*arguments, **keywords)

        def save(self, trainer: Any, last: Any) -> None:
            found.append((last.num_steps, sorted(step for step, _ in find_records(tmp_path / "run/rollouts"))))
            super().save(trainer, last)

    monkeypatch.setattr(recorder, "write_groups", write_late)
    monkeypatch.setattr(runs_run, "Checkpoints", Observed)
    assert train(tmp_path / "run", model, "--loop.num-steps=3", "--checkpoints.every=2") == 0
    assert found == [(1, [0]), (2, [0, 1]), (3, [0, 1, 2])]  # the first and the last step have one too


def test_rollouts_that_cannot_be_written_end_the_run_before_its_next_step_is_trained(
    tmp_path, model, monkeypatch, capsys
):
    def fail_once(folder: Path, head: Any, *arguments: Any) -> Path:
        if head["step"] == 1:
            raise MetricsError("rollouts of step 1 cannot be written: No space left")
        return write_groups(folder, head, *arguments)

    monkeypatch.setattr(recorder, "write_groups", fail_once)
    assert train(tmp_path, model, "--loop.num-steps=4") == 1
    assert "rollouts of step 1 cannot be written" in capsys.readouterr().err
    assert [line["step"] for line in metrics(tmp_path)] == [0, 1]


@pytest.mark.parametrize(
    ("option", "rule"),
    [("groups=-1", ">= 0 or none"), ("max-mb=0", "> 0 or none"), ("scored-groups=-1", ">= 0")],
)
def test_wrong_choices_are_refused_by_name(tmp_path, model, capsys, option, rule):
    assert train(tmp_path / "run", model, f"--rollout-log.{option}") == 1
    assert f"rollout_log.{option.partition('=')[0].replace('-', '_')} must be {rule}" in capsys.readouterr().err


def test_a_file_is_there_whole_or_not_at_all(tmp_path, monkeypatch):
    lines = [{"kind": "step", "format": 1}, {"kind": "trajectory", "text": "größe \ud800"}]
    path = write_records(tmp_path, 12, 3, lines, images={"ab": b"png"})
    assert path.name == "step-00000012.rank-3.jsonl.gz"
    assert [line["kind"] for line in read_records(path)] == ["step", "trajectory"]
    assert (tmp_path / "images/ab").read_bytes() == b"png"
    (tmp_path / ".step-00000013.rank-3.jsonl.gz.part").write_bytes(b"half")  # being written
    assert find_records(tmp_path) == {(12, 3): path}
    before = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full_disk)
        with pytest.raises(MetricsError, match=r"rollouts of step 12 cannot be written to .*No space left.*groups 0"):
            write_records(tmp_path, 12, 3, lines, images={})
    assert path.read_bytes() == before
    assert not list(tmp_path.glob(".step-00000012*"))


def test_processes_that_keep_the_same_images_do_not_disturb_each_other(tmp_path):
    images = {f"{k:064x}": bytes(200_000) for k in range(40)}
    with ThreadPoolExecutor(4) as threads:
        for step in range(5):
            folder = tmp_path / str(step)
            written = [threads.submit(write_records, folder, step, rank, [], images=images) for rank in range(4)]
            assert all(each.result().is_file() for each in written)
            assert {file.name: file.read_bytes() for file in (folder / "images").iterdir()} == images


def full_disk(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data[: len(data) // 2])
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("text", "num_cut", "message"),
    [
        (b'{"format": 1}\n' * 99, 9, "must be a file of rollouts: EOFError"),
        (b'{"format": 2}\n', 0, "must have the format 1, got 2"),
        (b"[]\n", 0, "must be a file of rollouts: line 0: it must be a JSON object"),
    ],
)
def test_a_file_that_is_damaged_or_of_another_format_is_refused(tmp_path, text, num_cut, message):
    data = gzip.compress(text)
    (tmp_path / "file").write_bytes(data[: len(data) - num_cut])
    with pytest.raises(InvalidInputError, match=message):
        list(read_records(tmp_path / "file"))


def test_what_is_written_is_read_however_well_one_id_a_million_times_packs(tmp_path):
    text = json.dumps({"rows": [{"token_ids": [5] * 100_000, "rollout_logprobs": [-0.0] * 100_000}]})
    lines = [json.loads(text) | {"trajectory": n} for n in range(44)]
    head = {"format": 1, "columns": ["the " * 7_500_000]}
    path = write_records(tmp_path, 0, 0, iter(lines), images={}, make_head=lambda: [head])
    assert sum(map(len, read_lines(path))) > 50 * path.stat().st_size  # it packs well all the same
    assert [each["trajectory"] for each in list(read_records(path))[1:]] == list(range(44))


def test_a_file_that_is_not_compressed_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"text")
    with pytest.raises(InvalidInputError, match="must be a file of rollouts: BadGzipFile"):
        list(read_records(tmp_path / "file"))


def test_what_is_chosen_is_evenly_spread():
    assert [spread("abcdefgh", number) for number in (0, 1, 3, 8, 9, None)] == [
        [], ["a"], ["a", "c", "f"], list("abcdefgh"), list("abcdefgh"), list("abcdefgh")
    ]  # fmt: skip


def make_group(name: str, rewards: list[float | None]) -> TrajectoryGroup:
    return TrajectoryGroup(group_id=name, trajectories=tuple(trajectory(reward) for reward in rewards))


def test_without_room_groups_with_variance_failures_and_extremes_come_first():
    groups = [make_group(str(k), each) for k, each in enumerate([[0, 0], [0, 1], [0, 0], [1, 1], [0, None]])]
    (size,) = {_estimate_bytes(group) for group in groups}
    chosen = [[each.group_id for each in choose_groups(groups, max_bytes=n * size)] for n in (0, 1, 2, 3, 5)]
    assert chosen == [["1"], ["1"], ["1", "4"], ["0", "1", "4"], ["0", "1", "2", "3", "4"]]
    scored = [[each.group_id for each in choose_scored(groups, number)] for number in (0, 1, 2, None)]
    assert scored == [[], ["1"], ["0", "2"], ["0", "1", "2", "3", "4"]]


def test_a_long_row_of_the_data_set_counts_for_each_rollout_of_a_group():
    group = make_group("0", [0, 1, 0])
    long = replace(group, data={"columns": {"document": "x" * 10_000}})
    assert _estimate_bytes(long) - _estimate_bytes(group) == pytest.approx(3 * 5000, rel=0.01)


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"prompt": "?", "answer_format": "number", "answer": "4"}, "4"),
        ({"prompt": "?", "answerKey": "B"}, "B"),
        ({"reward_model": {"style": "rule", "ground_truth": "7"}}, "7"),
        ({"prompt": "?"}, None),
    ],
)
def test_the_expected_answer_is_the_column_of_that_name_or_one_with_it(columns, expected):
    assert find_expected({"columns": columns}) == expected


def test_a_rollout_has_its_row_of_the_data_set_without_what_json_cannot_hold(tmp_path, model):
    (tmp_path / "rewards.py").write_text("def correct(completions, answer): return [0.0 for _ in completions]\n")
    rows = [{"prompt": f"Add 1 and {n}.", "answer": str(n + 1), "level": {"of": n}} for n in range(3)]
    datasets.Dataset.from_list([{**row, "picture": b"\x89"} for row in rows]).to_parquet(tmp_path / "rows.parquet")
    words = [f"--data.file={tmp_path}/rows.parquet", f"--output={tmp_path}/run", f"--model={model}"]
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f"[[rewards]]\nfunction = '{tmp_path}/rewards.py:correct'\n")
    words += ["--loop.num-steps=1", "--rollouts.problems-per-step=3", "--rollouts.group-size=2"]
    assert main(["train", str(recipe), *words, "--rollouts.sampling.max-tokens=4"]) == 0
    head, members = read(tmp_path / "run", 0)
    assert {member["data"]["index"] for member in members} == {0, 1, 2}
    for member, expected in zip(members, head["columns"]["expected"], strict=True):
        row = rows[member["data"]["index"]]
        assert member["data"]["columns"] == row
        assert member["messages"][0]["content"] == row["prompt"]
        assert expected == row["answer"]


def test_a_step_that_fewer_processes_make_again_has_no_file_of_the_others(tmp_path):
    groups = [make_group("0", [0.0, 1.0])]
    for step, rank, num_processes in ((0, 0, 2), (0, 1, 2), (1, 1, 2), (1, 0, 2), (1, 0, 1)):
        write_groups(tmp_path, {"step": step, "rank": rank, "num_processes": num_processes}, groups)
    assert list(find_records(tmp_path)) == [(0, 0), (0, 1), (1, 0)]


def test_a_first_line_is_never_longer_than_readers_take(tmp_path, monkeypatch):
    """Texts of many rollouts are cut, and of very many there are none; all rollouts are kept whole."""
    groups = [make_group("0", [0.0] * 5), make_group("1", [1.0])]
    said = ({"role": "user", "content": "\x00" * 900},)
    groups = [
        replace(each, trajectories=tuple(replace(t, messages=said) for t in each.trajectories)) for each in groups
    ]
    monkeypatch.setattr("unbroken.runs.records.record.MAX_TEXTS", 600)
    for step, (limit, texts) in enumerate([(6, [100] * 6), (5, None)]):
        monkeypatch.setattr("unbroken.runs.records.record.MAX_SUMMARIES", limit)
        write_groups(tmp_path / "rollouts", {"step": step, "rank": 0, "num_processes": 1}, groups)
        head, kept = read(tmp_path, step)
        first, second, *_ = map(parse_line, read_lines(find_records(tmp_path / "rollouts")[step, 0]))
        assert first == head
        assert ("columns" in head, texts) == (texts is not None, [*map(len, second["texts"])] if texts else None)
        assert [each["messages"] for each in kept] == [list(said)] * 6


def test_a_rollout_with_a_row_that_readers_would_not_take_is_kept_without_it(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("unbroken.runs.records.files.MAX_LINE_BYTES", 20_000)
    groups = [replace(make_group(name, [1.0]), data={"columns": {"tests": name * 15_000}}) for name in ("a", "bc")]
    write_groups(tmp_path / "rollouts", {"step": 0, "rank": 0, "num_processes": 1}, groups)
    assert [each["data"] for each in read(tmp_path, 0)[1]] == [groups[0].data, None]
    assert "is kept without its row of the data set, which is too long" in caplog.text


def test_a_table_of_completions_is_shown_and_logged(tmp_path, model, capsys):
    assert train(tmp_path, model, "--loop.num-steps=1", "--log-completions=2", "--rollout-log.groups=none") == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("step 0", "prompt", "completion", "advantage", "Write 0.", "Write 1."))
    events = EventAccumulator(str(tmp_path / "metrics"))
    events.Reload()
    (logged,) = events.Tensors("completions/text_summary")
    text = logged.tensor_proto.string_val[0].decode()
    assert text.splitlines()[0] == "| prompt | completion | reward | advantage | status |"
    assert len(text.splitlines()) == 4
    _, *members = read_records(find_records(tmp_path / "rollouts")[0, 0])
    assert f"| Write 0. | {members[0]['messages'][-1]['content']}"[:20] in text
    assert str(members[0]["reward"]) in text
    assert train(tmp_path / "wrong", model, "--log-completions=-1") == 1
    assert "log_completions must be >= 0, got -1" in capsys.readouterr().err


def test_a_long_completion_is_cut_on_the_terminal_and_its_markup_is_text(capsys):
    RunProgress(Console()).show_completions(0, ["completion", "reward"], [["[red]a" + "b" * 2 * MAX_SHOWN + "c", None]])
    printed = capsys.readouterr().out
    assert "[red]a" in printed
    assert "…" in printed
    assert printed.count("b") < MAX_SHOWN


def test_trackers_that_have_tables_get_them(tmp_path):
    trackers = Trackers(TrackerConfig(names=()), tmp_path, {})
    tables: list[Any] = []
    with_tables = SimpleNamespace(
        name="wandb", log_table=lambda name, **table: tables.append((name, table)), finish=lambda: None
    )
    trackers._others += [with_tables, SimpleNamespace(name="aim", finish=lambda: None)]
    trackers.log_table(3, "completions", ["text", "reward"], [("a", 1.0)])
    trackers.close()
    assert tables == [("completions", {"columns": ["text", "reward"], "data": [["a", 1.0]], "step": 3})]
