"""`unbroken verify RUN`: a finished run is trained again from its files, and what was changed in them is named."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support import letters_recipe, talking
from support.served import save_tiny_model
from unbroken.cli import main
from unbroken.runs import verify as verify_module
from unbroken.training.model.adapters import checksum_of

RECIPE = Path(letters_recipe.__file__)
CHANGED = 2
"""The step in whose files something is changed: the third of four, after the checkpoint of the second."""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory, model) -> Path:
    output = tmp_path_factory.mktemp("runs") / "letters"
    assert train(output, model) == 0
    return output


@pytest.fixture
def run(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "letters"))


def train(output: Path, model: Path, *options: str, max_tokens: int = 8) -> int:
    return main(make_words(output, model, *options, max_tokens=max_tokens))


def make_words(output: Path, model: Path, *options: str, max_tokens: int = 8) -> list[str]:
    words = ["train", str(RECIPE), f"--output={output}", f"--model={model}", "--trainer.numerics=exact"]
    words += ["--loop.num-steps=4", "--checkpoints.every=2", "--checkpoints.num-kept=9", "--preflight=false"]
    words += [f"--rollouts.sampling.max-tokens={max_tokens}", "--rollouts.group-size=4", "--trainer.num-minibatches=2"]
    return [*words, *options]


def verify(capsys, *words: Any) -> tuple[int, str]:
    """The status and the report."""
    capsys.readouterr()
    status = main(["verify", *map(str, words)])
    shown = capsys.readouterr()
    return status, shown.out + shown.err


def rollouts_of(run: Path, step: int = CHANGED) -> Path:
    return run / "rollouts" / f"step-{step:08}.rank-0.jsonl.gz"


def edit_lines(path: Path, edit: Callable[[list[Any]], None]) -> None:
    """Change a file of rollouts, packed again as it should be."""
    lines = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    edit(lines)
    path.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))


def edit_json(path: Path, edit: Callable[[Any], None]) -> None:
    value = json.loads(path.read_text())
    edit(value)
    path.write_text(json.dumps(value))


def flip_byte(path: Path, place: int = -1000) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def row_of(lines: list[Any]) -> dict[str, Any]:
    """The row of the sixth rollout: of the second group, which the run does not score."""
    row: dict[str, Any] = lines[2 + 5]["rows"][0]
    return row


def change_sampled_id(run: Path) -> None:
    def edit(lines: list[Any]) -> None:
        row_of(lines)["token_ids"][-2] ^= 1

    edit_lines(rollouts_of(run), edit)


def change_prompt_id(run: Path) -> None:
    def edit(lines: list[Any]) -> None:
        row_of(lines)["token_ids"][1] ^= 1

    edit_lines(rollouts_of(run), edit)


def change_last_bit_of_logprob(run: Path) -> None:
    def edit(lines: list[Any]) -> None:
        logprobs = row_of(lines)["rollout_logprobs"]
        logprobs[3] = float(str(np.nextafter(np.float32(logprobs[3]), np.float32(0))))

    edit_lines(rollouts_of(run), edit)


def change_reward(run: Path) -> None:
    def edit(lines: list[Any]) -> None:
        lines[2 + 5]["reward"] += 1e-9

    edit_lines(rollouts_of(run), edit)


def change_reward_everywhere_in_its_file(run: Path) -> None:
    """As somebody would who knows the format: only the update shows it."""

    def edit(lines: list[Any]) -> None:
        lines[2 + 5]["reward"] += 0.25
        lines[0]["columns"]["reward"][5] += 0.25
        rewards = np.array(lines[0]["columns"]["reward"])
        lines[0]["rewards"] = [len(rewards), float(rewards.mean()), float(rewards.std())]

    edit_lines(rollouts_of(run), edit)


def change_advantage(run: Path) -> None:
    def edit(lines: list[Any]) -> None:
        row_of(lines)["advantages"][0][2] *= -1

    edit_lines(rollouts_of(run), edit)


def change_text(run: Path) -> None:
    def edit(lines: list[Any]) -> None:
        lines[2 + 5]["messages"][-1]["content"] += "."

    edit_lines(rollouts_of(run), edit)


def change_packed_byte(run: Path) -> None:
    flip_byte(rollouts_of(run), 1500)


def change_loss(run: Path) -> None:
    path = run / "metrics" / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[CHANGED]["train/grad_norm"] *= 1 + 1e-9
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def change_checkpoint(run: Path) -> None:
    flip_byte(run / "checkpoints" / "step-00000002" / "__0_0.distcp", 20_000)


def change_checkpoint_with_its_digest(run: Path) -> None:
    """The checkpoint is whole by its own digests, so a run would continue from it."""
    folder = run / "checkpoints" / "step-00000004"
    data = bytearray((folder / "__0_0.distcp").read_bytes())
    place = next(k for k in range(20_000, len(data)) if data[k - 64 : k + 64].count(0) < 8)  # of numbers, no padding
    data[place] ^= 1
    (folder / "__0_0.distcp").write_bytes(data)

    def edit(state: Any) -> None:
        for file in state["files"]:
            file["sha256"] = hashlib.sha256((folder / file["name"]).read_bytes()).hexdigest()

    edit_json(folder / "state.json", edit)


def change_generator(run: Path) -> None:
    def edit(state: Any) -> None:
        state["processes"][0]["rng"]["state"]["state"] += 1

    edit_json(run / "checkpoints" / "step-00000004" / "state.json", edit)


def remove_numerics_of_a_checkpoint(run: Path) -> None:
    edit_json(run / "checkpoints" / "step-00000004" / "state.json", lambda state: state["processes"][0].pop("numerics"))


def change_final_model(run: Path) -> None:
    flip_byte(run / "final" / "model.safetensors")


def change_learning_rate(run: Path) -> None:
    def edit(recipe: Any) -> None:
        recipe["settings"]["trainer.optimizer.learning_rate"] *= 1.001

    edit_json(run / "recipe.json", edit)


def change_checksum(run: Path) -> None:
    def edit(lines: list[Any]) -> None:
        lines[0]["weights"] = lines[0]["weights"][:-1] + "g"

    edit_lines(rollouts_of(run), edit)


def add_an_adapter(run: Path) -> None:
    (run / "final" / "adapter_config.json").write_text("{}")


def add_a_file_in_a_folder(run: Path) -> None:
    (run / "final" / "inner").mkdir()
    (run / "final" / "inner" / "model.safetensors").write_bytes(b"")


def remove_a_file_of_the_model(run: Path) -> None:
    (run / "final" / "tokenizer.json").unlink()


def remove_groups_of_a_checkpoint(run: Path) -> None:
    def edit(state: Any) -> None:
        state["processes"][0]["extra"]["groups"] = None

    edit_json(run / "checkpoints" / "step-00000004" / "state.json", edit)


def add_an_adapter_to_a_checkpoint(run: Path) -> None:
    (run / "checkpoints" / "step-00000004" / "adapter_config.json").write_text("{}")


def remove_counters_of_a_rollout(run: Path) -> None:
    edit_lines(rollouts_of(run), lambda lines: lines[2 + 5].__setitem__("counters", None))


def name_another_type_of_the_model(run: Path) -> None:
    edit_json(run / "final" / "unbroken.json", lambda info: info.__setitem__("dtype", "int8"))


def remove_processes_of_a_checkpoint(run: Path) -> None:
    edit_json(run / "checkpoints" / "step-00000002" / "state.json", lambda state: state.update(processes=[]))


def remove_extra_of_a_checkpoint(run: Path) -> None:
    edit_json(run / "checkpoints" / "step-00000004" / "state.json", lambda state: state["processes"][0].pop("extra"))


def change_source_of_a_checkpoint(run: Path) -> None:
    def edit(state: Any) -> None:
        state["processes"][0]["extra"]["source"] = "other.jsonl"

    edit_json(run / "checkpoints" / "step-00000002" / "state.json", edit)


def change_digest_of_the_code(run: Path) -> None:
    name = f"the SHA-256 of {RECIPE.name}, the recipe's code"
    edit_json(run / "recipe.json", lambda recipe: recipe["files"].__setitem__(name, "0" * 64))


def add_to_a_segment(run: Path) -> None:
    edit_lines(rollouts_of(run), lambda lines: row_of(lines)["segments"][-1].__setitem__("mine", 1))


def change_number_of_sampled_ids(run: Path) -> None:
    def edit(lines: list[Any]) -> None:
        for record in lines[2:]:
            record["turns"][0]["num_sampled"] += 1
        lines[0]["columns"]["num_sampled"] = [number + 1 for number in lines[0]["columns"]["num_sampled"]]

    edit_lines(rollouts_of(run), edit)


OF_ROW = "step-00000002.rank-0.jsonl.gz: trajectory 0-0-5/1, row 0: "
PLANTED = [
    (change_sampled_id, OF_ROW + "position "),
    (change_prompt_id, OF_ROW + "position "),
    (change_last_bit_of_logprob, OF_ROW + "position "),
    (change_reward, "step 2: step-00000002.rank-0.jsonl.gz: rewards is "),
    (change_reward_everywhere_in_its_file, OF_ROW + "advantages is "),
    (change_advantage, OF_ROW + "advantages is "),
    (change_text, "step-00000002.rank-0.jsonl.gz: its first lines have other given than its records"),
    (change_packed_byte, "step-00000002.rank-0.jsonl.gz must be a file of rollouts"),
    (change_loss, "step 2: metrics.jsonl: train/grad_norm is "),
    (change_checkpoint, "checkpoints/step-00000002 must hold a whole checkpoint"),
    (change_checkpoint_with_its_digest, "step 3: checkpoints/step-00000004: "),
    (change_generator, "step 3: checkpoints/step-00000004: rng is "),
    (remove_numerics_of_a_checkpoint, "step-00000004: it does not say numerics, and here it is 'exact'"),
    (change_final_model, "final/model.safetensors has other bytes than the model after 4 steps"),
    (change_learning_rate, "step 0: checkpoints/step-00000001: weights has other bits in "),
    (add_an_adapter, "final has also adapter_config.json, other than the model after 4 steps"),
    (add_a_file_in_a_folder, "final has also inner/model.safetensors, other than the model after 4 steps"),
    (remove_a_file_of_the_model, "final lacks tokenizer.json, other than the model after 4 steps"),
    (remove_groups_of_a_checkpoint, "step 3: checkpoints/step-00000004: groups are None, and here "),
    (add_an_adapter_to_a_checkpoint, "step 3: checkpoints/step-00000004: adapter_config.json is not that of "),
    (remove_counters_of_a_rollout, "must have whole records, and trajectory 0-0-5/1 is none: AttributeError"),
    (name_another_type_of_the_model, "unbroken.json must have a dtype of float32, bfloat16, or null; got 'int8'"),
    (remove_processes_of_a_checkpoint, "step-00000002 must hold a whole checkpoint: InvalidInputError: processes must"),
    (remove_extra_of_a_checkpoint, "step 3: checkpoints/step-00000004: num_steps is None, and here 4"),
    (add_to_a_segment, OF_ROW + "segments is "),
    (change_number_of_sampled_ids, ": num_sampled of its turns is [9], and computed again [8]"),
    (change_source_of_a_checkpoint, "step 1: checkpoints/step-00000002: source is 'other.jsonl', and in "),
    (
        change_digest_of_the_code,
        f"differs: recipe.json: files: the SHA-256 of {RECIPE.name}, the recipe's code is '000",
    ),
    (change_checksum, "step 2: step-00000002.rank-0.jsonl.gz: weights is "),
]


def change_version_of_a_turn(run: Path) -> None:
    edit_lines(rollouts_of(run), lambda lines: lines[2 + 5]["turns"][0]["policy_versions"][0].__setitem__(2, 1))


def remove_number_of_sampled_ids(run: Path) -> None:
    edit_lines(rollouts_of(run), lambda lines: lines[2 + 5]["turns"][0].pop("num_sampled"))


def write_number_of_sampled_ids_as_text(run: Path) -> None:
    edit_lines(rollouts_of(run), lambda lines: lines[2 + 5]["turns"][0].update(num_sampled="8"))


def forbid_a_word_that_nothing_began(run: Path) -> None:
    """So no logprob is another."""

    def edit(lines: list[Any]) -> None:
        row = row_of(lines)
        word = [min(set(range(len(row["token_ids"]) + 1)) - set(row["token_ids"])), 5]
        lines[2 + 5]["turns"][0]["controls"] = {"bad_words_ids": [word]}

    edit_lines(rollouts_of(run), edit)


def change_step_of_a_file(run: Path) -> None:
    edit_lines(rollouts_of(run), lambda lines: lines[0].__setitem__("step", 1))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (change_version_of_a_turn, ": policy_versions of its turns is [[[0, "),
        (change_step_of_a_file, "gz: step is 1, "),
        (forbid_a_word_that_nothing_began, "trajectory 0-0-5/1, turn 0: bad_words_ids is (("),
        (remove_number_of_sampled_ids, ": num_sampled of its turns is [None], and computed again [8]"),
        (write_number_of_sampled_ids_as_text, ": num_sampled of its turns is ['8'], and computed again [8]"),
    ],
)
def test_what_a_file_says_twice_is_compared_twice(run, capsys, change, said):
    change(run)
    status, report = verify(capsys, run)
    assert (status, said in report) == (1, True), report


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("rollouts.sampling.temperature", 0.75, "row 0: temperature is 1.0, and by rollouts.sampling 0.75"),
        (
            "rollouts.sampling.repetition_penalty",
            1.5,
            "turn 0: repetition_penalty is 1.0, and by rollouts.sampling 1.5",
        ),
        (
            "rollouts.sampling.max_tokens",
            4,
            "turn 0: num_sampled is 8, more than rollouts.sampling.max_tokens, which is",
        ),
        ("rollouts.group_size", 3, "group 0-0-0 has 4 rollouts, more than rollouts.group_size, which is 3"),
    ],
)
def test_a_recipe_that_does_not_say_how_its_rollouts_were_sampled_is_a_difference(run, capsys, name, value, said):
    """Rows and turns have their own numbers, by which everything is computed again: the recipe's had no effect."""
    edit_json(run / "recipe.json", lambda recipe: recipe["settings"].__setitem__(name, value))
    status, report = verify(capsys, run)
    assert (status, said in report) == (1, True), report


