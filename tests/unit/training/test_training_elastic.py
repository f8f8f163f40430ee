"""Checkpoints between numbers of processes and layouts, bit for bit; and one that dies or fails while all write."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

from support import elastic_process
from support.processes import run_processes
from unbroken.errors import CheckpointError
from unbroken.training.state import load_averages, read_state

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    """The folder in which four processes wrote and read checkpoints."""
    directory = tmp_path_factory.mktemp("elastic")
    model = elastic_process.make_model(seed=0)
    tensors = elastic_process.tensors_of(model, elastic_process.make_optimizer(model, num_updates=2))
    elastic_process.save(directory / "alone", tensors, model, None)
    run_processes("support.elastic_process", directory, codes=[0, 0, 0, -signal.SIGKILL])
    return directory


@pytest.mark.parametrize("layout", elastic_process.LAYOUTS)
def test_one_process_loads_what_four_wrote_bit_for_bit(results, layout):
    """The four loaded each other's, and that of one process, in the same way."""
    model = elastic_process.make_model(seed=0)
    expected = elastic_process.tensors_of(model, elastic_process.make_optimizer(model, num_updates=2))
    elastic_process.assert_same(elastic_process.load(results / layout, lambda model: None), expected)


@pytest.mark.parametrize("layout", elastic_process.LAYOUTS)
def test_each_process_writes_a_part_and_nothing_is_written_twice(results, layout):
    stored = FileSystemReader(results / layout).read_metadata()
    for name, tensor in stored.state_dict_metadata.items():
        assert sum(torch.Size(chunk.sizes).numel() for chunk in tensor.chunks) == tensor.size.numel(), name
    files = {info.relative_path for info in stored.storage_data.values()}
    assert files == {f"__{rank}_0.distcp" for rank in range(elastic_process.NUM_PROCESSES)}
    assert {path.name for path in (results / layout).iterdir()} == files | {".metadata", "state.json"}
    read_state(results / layout)


@torch.compiler.set_stance("force_eager")
def test_quantised_shards_of_averages_are_refused_by_another_number_of_processes(results):
    """The four went on from theirs bit for bit. Blocks with one scale cannot be cut in another way."""
    pytest.importorskip("torchao")
    model = torch.nn.Sequential(torch.nn.Linear(128, 128))
    optimizer = elastic_process.train_quantised(model)
    with pytest.raises(CheckpointError, match="sharded continue with the same number of processes alone"):
        load_averages(optimizer, [name for name, _ in model.named_parameters()], read_state(results / "quantised"))


@pytest.mark.parametrize(("how", "ranks"), [("full", (0, 1, 2, 3)), ("killed", (0, 1, 2))])
def test_a_process_that_fails_or_dies_fails_all_and_nothing_is_left(results, how, ranks):
    errors = [(results / f"{how}-{rank}.txt").read_text() for rank in ranks]
    assert all(f"checkpoint {results / how} cannot be written: " in error for error in errors), errors
    if how == "full":
        assert all("No space left on device" in error for error in errors), errors
    assert not [path for path in results.iterdir() if how in path.name and path.suffix != ".txt"]
