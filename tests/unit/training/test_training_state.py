"""Saving and loading a trainer: all of it comes back, and what is not what was written is refused by name."""

from __future__ import annotations

import asyncio
import json
import pickle
import re
import shutil
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.loops import Callbacks
from support.models import tiny_qwen3
from support.rows import make_source, random_rows
from support.steps import train
from unbroken.errors import CheckpointError, InvalidInputError
from unbroken.runs.config import CheckpointConfig
from unbroken.training.checkpoints import Checkpoints, LastStep
from unbroken.training.config import LoopConfig, OptimizerConfig, TrainerConfig
from unbroken.training.metrics.writer import MetricsWriter
from unbroken.training.state import read_state
from unbroken.training.trainer import Trainer
from unbroken.weights.files import describe_file


def make_trainer(**sizes) -> Trainer:
    config = TrainerConfig(optimizer=OptimizerConfig(learning_rate=1e-2, warmup_updates=9), num_minibatches=3)
    return Trainer(tiny_qwen3(**sizes), config)


def rows(step: int):
    return random_rows(np.random.default_rng(step), 6)


def equal_weights(a: Trainer, b: Trainer) -> bool:
    pairs = zip(a.named_weights(), b.named_weights(), strict=True)
    return all(name == other and torch.equal(x, y) for (name, x), (other, y) in pairs)


def make_saved(folder: Path) -> Trainer:
    """A trainer after two steps, which wrote a checkpoint."""
    trainer = make_trainer()
    for step in range(2):
        trainer.step(rows(step))
    trainer.save(folder, extra={"numbers": [1, 0.1]})
    return trainer


@pytest.fixture
def saved(tmp_path):
    return make_saved(tmp_path / "two"), tmp_path / "two"


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "two"
    make_saved(folder)
    return folder


@pytest.fixture
def folder(saved_once, tmp_path):
    """Its checkpoint, which a test may change."""
    shutil.copytree(saved_once, tmp_path / "two")
    return tmp_path / "two"


def test_a_loaded_trainer_goes_on_bit_for_bit(saved):
    """The third step depends on weights, averages, the number of updates, and the order that rows are dealt in."""
    trainer, folder = saved
    loaded = make_trainer(seed=7)
    assert loaded.load(folder) == {"numbers": [1, 0.1]}
    assert equal_weights(trainer, loaded)
    stats = [each.step(rows(2)) for each in (trainer, loaded)]
    assert equal_weights(trainer, loaded)
    assert stats[0].policy_version == stats[1].policy_version == 3
    assert stats[0].learning_rate == stats[1].learning_rate == pytest.approx(1e-2)
    assert stats[0].loss == stats[1].loss


def test_a_checkpoint_of_a_scripts_trainer_says_the_numerics_that_it_had(folder):
    """Of `auto`, which nobody has chosen for, these are fast."""
    assert [each["numerics"] for each in read_state(folder).state.processes] == ["fast"]


def test_a_trainer_without_an_update_can_be_saved(tmp_path):
    trainer, loaded = make_trainer(), make_trainer(seed=7)
    trainer.save(tmp_path / "new")
    assert loaded.load(tmp_path / "new") == {}
    for each in (trainer, loaded):
        each.step(rows(0))
    assert equal_weights(trainer, loaded)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_a_changed_or_missing_file_is_refused_by_name_and_nothing_is_loaded(folder, name):
    data = bytearray((folder / name).read_bytes())
    data[-1] ^= 1
    loaded = make_trainer()
    (folder / name).write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"two must hold a whole checkpoint: .*{re.escape(name)} must have"):
        loaded.load(folder)
    (folder / name).write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)} must have {len(data)} bytes"):
        loaded.load(folder)
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=rf"two must hold a whole checkpoint: .*{re.escape(name)} cannot be read"):
        loaded.load(folder)
    assert equal_weights(loaded, make_trainer())
    assert loaded.policy_version == 0