def test_a_turn_of_an_agent_that_no_id_ends_has_no_min_tokens(run, capsys):
    """It asked for that (`ignore_eos`), and nothing is forbidden without ids that end a turn: the record has 0."""
    edit_json(run / "recipe.json", lambda recipe: recipe["settings"].update({"rollouts.sampling.min_tokens": 2}))
    status, report = verify(capsys, run)
    assert (status, "turn 0: min_tokens is 0, and by rollouts.sampling 2" in report) == (1, True), report

    def give_rows_messages_of_their_own(lines: list[Any]) -> None:
        for record in lines[2:]:
            record["rows"][0]["messages"] = [0, 1]  # as those of a session have

    for step in range(4):
        edit_lines(rollouts_of(run, step), give_rows_messages_of_their_own)
    status, report = verify(capsys, run)
    assert status == 0, report


def test_a_group_that_a_recipes_code_made_smaller_is_no_difference(run, capsys):
    """`Problems.score` may leave rollouts out."""
    edit_json(run / "recipe.json", lambda recipe: recipe["settings"].update({"rollouts.group_size": 5}))
    status, report = verify(capsys, run)
    assert status == 0, report


def test_a_run_is_verified_to_its_last_bit(run, capsys):
    status, report = verify(capsys, run)
    assert status == 0, report
    assert f"{run}: verified (4 of 4 steps, 256 sampled ids)" in report
    for each in ("checkpoints/step-00000001", "checkpoints/step-00000002", "checkpoints/step-00000004", "final"):
        assert each in report
    assert "not claimed: that ids were drawn with their seeds" in report


