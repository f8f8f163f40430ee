"""The recipe with a judge behind a URL, as its first lines say, with a tiny random model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.served import save_tiny_model
from unbroken.cli import main

FOLDER = Path(__file__).parents[2] / "recipes" / "judge"
SMALL = (
    "--loop.num-steps=2", "--rollouts.problems-per-step=2", "--rollouts.group-size=4", "--evaluation.num-problems=2",
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("datasets_cache")


@pytest.fixture
def judge() -> Iterator[str]:
    """The URL of the stand-in, as it says it."""
    command = [sys.executable, str(FOLDER / "stand_in.py"), "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1]
        process.terminate()


def test_the_recipe_trains_by_the_replies_of_a_judge_and_asks_nothing_twice(tmp_path, monkeypatch, judge, capsys):
    monkeypatch.setenv("JUDGE_URL", judge)
    monkeypatch.chdir(tmp_path)
    words = ["train", str(FOLDER / "recipe.toml"), f"--model={save_tiny_model(tmp_path / 'model')}", *SMALL]
    assert main([*words, "--output=first"]) == 0
    assert main([*words, "--output=again"]) == 0
    first, again = (
        [json.loads(line) for line in (tmp_path / name / "metrics" / "metrics.jsonl").read_text().splitlines()]
        for name in ("first", "again")
    )
    for line in first:
        assert line["judge/requests"] > 0
        assert line["judge/failed"] == 0
        assert 0 <= line["reward/judge_mean"] <= 1
        assert line["reward/mean"] == pytest.approx(line["reward/correct_mean"] + line["reward/judge_mean"] / 2)
    assert again[0]["judge/requests"] == 0
    assert again[0]["judge/cached"] > 0
    assert (tmp_path / "first" / "final" / "config.json").exists()