class _Planted:
    """What a file may name, and a pickle would call."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self._path,))


def test_a_checkpoint_runs_no_code_of_its_files(folder, tmp_path):
    (folder / ".metadata").write_bytes(pickle.dumps(_Planted(tmp_path / "ran")))
    state = json.loads((folder / "state.json").read_text())
    described = asdict(describe_file(folder / ".metadata"))
    state["files"] = [described if file["name"] == ".metadata" else file for file in state["files"]]
    (folder / "state.json").write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match="metadata cannot be read: it must describe tensors alone, and names"):
        make_trainer().load(folder)
    assert not (tmp_path / "ran").exists()


def test_a_folder_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="must hold a whole checkpoint: FileNotFoundError"):
        make_trainer().load(tmp_path)


def test_tensors_of_another_checkpoint_are_refused(saved, tmp_path):
    trainer, folder = saved
    trainer.step(rows(2))
    trainer.save(tmp_path / "three")
    state = json.loads((folder / "state.json").read_text())
    (tmp_path / "three" / "state.json").write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match=r"must hold a whole checkpoint: .* must have"):
        make_trainer().load(tmp_path / "three")


def test_a_checkpoint_of_another_model_is_refused_and_names_the_weight(folder):
    other = make_trainer(vocab_size=65)
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight is \(\(65, 32\), .* and \(\(64, 32\), "):
        other.load(folder)
    assert equal_weights(other, make_trainer(vocab_size=65))


@pytest.mark.parametrize("part", ["embed_tokens", "norm"])
def test_averages_of_other_parameters_than_those_that_train_are_refused(folder, part):
    """They go by number, so that those of one would silently be another's."""
    model = tiny_qwen3()
    model.model.get_submodule(part).requires_grad_(False)
    with pytest.raises(CheckpointError, match=r"must hold averages of the trained parameters: .* parameter"):
        Trainer(model, TrainerConfig()).load(folder)


def test_a_checkpoint_of_two_processes_goes_on_in_one_with_the_state_of_the_first(saved):
    """Their tensors are those of one: see `test_training_processes` for two."""
    trainer, folder = saved
    state = json.loads((folder / "state.json").read_text())
    second = state["processes"][0] | {"extra": {"numbers": [2]}}
    (folder / "state.json").write_text(json.dumps(state | {"processes": [*state["processes"], second]}))
    loaded = make_trainer()
    assert loaded.load(folder) == {"numbers": [1, 0.1]}
    assert equal_weights(trainer, loaded)


def test_a_checkpoint_that_cannot_be_written_leaves_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot be written: .*free space, or give another folder"):
        make_trainer().save(tmp_path / "file" / "one")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("extra", [{"a": (1, 2)}, {"a": {1: 2}}, {"a": float("nan")}, {"a": object()}])
def test_what_json_does_not_give_back_is_refused(tmp_path, extra):
    with pytest.raises(InvalidInputError, match="extra must "):
        make_trainer().save(tmp_path / "one", extra=extra)
    assert list(tmp_path.iterdir()) == []


def test_the_newest_checkpoint_is_resumed_and_old_ones_go(tmp_path):
    trainer, checkpoints = make_trainer(), Checkpoints(tmp_path, num_kept=2)
    assert checkpoints.resume(trainer) is None
    for step in range(3):
        trainer.step(rows(step))
        checkpoints.save(trainer, LastStep(num_steps=step + 1, metrics={"a": step / 3}))
    checkpoints.finish(trainer)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]
    loaded = make_trainer()
    resumed = Checkpoints(tmp_path).resume(loaded)
    assert (resumed.num_steps, resumed.metrics) == (3, {"a": 2 / 3})
    assert equal_weights(trainer, loaded)


def of_two_processes(folder, extra) -> None:
    """Change a checkpoint of one process to one that the first of two wrote."""
    state = json.loads((folder / "state.json").read_text())
    (process,) = state["processes"]
    process["extra"] |= {"num_processes": 2, **extra}
    (folder / "state.json").write_text(json.dumps(state | {"processes": [process, process]}))


