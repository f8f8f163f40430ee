"""What `unbroken audit`, `drift` and `numerics` say of a real model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from unbroken.cli import main

pytestmark = pytest.mark.real

MAX_NUMERICS_GB, MAX_NUMERICS_S = 3.5, 150.0
"""Of memory, and of CPU time, which others on the same cores make longer too."""


def run(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, Any]:
    """Run a command; its status and the JSON that it prints."""
    status = main([*map(str, arguments), "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_the_tokenizer_splits_numbers_into_digits_as_the_model_was_trained(model):
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert tokenizer.tokenize("In 2026, 1,389 calls") == [
        *("In", "Ġ", "2", "0", "2", "6", ",", "Ġ", "1", ",", "3", "8", "9"),
        "Ġcalls",
    ]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)


def test_the_audit_bridges_all_turns_and_finds_what_the_template_lacks_and_what_text_loses(model, capsys):
    status, report = run(capsys, "audit", model, "--conversations", 100)
    assert status == 3
    assert "ignores_tools" in report["kind"]["traits"]
    assert report["fuzz"]["num_exact"] == report["fuzz"]["num_conversations"] == 100
    lost = report["drift"]
    assert 0.6 < lost["num_sequences_changed"] / lost["num_sequences"] < 0.9


def test_retokenising_its_own_conversations_changes_ids_and_only_then_the_policy(model, tmp_path, capsys):
    sizes = ("--problems", 6, "--rollouts.limits.max-turns", 3, "--rollouts.sampling.max-tokens", 48)
    task = ("unbroken.demo.lookup:LookupConversation", "--rollouts.tools-in-messages", "true", *sizes)
    status, report = run(capsys, "eval", *task, "--model", model, "--retokenised", "--output", tmp_path / "out")
    assert status == 0
    found = report["models"][0]["sets"]["evaluation"]["retokenised"]
    assert found["changed"]["num_ids"] > 0
    assert found["exact"]["k3"] < 1e-8
    assert found["retokenised"]["k3"] > 1e-4


def test_training_with_a_tool_that_the_template_does_not_show_is_refused(model, tmp_path, capsys):
    tools = tmp_path / "tools.py"
    tools.write_text(
        'from unbroken import tool\n\n\n@tool\ndef now() -> str:\n    """Say the time."""\n    return "12"\n'
    )
    task = Path(__file__).with_name("task.toml")
    arguments = ["--model", str(model), "--output", str(tmp_path / "run"), "--tools", f"{tools}:now"]
    assert main(["train", str(task), *arguments]) != 0
    assert "prompts are the same with and without now" in capsys.readouterr().err


def test_exact_numerics_have_no_difference_at_all_and_take_time_and_memory_within_bounds(model, tmp_path):
    command = [sys.executable, "-m", "unbroken", "numerics", str(model), "--rows", "2", "--max-tokens", "8", "--json"]
    output, progress = tmp_path / "output", tmp_path / "progress"
    with output.open("w") as output_file, progress.open("w") as progress_file:
        process = subprocess.Popen(
            command, stdout=output_file, stderr=progress_file, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, output.read_text() + progress.read_text()
    fast, exact = json.loads(output.read_text())
    assert any(way["max_abs"] > 0 for way in fast["ways"].values())
    assert len(exact["ways"]) == 6
    for way in exact["ways"].values():
        assert way["max_abs"] == 0
        assert way["equal_share"] == 1
    assert exact["modules"] == "outputs of 393 modules are equal"
    assert sum("compared" in line for line in progress.read_text().splitlines()) == 2 * 7
    assert usage.ru_maxrss / 1e6 < MAX_NUMERICS_GB
    assert usage.ru_utime + usage.ru_stime < MAX_NUMERICS_S