@pytest.mark.parametrize(("change", "said"), PLANTED, ids=[change.__name__ for change, _ in PLANTED])
def test_each_planted_change_is_found_and_named(run, capsys, change, said):
    change(run)
    status, report = verify(capsys, run)
    assert (status, said in report) == (1, True), report
    assert "NOT VERIFIED" in report


def test_a_file_that_is_gone_is_said_and_one_that_may_be_another_is_none(run, capsys):
    """Neither is a difference."""

    def edit(recipe: Any) -> None:
        recipe["files"] = dict.fromkeys(recipe["files"], None) | {"the SHA-256 of gone.jsonl": "0" * 64}

    edit_json(run / "recipe.json", edit)
    status, report = verify(capsys, run)
    assert status == 0, report
    assert "  not compared: the SHA-256 of gone.jsonl in recipe.json, because it is not there" in report


def test_a_model_that_no_step_was_compared_with_is_not_verified(run, capsys):
    """Neither one whose own file names another step, nor one that names none."""
    edit_json(run / "final" / "unbroken.json", lambda info: info.__setitem__("step", 7))
    shutil.copytree(run / "final", run / "models" / "mine")
    (run / "models" / "mine" / "unbroken.json").unlink()
    status, report = verify(capsys, run)
    assert (status, "NOT VERIFIED (4 of 4 steps" in report) == (1, True), report
    assert "not verified: final: its unbroken.json must have a step that the run has made, 1 to 4; got 7" in report
    assert "not verified: models/mine: it has no unbroken.json that says after which step" in report


