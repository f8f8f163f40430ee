"""Metrics: every number reaches both files, and none of them is NaN."""

from __future__ import annotations

import json
import math
import time

import pytest
from accelerate.tracking import get_available_trackers
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from support.models import tiny_qwen3
from support.rows import row
from unbroken.counters import Counters, Event
from unbroken.errors import InvalidInputError
from unbroken.training.config import TrainerConfig
from unbroken.training.metrics.stats import step_metrics
from unbroken.training.metrics.trackers import Tracker, TrackerConfig, clean_name
from unbroken.training.metrics.writer import MetricsWriter, counter_metrics
from unbroken.training.trainer import Trainer


def jsonl(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def tensorboard(directory):
    """{name: {step: value}}, as TensorBoard itself reads it."""
    events = EventAccumulator(str(directory))
    events.Reload()
    return {name: {e.step: e.value for e in events.Scalars(name)} for name in events.Tags()["scalars"]}


def test_i8_every_counter_reaches_jsonl_and_tensorboard(tmp_path):
    counters = Counters()
    for times, event in enumerate(Event, 1):
        counters.count(event, "some_reason", times)
        counters.count(event, "another", 100)
    with MetricsWriter(tmp_path) as writer:
        writer.write(3, counter_metrics(counters))
    (line,) = jsonl(tmp_path)
    events = tensorboard(tmp_path)
    for times, event in enumerate(Event, 1):
        expected = {"some_reason": times, "another": 100}
        for name, count in {f"{event}/{reason}": n for reason, n in expected.items()}.items():
            assert line[f"counters/{name}"] == count
            assert events[f"counters/{name}"] == {3: count}
        assert line[f"counters/{event}"] == events[f"counters/{event}"][3] == times + 100


def test_i8_an_event_that_did_not_happen_is_a_zero_and_not_a_gap():
    assert counter_metrics(Counters()) == {f"counters/{event}": 0 for event in Event}


def test_a_file_can_be_read_while_it_is_written(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(0, {"a": 1.5})
        assert jsonl(tmp_path) == [{"step": 0, "a": 1.5}]
        assert tensorboard(tmp_path) == {"a": {0: 1.5}}


def test_trackers_name_the_viewers_command_once(tmp_path):
    for step in range(2):
        with MetricsWriter(tmp_path, viewer="unbroken view runs/x") as writer:
            writer.write(step, {"a": 1.0})
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    (name,) = events.Tags()["tensors"]
    (event,) = events.Tensors(name)
    assert name.startswith("viewer")
    assert event.tensor_proto.string_val == [b"`unbroken view runs/x`"]


def test_nothing_to_measure_is_null_in_jsonl_and_no_point_in_tensorboard(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(0, {"a": None, "b": 1})
    assert jsonl(tmp_path) == [{"step": 0, "a": None, "b": 1}]
    assert tensorboard(tmp_path) == {"b": {0: 1}}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_none_is_refused_before_anything_is_written(tmp_path, value):
    with MetricsWriter(tmp_path) as writer, pytest.raises(InvalidInputError, match=f"metric b is {value} at step 4"):
        writer.write(4, {"a": 1.0, "b": value})
    assert jsonl(tmp_path) == []


def test_an_existing_file_is_continued(tmp_path):
    for step in range(2):
        with MetricsWriter(tmp_path) as writer:
            writer.write(step, {"a": step})
    assert jsonl(tmp_path) == [{"step": 0, "a": 0}, {"step": 1, "a": 1}]


def test_steps_that_are_made_again_are_cut_and_stand_once(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        for step in range(4):
            writer.write(step, {"a": step})
    time.sleep(1.1)  # TensorBoard reads files in the order of their names, which begin with the second
    with MetricsWriter(tmp_path) as writer:
        writer.cut(2)
        writer.write(2, {"a": 20})
    assert jsonl(tmp_path) == [{"step": 0, "a": 0}, {"step": 1, "a": 1}, {"step": 2, "a": 20}]
    assert tensorboard(tmp_path) == {"a": {0: 0, 1: 1, 2: 20}}


@pytest.mark.parametrize("half", ['{"step": 1, "a"', '{"step": 1, "a": 1.0}', '{"st'])
def test_a_line_that_was_half_written_is_cut(tmp_path, half):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "a": 1.0}\n' + half)
    with MetricsWriter(tmp_path) as writer:
        writer.cut(5)
        writer.write(5, {"a": 2.0})
    assert jsonl(tmp_path) == [{"step": 0, "a": 1.0}, {"step": 5, "a": 2.0}]


def test_a_broken_line_in_the_middle_is_refused_and_nothing_is_cut(tmp_path):
    text = '{"step": 0}\nnonsense\n{"step": 1}\n'
    (tmp_path / "metrics.jsonl").write_text(text)
    with MetricsWriter(tmp_path) as writer, pytest.raises(InvalidInputError, match=r"line 2 of .* got b'nonsense"):
        writer.cut(1)
    assert (tmp_path / "metrics.jsonl").read_text() == text


def test_the_files_are_closed_when_the_block_fails(tmp_path):
    writer = MetricsWriter(tmp_path)
    with pytest.raises(KeyError), writer:
        raise KeyError
    with pytest.raises(ValueError, match="closed file"):
        writer.write(0, {"a": 1})
    writer.close()


def test_every_number_of_a_step_is_logged():
    stats = Trainer(tiny_qwen3(), TrainerConfig()).step([row([1, 2, 3], sampled=[1, 2])])
    logged = {name.partition("/")[2] for name in step_metrics(stats)}
    nested = {"mismatch", "objective", "k3_by_lag", "seconds", "staleness_mean", "staleness_max"}
    nested |= {"ids_by_staleness", "routing", "supervised", "teachers", "forward_kl", "policies"}
    fields = set(type(stats).__dataclass_fields__) - nested
    assert fields <= logged
    assert set(type(stats.mismatch).__dataclass_fields__) <= logged
    assert step_metrics(stats)["mismatch/k3"] == stats.mismatch.k3
    assert step_metrics(stats)["train/k3"] == stats.k3
    assert step_metrics(stats)["mismatch/k3_lag_0"] == stats.mismatch.k3
    assert step_metrics(stats)["mismatch/k3_lag_1"] is step_metrics(stats)["mismatch/k3_lag_2_plus"] is None


def test_trackers_are_chosen_by_name(tmp_path):
    for names in ((), (Tracker.TENSORBOARD,)):
        folder = tmp_path / str(len(names))
        with MetricsWriter(folder, trackers=TrackerConfig(names=names), settings={"betas": [0.9, 0.99]}) as writer:
            writer.write(0, {"a": 1.0})
            writer.cut(0)
        assert (folder / "metrics.jsonl").exists()
        assert bool(list(folder.glob("events.*"))) == bool(names)


def test_a_tracker_that_is_not_installed_is_refused_before_anything_is_trained():
    installed = {tracker.value for tracker in get_available_trackers()}
    missing = next(name for name in Tracker if name not in installed)
    with pytest.raises(
        InvalidInputError, match=rf"names must be installed trackers, and {missing} is not installed: pip"
    ):
        TrackerConfig(names=(Tracker.TENSORBOARD, missing))


@pytest.mark.parametrize(
    ("name", "cleaned"),
    [("trainer.optimizer.betas", None), ("reward/mean", None), ("pass@4", "pass_4"), ("a[0]", "a_0_")],
)
def test_mlflow_gets_names_that_it_takes(name, cleaned):
    assert clean_name(name) == (cleaned or name)


def test_a_tracker_is_named_once():
    with pytest.raises(InvalidInputError, match="names must be different trackers"):
        TrackerConfig(names=(Tracker.TENSORBOARD, Tracker.TENSORBOARD))
