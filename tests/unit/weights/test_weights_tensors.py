"""Weights in safetensors files: what is written is read, and tied weights must agree."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from unbroken.errors import InvalidInputError, WeightsError
from unbroken.weights.files import FileSource, write_tensors

WEIGHTS = {"embed": torch.arange(6.0).view(2, 3), "norm": torch.ones(3), "head": torch.arange(6.0).view(2, 3)}
TIED = ("head", "embed")


def write(folder: Path, weights: dict[str, torch.Tensor], *, file_bytes: int = 24) -> FileSource:
    list(write_tensors(folder, weights.items(), file_bytes=file_bytes))
    return FileSource(folder)


def test_weights_that_fill_several_files_are_read_as_they_were_written(tmp_path: Path) -> None:
    source = write(tmp_path, WEIGHTS)
    assert len(source.paths()) == 2
    assert source.shapes() == {"embed": (2, 3), "norm": (3,), "head": (2, 3)}
    received = FileSource.from_object(source.to_object()).read("cpu", tied=TIED)
    found = dict(received)
    assert found.keys() == WEIGHTS.keys()
    assert all(torch.equal(found[name], WEIGHTS[name]) for name in WEIGHTS)


def test_tied_weights_that_differ_are_refused(tmp_path: Path) -> None:
    source = write(tmp_path, WEIGHTS | {"head": torch.zeros(2, 3)})
    with pytest.raises(WeightsError, match="'head' and 'embed' are tied in the model, but their values differ"):
        source.read("cpu", tied=TIED)


def test_a_folder_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"has no \*\.safetensors files"):
        FileSource(tmp_path).read("cpu")


@pytest.mark.parametrize("damage", ["cut", "header", "empty"])
def test_a_broken_file_is_named_before_the_first_tensor_is_handed_out(tmp_path: Path, damage: str) -> None:
    source = write(tmp_path, WEIGHTS)
    last = source.paths()[-1]
    data = last.read_bytes()
    last.write_bytes({"cut": data[:-1], "header": data[:8] + b"x" + data[9:], "empty": b""}[damage])
    for read in (source.shapes, lambda: source.read("cpu")):
        with pytest.raises(WeightsError, match=f"weight file {last} cannot be read"):
            read()


def test_files_that_are_removed_while_they_are_loaded_are_read_to_the_end(tmp_path: Path) -> None:
    source = write(tmp_path, WEIGHTS)
    received = iter(source.read("cpu"))
    next(received)
    for path in source.paths():
        path.unlink()
    assert len(list(received)) == 2


def test_a_name_that_comes_twice_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="weight 'norm' came twice"):
        list(write_tensors(tmp_path, [("norm", torch.ones(1)), ("norm", torch.ones(1))]))


@pytest.mark.parametrize("is_temporary", [True, False])
def test_only_a_temporary_folder_is_removed_with_its_update(tmp_path: Path, is_temporary: bool) -> None:
    source = FileSource(write(tmp_path, WEIGHTS).folder, is_temporary=is_temporary)
    source.close()
    source.close()
    assert tmp_path.exists() != is_temporary
