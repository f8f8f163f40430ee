"""The rows of `warm_start.data`, from conversations and exports, and runs that train on them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

import unbroken
from support.served import save_tiny_model
from unbroken.errors import InvalidInputError
from unbroken.rendering.loader import load_renderer
from unbroken.runs.config import RunConfig, WarmStartConfig
from unbroken.runs.export.rows import RowForm, export_rows
from unbroken.runs.processes import Rank
from unbroken.runs.prompts.supervised import load_warm_start
from unbroken.runs.verify import verify_run
from unbroken.training.config import LoopConfig
from unbroken.training.warm_start import WarmStart

pytestmark = pytest.mark.usefixtures("datasets_cache")

SMALL: Any = {"rollouts": {"problems_per_step": 2, "group_size": 2, "sampling": {"max_tokens": 6}}}
SMALL |= {"trainer": {"numerics": "exact", "optimizer": {"learning_rate": 1e-3}}}
SMALL |= {"loop": {"max_empty_steps": None}, "preflight": False}


def talk(number: int) -> dict[str, Any]:
    answer = {"role": "assistant", "content": str(2 * number)}
    return {"messages": [{"role": "user", "content": f"{number} + {number}?"}, answer]}


def parity(completions: list[str]) -> list[float]:
    return [float(len(text) % 2) for text in completions]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(data: Path, model: Path, rank: Rank | None = None, **settings: Any) -> WarmStart:
    warm_start = WarmStartConfig(data=str(data), steps=1, **settings)
    config = RunConfig(output=Path("unused"), loop=LoopConfig(num_steps=1), warm_start=warm_start)
    renderer = load_renderer(str(model))
    found = load_warm_start(config, source=str(model), renderer=renderer, context_length=200, rank=rank or Rank())
    assert found is not None
    return found


def test_conversations_are_the_same_from_each_format(model, tmp_path):
    rows = [talk(k) for k in range(3)]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    lines = load(write(tmp_path / "rows.jsonl", rows), model).conversations
    columns = load(tmp_path / "rows.parquet", model).conversations
    assert len(lines) == 3
    for (one,), (other,) in zip(lines, columns, strict=True):
        assert np.array_equal(one.token_ids, other.token_ids)
        assert np.array_equal(one.loss_mask, other.loss_mask)


def test_an_epoch_has_each_conversation_once_over_all_processes(model, tmp_path):
    data = write(tmp_path / "rows.jsonl", [talk(k) for k in range(16)])
    both = [load(data, model, Rank(index=index, num_processes=2)) for index in (0, 1)]
    alone = load(data, model)
    for step in (0, 1):
        found = [row.token_ids.tolist() for warm_start in both for row in warm_start.take(step)]
        assert sorted(found) == sorted(row.token_ids.tolist() for row in alone.take(step))
        assert len({tuple(each) for each in found}) == 16


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {"messages": [*talk(1)["messages"], talk(1)["messages"][1]]},
            r"row 1 of .*rows.jsonl cannot be trained.*\[2\]",
        ),
        (talk(10**300), "row 1 .* ids, and the model's context 200"),
        ({"prompt": "x"}, "row 1 .* must have token_ids or a list of messages"),
        ({"token_ids": [1, 2], "loss_mask": [False, True], "tokenizer": None}, "tokenizer must name the model"),
        ({"token_ids": [1, 2], "loss_mask": [False, False], "tokenizer": "MODEL"}, "only rows that were trained"),
        ({"token_ids": [1, 2], "loss_mask": [0, 1], "tokenizer": "MODEL"}, "loss_mask must be a list of bool"),
        (
            {"token_ids": [1, 2], "loss_mask": [False, True], "tokenizer": "OTHER"},
            "OTHER has the id 6 for the token .*, which is 5 in .*: export messages",
        ),
        (
            {"token_ids": [1, 2], "loss_mask": [False, True], "tokenizer": "MORE"},
            "has no id for the token 'more', which is [0-9]+ in .*MORE: export messages",
        ),
    ],
)
def test_a_row_that_cannot_be_shown_to_be_exact_is_refused_by_its_number(model, tmp_path, row, words):
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    a, b = (next(text for text, number in vocabulary.items() if number == k) for k in (5, 6))
    other = {**tokenizer, "model": {**tokenizer["model"], "vocab": {**vocabulary, a: 6, b: 5}}}
    last = max(tokenizer["added_tokens"], key=lambda each: each["id"])
    more = {
        **tokenizer,
        "added_tokens": [*tokenizer["added_tokens"], {**last, "content": "more", "id": last["id"] + 1}],
    }
    text = json.dumps(row).replace("MODEL", str(model))
    for name, changed in (("OTHER", other), ("MORE", more)):
        shutil.copytree(model, tmp_path / name)
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(changed))
        text = text.replace(name, str(tmp_path / name))
    data = write(tmp_path / "rows.jsonl", [talk(0), json.loads(text)])
    with pytest.raises(InvalidInputError, match=words):
        load(data, model)


@pytest.fixture(scope="module")
def warmed(model, tmp_path_factory) -> unbroken.FitResult:
    """A run of three supervised steps, then three of rollouts with the rows beside them."""
    folder = tmp_path_factory.mktemp("warmed")
    data = write(folder / "talks.jsonl", [talk(k) for k in range(5)])
    rows = [{"prompt": f"{k}?"} for k in range(4)]
    warm_start = {"data": str(data), "steps": 3, "learning_rate": 1e-2, "weight": 0.2}
    return unbroken.fit(model, rows, parity, steps=6, output=folder / "run", warm_start=warm_start, **SMALL)


def test_a_run_begins_with_supervised_steps_and_mixes_their_rows_into_the_others(warmed, capsys):
    steps = warmed.metrics
    assert [step["step"] for step in steps] == list(range(6))
    assert all(step["supervised/learning_rate"] == 1e-2 and step["supervised/num_rows"] == 2 for step in steps[:3])
    assert not any("reward/mean" in step for step in steps[:3])
    assert steps[2]["supervised/loss"] < steps[0]["supervised/loss"] - 1
    trained = [step for step in steps[3:] if step["train/num_rows"]]
    assert trained
    assert all(step["supervised/num_rows"] == 2 for step in trained)
    assert all("supervised/grad_norm" not in step for step in trained)
    assert [step["train/policy_version"] for step in steps[:3]] == [1, 2, 3]


def test_rows_of_an_export_train_the_ids_that_were_trained(warmed, model, tmp_path):
    counts = export_rows(str(warmed.folder), tmp_path / "rows.jsonl", form=RowForm.ROWS)
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    kept = [line for line in lines if any(line["loss_mask"])]
    assert 0 < len(kept) <= counts["rows"]
    export_rows(str(warmed.folder), tmp_path / "rows.parquet", form=RowForm.ROWS)
    datasets.Dataset.from_parquet(str(tmp_path / "rows.parquet")).filter(lambda row: any(row["loss_mask"])).to_parquet(
        tmp_path / "kept.parquet"
    )
    for data in (write(tmp_path / "kept.jsonl", kept), tmp_path / "kept.parquet"):
        for (row,), line in zip(load(data, model).conversations, kept, strict=True):
            end = len(row.token_ids)
            assert row.token_ids.tolist() == line["token_ids"][:end]
            assert row.loss_mask.tolist() == line["loss_mask"][:end]
            assert not any(line["loss_mask"][end:])


def test_a_run_with_a_warm_start_cannot_be_verified_and_says_so(warmed):
    with pytest.raises(
        InvalidInputError, match=r"warm_start.data must be left out: the supervised rows are in no file"
    ):
        verify_run(warmed.folder)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"steps": 0}, "warm_start.steps must be >= 1, or weight above 0"),
        ({"steps": 7}, r"warm_start.steps must be at most 6"),
        ({"steps": 0, "weight": 0.1, "learning_rate": 1e-3}, "learning_rate must be left out with steps 0"),
        ({"steps": 1, "weight": -1}, "weight must be finite and >= 0"),
    ],
)
def test_settings_that_do_nothing_or_do_not_fit_are_refused(model, tmp_path, settings, words):
    data = write(tmp_path / "talks.jsonl", [talk(0)])
    with pytest.raises(InvalidInputError, match=words):
        unbroken.fit(
            model,
            [{"prompt": "1?"}],
            parity,
            steps=6,
            output=tmp_path / "run",
            warm_start={"data": str(data), **settings},
        )


def test_a_reference_that_would_pull_back_before_the_warm_start_is_refused(model, tmp_path):
    data = write(tmp_path / "talks.jsonl", [talk(0)])
    settings = {**SMALL, "trainer": {"kl_weight": 0.1}, "warm_start": {"data": str(data), "steps": 1}}
    with pytest.raises(InvalidInputError, match=r"warm_start.steps must be 0 with a reference"):
        unbroken.fit(model, [{"prompt": "1?"}], parity, steps=6, output=tmp_path / "run", **settings)