def test_another_number_of_processes_takes_the_lowest_groups_and_says_what_that_may_cost(tmp_path, caplog):
    """Each process numbers its own groups, so that their numbers are others'."""
    trainer, checkpoints = make_trainer(), Checkpoints(tmp_path)
    groups = {"next": 8, "beyond": [], "num_replaced": 0}
    checkpoints.save(trainer, LastStep(num_steps=1, metrics={}, groups=groups))
    assert Checkpoints(tmp_path).resume(make_trainer()).groups == groups
    of_two_processes(tmp_path / "step-00000001", {})
    assert Checkpoints(tmp_path).resume(make_trainer()).groups is None
    assert "some problems" not in caplog.text
    checkpoints.save(trainer, LastStep(num_steps=1, metrics={}, groups=groups | {"beyond": [10]}))
    of_two_processes(tmp_path / "step-00000001", {})
    assert Checkpoints(tmp_path).resume(make_trainer()).groups is None
    assert "was written by 2 processes, and is continued by 1: some problems" in caplog.text


def test_a_curriculum_is_refused_in_another_number_of_processes(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    groups = {"next": 8, "beyond": [], "num_replaced": 0, "choices": {}}
    checkpoints.save(make_trainer(), LastStep(num_steps=1, metrics={}, groups=groups))
    of_two_processes(tmp_path / "step-00000001", {})
    with pytest.raises(CheckpointError, match="was written by 2 processes, and is continued by 1: with a curriculum"):
        Checkpoints(tmp_path).resume(make_trainer())


def test_a_run_continues_only_with_the_same_problems(tmp_path):
    Checkpoints(tmp_path, source="5 rows").save(make_trainer(), LastStep(num_steps=1, metrics={}))
    assert Checkpoints(tmp_path, source="5 rows").resume(make_trainer()) is not None
    for other in ("6 rows", ""):
        with pytest.raises(CheckpointError, match=f"began with '5 rows' and cannot continue with '{other}'"):
            Checkpoints(tmp_path, source=other).resume(make_trainer())


def test_a_checkpoint_that_does_not_name_its_problems_is_refused(tmp_path):
    Checkpoints(tmp_path).save(make_trainer(), LastStep(num_steps=1, metrics={}))
    path = tmp_path / "step-00000001" / "state.json"
    state = json.loads(path.read_text())
    del state["processes"][0]["extra"]["source"]
    path.write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match="does not say which problems its run has"):
        Checkpoints(tmp_path).resume(make_trainer())


def test_checkpoints_are_due_first_every_so_often_and_at_the_end(tmp_path):
    checkpoints = Checkpoints(tmp_path, every=3)
    assert [k for k in range(1, 9) if checkpoints.is_due(k, last=8)] == [1, 3, 6, 8]


def test_by_default_a_checkpoint_is_due_every_20_steps_or_10_minutes_whichever_comes_first(tmp_path):
    assert (CheckpointConfig().every, CheckpointConfig().every_s) == (20, 600.0)
    assert [k for k in range(1, 61) if Checkpoints(tmp_path).is_due(k, last=60)] == [1, 20, 40, 60]
    late = Checkpoints(tmp_path, every=1000, every_s=1e-9)
    assert [k for k in range(1, 5) if late.is_due(k, last=60)] == [1, 2, 3, 4]


def test_a_copy_is_written_as_it_was_taken_whatever_the_trainer_and_its_caller_do_meanwhile(tmp_path):
    trainer, extra = make_trainer(), {"numbers": [1]}
    trainer.step(rows(0))
    trainer.save(tmp_path / "at-once", extra=extra)
    write = trainer.copy_state(extra=extra)
    trainer.step(rows(1))
    extra["numbers"].append(2)
    assert write is not None
    write(tmp_path / "later")
    found, expected = make_trainer(), make_trainer()
    assert found.load(tmp_path / "later") == expected.load(tmp_path / "at-once") == {"numbers": [1]}
    assert equal_weights(found, expected)
    assert found.policy_version == 1
    found.step(rows(1))
    assert equal_weights(found, trainer)


