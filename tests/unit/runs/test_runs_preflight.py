"""The preflight: one screen before a run, an evaluation, or of a task; nothing of the run changes with it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from support.served import save_tiny_model
from unbroken.cli import main
from unbroken.errors import TrainingError
from unbroken.runs.records.files import find_records, read_records
from unbroken.training.backend import TrainerBackend

pytestmark = pytest.mark.usefixtures("datasets_cache")
TASK = """
model = "{model}"
data.file = "prompts.jsonl"
tools = ["rewards.py:shout"]
output = "{output}"
rollouts.sampling.max_tokens = 8
rollouts.limits.max_turns = 2
rollouts.problems_per_step = 2
rollouts.group_size = 4
loop.num_steps = {steps}
evaluation.num_problems = 2
rollout_log.groups = 2
trackers.names = []
rewards = [{{function = "rewards.py:score"}}]
"""
CODE = '''
from unbroken import tool

@tool
def shout(text: str) -> str:
    """Shout.

    Args:
        text: What to shout.
    """
    return text.upper()

def score(completions):
    return {reward}
'''
BEGIN = "preflight: 8 rollouts that count nowhere"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def task(tmp_path, model) -> Path:
    return write_task(tmp_path, model)


def write_task(folder: Path, model: Path, *, reward: str = "[float(len(text) % 3) for text in completions]") -> Path:
    rows = [{"prompt": f"What is {k} + {k}?", "answer": str(2 * k)} for k in range(40)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(CODE.format(reward=reward))
    path = folder / "task.toml"
    path.write_text(TASK.format(model=model, output=folder / "run", steps=2))
    return path


def read_run(folder: Path) -> dict[str, list[dict[str, object]]]:
    """What a run has recorded, without times, sizes of memory, and the ids that tell rollouts apart."""
    found = {}
    for name in ("metrics/metrics.jsonl", "evaluation.jsonl"):
        found[name] = [_drop_times(json.loads(line)) for line in (folder / name).read_text().splitlines()]
    for path in find_records(folder / "rollouts").values():
        found[path.name] = [_drop_times(each) for each in read_records(path)]
    return found


def _drop_times(value):
    if isinstance(value, dict):
        timed = ("seconds", "memory/", "idle/", "wall_time", "times", "tokens_per_s/", "queue_s")
        return {name: _drop_times(each) for name, each in value.items() if not name.startswith(timed)}
    return [_drop_times(each) for each in value] if isinstance(value, list) else value


def test_what_a_run_records_of_its_steps_is_the_same_with_and_without_a_preflight(tmp_path, task, capsys):
    for name in ("true", "false"):
        # With fast numerics the last bits depend on which rows share a batch, and that on how busy the machine is.
        options = ["--preflight", name, f"--output={tmp_path / name}", "--trainer.numerics=exact"]
        assert main(["train", str(task), *options]) == 0
        assert (BEGIN in capsys.readouterr().out) == (name == "true")
    with_it, without = read_run(tmp_path / "true"), read_run(tmp_path / "false")
    assert len(with_it["metrics/metrics.jsonl"]) == 2
    assert len(with_it) == 4, "two steps have rollouts"
    assert with_it == without


@pytest.mark.parametrize("words", [["TASK", "--preflight", "false"], ["--preflight=false", "TASK"]])
def test_the_option_of_the_command_is_no_setting_of_the_run(tmp_path, task, capsys, words):
    words = [str(task) if word == "TASK" else word for word in words]
    assert main(["train", *words, "--loop.num-steps", "1"]) == 0
    assert BEGIN not in capsys.readouterr().out
    assert "preflight" not in json.loads((tmp_path / "run" / "recipe.json").read_text())["settings"]
    task.write_text("preflight = false\n" + task.read_text())
    assert main(["train", str(task)]) == 1
    assert "preflight must be left out: it is no setting of a run: give the command --preflight false" in (
        capsys.readouterr().err
    )


def test_a_run_that_continues_makes_no_second_preflight(task, capsys):
    for steps, times in ((1, 1), (2, 0)):
        assert main(["train", str(task), f"--loop.num-steps={steps}"]) == 0
        assert capsys.readouterr().out.count(BEGIN) == times


def test_a_task_is_looked_at_without_training_and_without_its_output_folder(tmp_path, task, capsys):
    with (tmp_path / "rewards.py").open("a") as file:
        file.write("def always(completions):\n    return [3.0 for _ in completions]\n")
    second = '{function = "rewards.py:always", weight = 0.1}'
    task.write_text(task.read_text().replace("rewards = [", f"rewards = [{second}, "))
    assert main(["doctor", str(task)]) == 0
    shown = capsys.readouterr().out
    lines = {line.split()[0]: line for line in shown.splitlines() if line.startswith("  ")}
    assert {"device", "model", "rows", "output", "tools", "turns", "rewards", "memory"} <= lines.keys()
    assert "one policy with the trainer" in shown
    assert "the prompt shows them" in lines["tools"]
    assert "40; 2 x 4 rollouts a step" in lines["rows"]
    assert re.search(r"about \S+ to \S+ s of sampling, \S+ s of updates$", lines["a"])
    assert lines["memory"].endswith(" for the optimizer")
    assert re.search(
        r" \(always 3 in all, score \S+ ± \S+\); groups that teach \(rewards differ\): \d of 2", lines["rewards"]
    )
    asked = re.fullmatch(r"  rollout 'What is (\d+) \+ \1\?'", lines["rollout"])
    assert asked is not None
    assert re.search(rf"^          -> .*, expected '{2 * int(asked[1])}': reward \S+$", shown, re.MULTILINE)
    assert not (tmp_path / "run").exists()


def test_a_task_of_an_agent_is_looked_at_without_its_output_folder_too(tmp_path, task, capsys):
    (tmp_path / "agent.py").write_text("print(1.0)\n")
    text = task.read_text().replace('tools = ["rewards.py:shout"]', 'agent.command = ["python", "agent.py"]')
    task.write_text(text.replace('rewards = [{function = "rewards.py:score"}]', 'agent.reward = "output"'))
    assert main(["doctor", str(task)]) == 0
    assert f"  output  {tmp_path / 'run'}" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


def test_a_gradient_for_which_memory_is_not_enough_is_said_before_it_ends_a_step(task, capsys, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise TrainingError("memory is not enough for a row of 99 ids")

    monkeypatch.setattr(TrainerBackend, "forward_backward", fail)
    assert main(["doctor", str(task)]) == 0
    said = "the update, whose gradient failed: memory is not enough for a row of 99 ids"
    assert said in capsys.readouterr().out


def test_rollouts_of_a_preflight_are_judged_by_the_rules_of_the_diagnosis(tmp_path, model, capsys):
    task = write_task(tmp_path, model, reward="[0.0 for _ in completions]")
    assert main(["doctor", str(task)]) == 0
    shown = capsys.readouterr().out
    assert "preflight: every reward of the preflight is 0 (8 of 8 rollouts): there is nothing to compare" in shown
    assert "; 8 are few: up to about 31% of all rollouts may get another reward (95% confidence)" in shown
    assert "docs/troubleshooting.md#equal-rewards" in shown


def test_a_part_that_is_0_in_all_rollouts_of_a_preflight_is_said_while_the_sum_varies(tmp_path, task, capsys):
    with (tmp_path / "rewards.py").open("a") as file:
        file.write("def right(completions, answer):\n    return [0.0 for _ in completions]\n")
    task.write_text(task.read_text().replace("rewards = [", 'rewards = [{function = "rewards.py:right"}, '))
    assert main(["doctor", str(task)]) == 0
    shown = capsys.readouterr().out
    assert " (right 0 in all, score " in shown
    assert "preflight: right is 0 in all 8 rollouts of the preflight: it teaches nothing" in shown
    assert "docs/troubleshooting.md#constant-part" in shown


def test_rewards_that_differ_are_no_finding(task, capsys):
    assert main(["doctor", str(task)]) == 0
    assert "#equal-rewards" not in capsys.readouterr().out


def test_a_model_that_solves_all_rollouts_of_an_evaluations_preflight_is_no_finding(tmp_path, model, capsys):
    task = write_task(tmp_path, model, reward="[1.0 for _ in completions]")
    assert main(["eval", str(task), "--problems=40", f"--output={tmp_path / 'eval'}"]) == 0
    shown = capsys.readouterr().err
    assert BEGIN in shown
    assert "preflight: every reward" not in shown
    assert "the policy says" not in shown


@pytest.mark.parametrize(("problems", "is_made"), [(2, False), (40, True)])
def test_an_evaluation_has_a_preflight_if_it_is_larger_than_one(task, capsys, problems, is_made):
    assert main(["eval", str(task), f"--problems={problems}", f"--output={task.parent / 'eval'}"]) == 0
    assert (BEGIN in capsys.readouterr().err) == is_made