def test_a_finished_run_whose_last_steps_are_gone_is_not_verified(run, capsys):
    shutil.rmtree(run / "final")
    shutil.rmtree(run / "checkpoints" / "step-00000004")
    rollouts_of(run, 2).unlink()
    rollouts_of(run, 3).unlink()
    lines = (run / "metrics" / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics" / "metrics.jsonl").write_text("".join(lines[:2]))
    status, report = verify(capsys, run)
    assert (status, "NOT VERIFIED (2 of 4 steps" in report) == (1, True), report
    assert "not verified: steps 2 to 3: no file has them, and the run has finished with loop.num_steps 4" in report


@pytest.mark.parametrize("name", ["policy_version", "weights", "rewards", "counters", "columns"])
def test_what_is_missing_from_a_first_line_is_a_difference(run, capsys, name):
    edit_lines(rollouts_of(run), lambda lines: lines[0].pop(name))
    status, report = verify(capsys, run)
    assert (status, f"step 2: {rollouts_of(run).name}: " in report, name in report) == (1, True, True), report


@pytest.mark.parametrize("name", ["trainer_logprobs", "entropies", "ranks", "clipped", "corrected", "images"])
def test_what_is_missing_from_rows_that_the_run_scored_is_a_difference(run, capsys, name):
    def edit(lines: list[Any]) -> None:
        for record in lines[2:]:
            record["rows"][0][name] = None

    edit_lines(rollouts_of(run), edit)
    status, report = verify(capsys, run)
    assert (status, f"row 0: {name} is None, and computed again" in report) == (1, True), report


@pytest.mark.parametrize(
    "name", ["num_trajectories", "num_trainable", "num_sampled_tokens", "completion_tokens_mean", "turns_max"]
)
def test_numbers_of_rollouts_that_follow_from_rows_are_compared(run, capsys, name):
    edit_metrics(run, lambda lines: lines[CHANGED].__setitem__(f"rollout/{name}", 7.5))
    status, report = verify(capsys, run)
    assert (status, f"step 2: metrics.jsonl: rollout/{name} is 7.5, and " in report) == (1, True), report


def test_parts_in_processes_of_their_own_are_the_whole_run(run, capsys):
    """The second part begins with a checkpoint, so a change before it hides none behind it."""
    change_last_bit_of_logprob(run)
    edit_lines(rollouts_of(run, 0), lambda lines: row_of(lines)["token_ids"].__setitem__(1, 7))
    status, report = verify(capsys, run, "--processes", 2, "--json")
    found = json.loads(report)
    assert (status, found["num_steps"], found["num_verified"]) == (1, 4, 0)
    assert {each.partition(":")[0] for each in found["differences"]} == {"step 0", "step 2"}


def test_runs_of_other_kinds_are_verified(tmp_path, model, capsys):
    options = ["--trainer.num-iterations=2", "--trainer.entropy-weight=0.01", "--algorithm=rloo"]
    assert train(tmp_path / "run", model, *options) == 0
    status, report = verify(capsys, tmp_path / "run")
    assert status == 0, report


def test_adapters_with_a_reference_are_verified_whatever_the_order_of_their_modules(tmp_path, model, capsys):
    """PEFT writes the set of its target modules in the order of their hashes, which are others in each process."""
    run = tmp_path / "run"
    assert train(run, model, "--lora.rank=2", "--trainer.kl-weight=0.1") == 0
    for config in (
        run / "final" / "adapter_config.json",
        run / "checkpoints" / "step-00000004" / "adapter_config.json",
    ):
        targets = json.loads(config.read_text())["target_modules"]
        assert len(targets) == 14
        assert targets == sorted(targets)
        edit_json(config, lambda value: value["target_modules"].reverse())  # as runs before had any order
    status, report = verify(capsys, run)
    assert status == 0, report
    edit_json(run / "checkpoints" / "step-00000004" / "adapter_config.json", lambda value: value.update(r=4))
    assert "checkpoints/step-00000004: adapter_config.json is not that of" in verify(capsys, run)[1]


def test_groups_that_were_replaced_are_replaced_again(tmp_path, model, capsys):
    """With one id each, the rewards of most groups are equal."""
    assert train(tmp_path / "run", model, "--algorithm=dapo", "--loop.max-empty-steps=none", max_tokens=1) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics" / "metrics.jsonl").read_text().splitlines()]
    assert sum(line["groups/num_replaced"] for line in lines) > 0
    status, report = verify(capsys, tmp_path / "run")
    assert status == 0, report


def test_steps_whose_rollouts_were_not_kept_are_not_verified_and_the_others_are(run, capsys):
    rollouts_of(run, 1).unlink()
    status, report = verify(capsys, run)
    assert status == 1
    assert "NOT VERIFIED (3 of 4 steps" in report
    assert "  not verified: step 1: rollouts/ has no file of step 1 (rollout_log.groups, or it is gone)" in report
    assert "differs" not in report.replace("first step that differs", "")

    def leave_out_a_group(lines: list[Any]) -> None:
        lines[0]["num_kept"] -= 1

    edit_lines(rollouts_of(run, 3), leave_out_a_group)
    status, report = verify(capsys, run)
    assert "step 3: step-00000003.rank-0.jsonl.gz has 1 of 2 groups (rollout_log.groups, rollout_log.max_mb)" in report


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("trainer.numerics", "fast", "trainer.numerics must be exact .*--trainer.numerics exact.* got fast"),
        ("loop.max_staleness", 1, "loop.max_staleness must be 0: .* got 1"),
        ("curriculum", "my.py:make", "curriculum must be none: the state .* got my.py:make"),
        ("rollouts.sampling.top_k", 5, "rollouts.sampling must be without top_k"),
        ("engine.kind", "started", "engine.kind must be embedded|trainer.numerics must be fast with precision"),
    ],
)
def test_what_cannot_be_verified_is_refused_with_its_field_and_rule(run, capsys, name, value, said):
    edit_json(run / "recipe.json", lambda recipe: recipe["settings"].__setitem__(name, value))
    status, report = verify(capsys, run)
    assert status == 1
    assert re.search(said, report), report