class SlowCheckpoints(Checkpoints):
    """Writes only once it may, or once the run ends in whatever way."""

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        self.may_write = threading.Event()

    def _write(self, write, folder) -> None:
        assert folder.name == "step-00000001" or self.may_write.wait(60)
        super()._write(write, folder)

    def close(self) -> None:
        self.may_write.set()
        super().close()


async def run_slowly(tmp_path, checkpoints, on_step, *, num_steps: int = 4) -> Trainer:
    trainer = make_trainer()

    with MetricsWriter(tmp_path) as metrics:
        await train(
            make_source(trainer),
            trainer=trainer,
            publisher=None,
            metrics=metrics,
            config=LoopConfig(num_steps=num_steps),
            checkpoints=checkpoints,
            observer=Callbacks(on_step=on_step),
        )
    return trainer


async def test_steps_are_made_while_a_checkpoint_is_written_and_what_blocks_is_part_of_them(tmp_path):
    checkpoints = SlowCheckpoints(tmp_path / "checkpoints", every=2)
    seen = []

    def on_step(step, metrics) -> None:
        seen.append((step, checkpoints.holds(2)))
        assert 0 < metrics["seconds/checkpoint"] < metrics["seconds/step"]
        if step == 2:
            checkpoints.may_write.set()

    await run_slowly(tmp_path, checkpoints, on_step)
    assert seen[:3] == [(0, False), (1, False), (2, False)]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000002", "step-00000004"]
    two, whole = make_trainer(), make_trainer()
    two.load(tmp_path / "checkpoints" / "step-00000002")
    assert two.policy_version == 2
    assert not equal_weights(two, whole)


async def test_a_run_that_is_cancelled_completes_the_checkpoint_that_is_being_written(tmp_path):
    checkpoints = SlowCheckpoints(tmp_path / "checkpoints", every=2)
    reached = asyncio.Event()
    run = asyncio.create_task(
        run_slowly(tmp_path, checkpoints, lambda step, _: reached.set() if step == 2 else None, num_steps=10_000)
    )
    await asyncio.wait([run, asyncio.create_task(reached.wait())], return_when=asyncio.FIRST_COMPLETED)
    assert reached.is_set(), run
    assert not checkpoints.holds(2)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert checkpoints.holds(2)
    make_trainer().load(tmp_path / "checkpoints" / "step-00000002")


@pytest.mark.parametrize("name", ["every", "num_kept"])
def test_numbers_below_one_are_refused(tmp_path, name):
    with pytest.raises(InvalidInputError, match=rf"Checkpoints\.{name} must be at least 1, got 0"):
        Checkpoints(tmp_path, **{name: 0})


@pytest.mark.parametrize("changed", [{"files": []}, {"files": "none"}, {"files": {}}, {"format": 0}, {"format": 2}])
def test_files_that_are_none_and_other_formats_are_refused(folder, changed):
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(state | changed))
    with pytest.raises(CheckpointError, match="two must hold a whole checkpoint"):
        make_trainer().load(folder)


def test_a_parameter_that_was_not_trained_before_is_refused_wherever_it_stands(tmp_path):
    """Without averages of its own it would go on as if it had just begun."""

    def trainer_without(frozen: str) -> Trainer:
        model = tiny_qwen3()
        model.get_parameter(frozen).requires_grad_(False)
        return Trainer(model, TrainerConfig())

    names = [name for name, _ in tiny_qwen3().named_parameters()]
    for name in (names[0], names[-1]):
        trainer = trainer_without(name)
        trainer.step(rows(0))
        trainer.save(tmp_path / name)
        trainer_without(name).load(tmp_path / name)
        other = trainer_without(names[1])
        with pytest.raises(CheckpointError, match=r"must hold averages of the trained parameters: .* differs"):
            other.load(tmp_path / name)
        with pytest.raises(CheckpointError, match=f"{name} differs"):
            Trainer(tiny_qwen3(), TrainerConfig()).load(tmp_path / name)
