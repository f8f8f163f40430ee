"""Versions of the weights as files: whole or not there, and never used unverified."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from unbroken.errors import InvalidInputError, WeightsError
from unbroken.weights.files import WeightFiles, write_weights
from unbroken.weights.store import VersionStore

WEIGHTS = [("a", torch.arange(6.0).reshape(2, 3)), ("b", torch.ones(4, dtype=torch.bfloat16)), ("c", torch.tensor(7))]


def read(folder: Path) -> WeightFiles:
    """Read and verify a version."""
    store = VersionStore(folder.parent)
    return store.fetch(store.read(folder.name))


def test_what_was_written_is_read(tmp_path: Path) -> None:
    written = write_weights(tmp_path, WEIGHTS, policy_version=3, file_bytes=24)
    found = read(written.folder)
    assert found == written
    assert found.policy_version == 3
    assert len(found.files) == 2
    assert found.num_bytes == sum(path.stat().st_size for path in written.folder.glob("*.safetensors"))
    tensors = dict(found.tensors())
    assert {name: (t.dtype, t.tolist()) for name, t in tensors.items()} == {
        name: (t.dtype, t.tolist()) for name, t in WEIGHTS
    }


def test_weights_that_share_memory_are_written_separately(tmp_path: Path) -> None:
    base = torch.arange(4.0)
    found = dict(write_weights(tmp_path, [("x", base[:2]), ("y", base)], policy_version=1).tensors())
    assert found["x"].tolist() == [0, 1]
    assert found["y"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("damage", ["cut", "changed", "missing"])
def test_a_damaged_file_is_refused(tmp_path: Path, damage: str) -> None:
    written = write_weights(tmp_path, WEIGHTS, policy_version=1)
    path = written.folder / written.files[0].name
    data = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    else:
        data[-1] ^= 1
        path.write_bytes(data[:-4] if damage == "cut" else data)
    with pytest.raises(WeightsError, match=r"00000\.safetensors"):
        read(written.folder)


def test_a_file_that_is_not_in_the_manifest_is_refused(tmp_path: Path) -> None:
    files = write_weights(tmp_path, WEIGHTS, policy_version=1)
    (files.folder / "more.safetensors").write_bytes(b"")
    with pytest.raises(WeightsError, match=r"more\.safetensors is not in the manifest\.json of its folder"):
        files.verify()


def test_a_version_that_could_not_be_written_leaves_nothing(tmp_path: Path) -> None:
    def weights():
        yield WEIGHTS[0]
        raise OSError(28, "No space left on device")

    with pytest.raises(WeightsError, match=r"version 2 of the weights cannot be written.*No space left.*make room"):
        write_weights(tmp_path, weights(), policy_version=2)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_write_is_no_version(tmp_path: Path) -> None:
    def weights():
        yield WEIGHTS[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_weights(tmp_path, weights(), policy_version=2)
    assert list(tmp_path.iterdir()) == []


def test_other_weights_have_another_digest(tmp_path: Path) -> None:
    one = write_weights(tmp_path / "1", WEIGHTS, policy_version=1)
    same = write_weights(tmp_path / "2", WEIGHTS, policy_version=1)
    other = write_weights(tmp_path / "3", [("a", WEIGHTS[0][1] + 1), *WEIGHTS[1:]], policy_version=1)
    assert one.digest == same.digest != other.digest


@pytest.mark.parametrize(
    "manifest",
    [
        "{",
        "[]",
        json.dumps({"format": 2, "policy_version": 1, "files": []}),
        json.dumps({"format": 1, "policy_version": 1, "files": [{"name": "../x", "num_bytes": 1, "sha256": ""}]}),
    ],
)
def test_a_bad_manifest_is_refused(tmp_path: Path, manifest: str) -> None:
    folder = write_weights(tmp_path, WEIGHTS, policy_version=1).folder
    (folder / "manifest.json").write_text(manifest)
    with pytest.raises(WeightsError, match=rf"{tmp_path}.*: "):
        read(folder)


def test_a_name_that_comes_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="'a' came twice"):
        write_weights(tmp_path, [WEIGHTS[0], WEIGHTS[0]], policy_version=1)
    with pytest.raises(InvalidInputError, match="'a' came twice"):  # the two in files of their own
        write_weights(tmp_path, [WEIGHTS[0], WEIGHTS[0]], policy_version=1, file_bytes=1)


def test_a_file_that_changes_though_its_size_and_times_stay_is_noticed(tmp_path: Path) -> None:
    written = write_weights(tmp_path, [("a", torch.zeros(9)), ("b", torch.ones(9))], policy_version=1, file_bytes=30)
    written.verify()
    path = written.folder / written.files[1].name
    status, content = path.stat(), path.read_bytes()
    path.write_bytes(content[:-1] + b"x")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # as a copy that keeps times
    with pytest.raises(WeightsError, match=r"00001\.safetensors must have SHA-256"):
        written.verify()