def test_files_that_are_gone_are_named(run, tmp_path, capsys):
    status, report = verify(capsys, run, "--model", tmp_path / "nowhere")
    assert (status, "--model must be the model that the run began with" in report) == (1, True)
    (run / "metrics" / "metrics.jsonl").unlink()
    status, report = verify(capsys, run)
    assert (status, "metrics/metrics.jsonl has no line of step 0" in report) == (1, True)
    shutil.rmtree(run / "rollouts")
    status, report = verify(capsys, run)
    assert (status, "must have the rollouts of the run (rollout_log.groups)" in report) == (1, True)


def test_two_runs_are_compared_to_the_first_id_that_differs(run, finished, tmp_path, model, capsys):
    assert verify(capsys, run, "--against", finished) == (
        0,
        f"{run} and {finished}: 4 steps are equal from the first on\n  no difference\n",
    )
    change_last_bit_of_logprob(run)
    status, report = verify(capsys, run, "--against", finished)
    assert status == 1
    assert "2 steps are equal from the first on" in report
    assert "first difference: step 2, trajectory 0-0-5/1, row 0: position " in report
    assert "The weights before the step are the same" in report
    other = tmp_path / "other"
    assert train(other, model, "--trainer.optimizer.learning-rate=1e-3") == 0
    status, report = verify(capsys, finished, "--against", other)
    assert "setting: trainer.optimizer.learning_rate is 0.003 and 0.001" in report
    assert "first difference: step 0, with equal rollouts: train/" in report


