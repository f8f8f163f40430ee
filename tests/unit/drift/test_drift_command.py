"""`unbroken drift` as a user runs it, on a tiny model, and the forms of its report."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.pages import Page
from support.served import save_tiny_model, served
from unbroken.cli import main
from unbroken.drift.conversations import load_prompts
from unbroken.drift.report import DriftExample, DriftReport, DriftSetup, to_html, to_row, to_text
from unbroken.errors import InvalidInputError
from unbroken.retokenising.changes import Cause, IdOrigin
from unbroken.retokenising.comparison import Counts
from unbroken.training.metrics.mismatch import Mismatch
from unbroken.viewer.reports import ShownToken, SideBySide

HOSTILE = "<script>alert('drift')</script>\x1b[31m|`"
COUNTS = Counts(num_rollouts=2, num_turns=3, num_ids=4)
NUMBERS = Mismatch(num_tokens=9, k3=0.5, max_abs=2.0, equal_share=0.5, share_off_20pct=0.25)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def report() -> DriftReport:
    token = ShownToken(token_id=1, text=HOSTILE, origin=IdOrigin.SAMPLED, is_changed=True)
    sides = SideBySide(exact=(token,), retokenised=(token, token))
    return DriftReport(
        about=DriftSetup(
            model=HOSTILE, engine="embedded", parser=HOSTILE, template_sha256="0" * 64, options={HOSTILE: HOSTILE},
            prompts=HOSTILE, num_conversations=4, temperature=1.0, max_tokens=8, max_turns=2, seed=0,
        ),
        compared=Counts(num_rollouts=4, num_turns=6, num_ids=40),
        changed=COUNTS,
        causes=dict.fromkeys(Cause, COUNTS),
        num_failed=1, num_refused=1, num_turns_left_out=1, num_unscored=1,
        exact=NUMBERS, retokenised=NUMBERS, seconds=1.0,
        examples=tuple(DriftExample(cause=cause, sides=sides) for cause in Cause),
    )  # fmt: skip


def run(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    status = main(["drift", *map(str, arguments)])
    shown = capsys.readouterr()
    return status, shown.out, shown.err


def test_a_tiny_model_is_measured(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "new" / "drift.html"
    few = ("--model", model, "--conversations", 4, "--max-tokens", 24, "--max-turns", 3)
    status, out, _ = run(capsys, *few, "--json", "--html", page)
    report = json.loads(out)
    assert status == 0
    assert (report["format"], report["version"]) == ("unbroken-drift", 1)
    assert set(report) == {
        "format", "version", "about", "compared", "changed", "causes", "num_failed", "num_refused",
        "num_turns_left_out", "exact", "retokenised", "num_unscored", "seconds",
    }  # fmt: skip
    assert set(report["causes"]) == {cause.value for cause in Cause}
    assert set(report["changed"]) == set(report["causes"]["bpe_split"]) == {
        "num_rollouts", "num_turns", "num_ids", "share_of_rollouts", "share_of_turns", "share_of_ids",
    }  # fmt: skip
    assert report["compared"]["num_rollouts"] + report["num_failed"] + report["num_refused"] == 4
    assert report["changed"]["share_of_rollouts"] > 0.5, "a random model spells nothing as the tokenizer does"
    assert report["exact"]["share_off_20pct"] == 0.0
    assert report["exact"]["k3"] < 1e-6 < report["retokenised"]["k3"] < math.inf
    assert page.read_text("utf-8").startswith("<!doctype html>")
    again = json.loads(run(capsys, *few, "--json")[1])
    assert all(again[key] == report[key] for key in ("about", "compared", "changed", "causes"))


def test_prompts_come_from_a_file(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "hi", "follow_ups": ["and?", "so?"]}) + "\n\n")
    arguments = ("--model", model, "--prompts", file, "--conversations", 2, "--max-tokens", 8, "--no-score", "--json")
    report = json.loads(run(capsys, *arguments)[1])
    assert report["about"]["prompts"] == "prompts.jsonl"
    assert report["compared"]["num_turns"] + report["num_turns_left_out"] == 6
    assert report["exact"] is report["retokenised"] is None


def test_a_line_of_prompts_ends_with_a_line_feed_only(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "one\u2028two\x85three"}, {"prompt": "four"}]
    file.write_bytes("\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode())
    assert asyncio.run(load_prompts(file)(0).start()).messages[0]["content"] == "one\u2028two\x85three"
    assert asyncio.run(load_prompts(file)(1).start()).messages[0]["content"] == "four"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", "at least one row"),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [{"id": "1", '
            '"type": "function", "function": {"name": "lookup", "arguments": {}}}]}]}',
            "the last message must have a text",
        ),
        ("{", "line 1 must be a JSON object"),
        ("[]", "must be an object with prompt or messages"),
        ('{"prompt": "a", "messages": []}', "must be an object with prompt or messages"),
        ('{"prompt": "a", "tools": []}', "must be an object with prompt or messages"),
        ('{"prompt": null}', "the last message must have a text"),
        ('{"messages": [{"content": "a"}]}', "role must be a non-empty string"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "not be the assistant's"),
        ('{"prompt": "a", "results": []}', "results must be an object"),
        ('{"prompt": "a", "follow_ups": "b"}', "follow_ups must be a list of texts"),
    ],
)
def test_a_malformed_row_is_named(line: str, expected: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(line)
    with pytest.raises(InvalidInputError, match=expected):
        load_prompts(file)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--model", "/no/such/folder"), "must be a folder that exists"),
        (("--prompts", "no_such.jsonl"), "no_such.jsonl"),
        (("--conversations", "0"), "num_conversations must be 1 or more"),
        (("--model", "{model}", "--temperature", "-1"), "temperature must be"),
        (("--model", "{model}", "--html", "{model}"), "cannot be written"),
        (("--model", "{model}", "--engine", "http://127.0.0.1:9", "--api-key-file", "no_such"), "--api-key-file"),
    ],
)
def test_what_is_wrong_is_an_error_that_names_it(
    arguments: tuple[str, ...], expected: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ("--max-tokens", 2, "--no-score") if "--html" in arguments else ()
    status, out, err = run(capsys, *(argument.format(model=model) for argument in arguments), *few)
    assert status == 1
    assert bool(out) == ("--html" in arguments)  # what was sampled for hours is shown all the same
    assert expected in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "arguments",
    [
        ("--engine", "http://127.0.0.1:1"),
        ("--model", "x", "--engine", "vllm"),
        ("--model", "x", "--engine", "http://127.0.0.1:1", "--engine", "embedded"),
        ("--json", "--row"),
        ("--option", "a b=1"),
        ("--no-such-option",),
    ],
)
def test_wrong_usage_is_status_2(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        run(capsys, *arguments)
    assert raised.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_hostile_text_is_text_on_the_page(report: DriftReport) -> None:
    text = to_html(report)
    page = Page(text)
    assert page.loads == []
    assert "\x1b" not in text
    assert "<script>" not in text
    num_drawn = text.count("\\u003cscript\\u003ealert(\\u0027drift\\u0027)\\u003c/script\\u003e")
    assert page.text.count("<script>alert('drift')</script>\\x1b[31m|`") + num_drawn >= 3 * len(Cause)


def test_the_text_fits_in_80_columns_and_cannot_move_a_terminals_cursor(report: DriftReport) -> None:
    lines = to_text(report).splitlines()
    assert max(map(len, lines)) <= 80
    assert all(line.isprintable() for line in lines)
    joined = " ".join(" ".join(lines).split())
    assert "50.0 % of 4 rollouts, 50.0 % of 6 turns and 10.0 % of 40 sampled ids" in joined
    assert "25.00 % of 9 ratios off by more than 20 %, k3 5.0e-01" in joined
    assert all(label in joined for label in ("bpe split", "not compared", "as sampled", "retokenised"))


def test_a_row_has_a_cell_for_each_column_of_the_table(report: DriftReport) -> None:
    table = (Path(__file__).parents[3] / "docs" / "drift.md").read_text("utf-8")
    header = next(line for line in table.splitlines() if line.startswith("| model |"))
    safe = replace(report, about=replace(report.about, prompts="lookup"))
    assert to_row(safe).replace("\\|", "").count("|") == header.count("|")


def test_nothing_changed_is_no_drift(report: DriftReport) -> None:
    none = Counts(num_rollouts=0, num_turns=0, num_ids=0)
    report = replace(report, changed=none, causes=dict.fromkeys(Cause, none), examples=())
    assert "would have changed none of 4 rollouts (40 ids)" in to_text(report)
    assert "NO DRIFT" in to_html(report)


@pytest.mark.e2e
def test_a_served_model_is_measured_like_an_embedded_one(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ("--model", model, "--conversations", 2, "--max-tokens", 8, "--max-turns", 2, "--json")
    with served(model, engine="transformers") as server:
        status, out, _ = run(capsys, *few, "--engine", server.url)
    report, embedded = json.loads(out), json.loads(run(capsys, *few)[1])
    assert status == 0
    assert report["about"].pop("engine") == "server"
    assert embedded["about"].pop("engine") == "embedded"
    assert all(report[key] == embedded[key] for key in ("about", "compared", "changed", "causes"))
    assert report["exact"]["share_off_20pct"] == 0.0
    assert server.url not in out, "a report is for others"