def edit_metrics(run: Path, edit: Callable[[list[Any]], None]) -> None:
    path = run / "metrics" / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    edit(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_two_runs_are_compared_in_steps_of_which_neither_has_a_file(run, finished, tmp_path, capsys):
    other = Path(shutil.copytree(finished, tmp_path / "other"))
    for each in (run, other):
        rollouts_of(each, 3).unlink()
    edit_metrics(run, lambda lines: lines[3].__setitem__("train/loss", 7.0))
    status, report = verify(capsys, run, "--against", other)
    assert (status, "step 3, of which no run has rollouts: train/loss is 7.0" in report) == (1, True), report
    edit_metrics(run, lambda lines: lines.pop())
    status, report = verify(capsys, run, "--against", other)
    assert (status, f"step 3: only {other} has its line in metrics.jsonl" in report) == (1, True), report


def test_two_runs_that_scored_other_rows_are_equal(run, finished, capsys):
    edit_lines(rollouts_of(run), lambda lines: lines[2]["rows"][0].__setitem__("trainer_logprobs", None))
    status, report = verify(capsys, run, "--against", finished)
    assert status == 0, report


def test_a_part_that_begins_with_a_checkpoint_without_its_numbers_is_no_traceback(run, capsys):
    edit_json(run / "checkpoints" / "step-00000002" / "state.json", lambda state: state["processes"][0].pop("extra"))
    rollouts_of(run, 0).unlink()
    shutil.rmtree(run / "checkpoints" / "step-00000001")
    status, report = verify(capsys, run)
    assert (status, "step 2: " in report, "step-00000002 must have the numbers of a run: KeyError" in report) == (
        1,
        True,
        True,
    ), report


def test_a_process_that_is_killed_is_named_with_what_to_do(run, capsys, monkeypatch):
    """As the system does that lacks memory."""
    monkeypatch.setattr(verify_module, "_verify_part", _die)
    status, report = verify(capsys, run, "--processes", 2)
    assert (status, "one of 2 processes was ended from outside" in report) == (1, True), report
    assert "Give a smaller --processes" in report


def _die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_checksum_adds_blocks_and_gives_what_whole_tensors_give():
    """Numbers of two tensors are longer than a block: rows in several, and one row in several."""
    drawn = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=drawn) for shape in ((5000, 1000), (5_000_000,), (3, 4), (0,), ())]
    for tensor in tensors:
        bits = tensor.reshape(len(tensor) if tensor.dim() > 1 else 1, -1).view(torch.int32).to(torch.int64)
        rows, columns = (torch.arange(1, 1 + length) for length in bits.shape)
        of_rows = bits.sum(1)
        sums = [bits.sum(), (of_rows * rows).sum(), (of_rows * rows * rows).sum(), (bits.sum(0) * columns).sum()]
        text = f"w {tensor.dtype} {tuple(tensor.shape)} {[int(each) for each in sums]}"
        assert checksum_of([("w", tensor)]) == hashlib.sha256(text.encode()).hexdigest()[:16]


@pytest.mark.parametrize("temperature", [0.01, 0])
def test_steps_that_train_nothing_have_no_checksum_and_are_verified(tmp_path, model, capsys, temperature):
    """All rewards of a group are equal with completions of one id that are no letters, or all are; greedy ones always
    are, and rows of them have the temperature of their logprobs, which is 1.
    """
    options = [f"--rollouts.sampling.temperature={temperature}", "--loop.max-empty-steps=none"]
    assert train(tmp_path / "run", model, *options, max_tokens=1) == 0
    heads = [
        json.loads(gzip.decompress(rollouts_of(tmp_path / "run", k).read_bytes()).splitlines()[0]) for k in range(4)
    ]
    assert None in [head["weights"] for head in heads]
    status, report = verify(capsys, tmp_path / "run")
    assert status == 0, report


@pytest.fixture(scope="module")
def talked(tmp_path_factory, model) -> Path:
    """A run of two policies, in half of whose rollouts a frozen copy of the second answers."""
    folder = tmp_path_factory.mktemp("talks")
    (folder / "talk.toml").write_text(
        f'model = "{model}"\nenvironment = "{talking.__file__}:Talk"\nevaluation.num_problems = 0\n'
        'policies.names = ["first", "second"]\npolicies.copy_every = 1\nlora.rank = 2\nlora.alpha = 3\n'
        "trainer.optimizer.learning_rate = 1e-2\nrollouts.problems_per_step = 4\n"
    )
    words = ["train", str(folder / "talk.toml"), *make_words(folder / "run", model, max_tokens=6)[2:]]
    assert main([word for word in words if not word.startswith("--model")]) == 0
    return folder / "run"


def of_second(lines: list[Any]) -> dict[str, Any]:
    """A rollout in which the second policy answered the first."""
    return next(
        line for line in lines[2:] if [turn["policy"] for turn in line["turns"]] == ["first", "second", "first"]
    )


def of_copy(lines: list[Any]) -> dict[str, Any]:
    """One in which a frozen copy did, after an update."""
    return next(line for line in lines[2:] if line["turns"][1]["policy"] in ("second@1", "second@2"))


def change_id_of_a_copy(run: Path) -> None:
    def edit(lines: list[Any]) -> None:
        record = of_copy(lines)
        next(row for row in record["rows"] if row["turns"] == [1])["token_ids"][-2] ^= 1

    edit_lines(rollouts_of(run), edit)


def change_reward_of_the_second(run: Path) -> None:
    def edit(lines: list[Any]) -> None:
        of_second(lines)["reward_parts"]["second"] += 0.25

    edit_lines(rollouts_of(run), edit)


def say_that_a_copy_spoke(run: Path) -> None:
    edit_lines(rollouts_of(run), lambda lines: of_second(lines)["turns"][1].update(policy="second@0"))


def change_copies_with_their_digest(run: Path) -> None:
    folder = run / "checkpoints" / "step-00000004"
    flip_byte(folder / "copies.safetensors", -10)
    digest = hashlib.sha256((folder / "copies.safetensors").read_bytes()).hexdigest()
    edit_json(folder / "policies.json", lambda state: state["files"][0].update(sha256=digest))


PLANTED_IN_POLICIES = [
    (lambda run: None, "verified (4 of 4 steps"),
    (change_id_of_a_copy, r"step 2: .*row \d: position \d+, id \d+: its logprob is"),
    (change_reward_of_the_second, r"step 2: .*row \d: advantages is "),
    (say_that_a_copy_spoke, r"step 2: .*row \d: (is_trained|position)"),
    (change_copies_with_their_digest, "step 3: checkpoints/step-00000004: frozen copies have other bits in second@"),
    (
        lambda run: flip_byte(run / "checkpoints" / "step-00000002" / "second" / "__0_0.distcp", 20_000),
        "step-00000002/second must hold a whole checkpoint",
    ),
    (
        lambda run: edit_json(
            run / "checkpoints" / "step-00000004" / "second" / "state.json",
            lambda state: state["processes"][0]["rng"]["state"].update(state=1),
        ),
        "checkpoints/step-00000004: second: rng is ",
    ),
    (
        lambda run: flip_byte(run / "final" / "second" / "adapter_model.safetensors", -10),
        "final/second/adapter_model.safetensors has other bytes than the model after 4 steps",
    ),
    (lambda run: shutil.rmtree(run / "final" / "second"), "final/second: it has no unbroken.json that says"),
]


@pytest.mark.parametrize(("change", "said"), PLANTED_IN_POLICIES)
def test_a_run_of_several_policies_is_verified_and_what_was_changed_in_it_is_named(
    talked, tmp_path, capsys, change, said
):
    run = Path(shutil.copytree(talked, tmp_path / "talk"))
    change(run)
    status, report = verify(capsys, run)
    assert status == (0 if said.startswith("verified") else 1), report
    assert re.search(said if said.startswith("step 2") else re.escape(said), report), report
