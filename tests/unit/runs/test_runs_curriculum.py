"""The curriculum of a run: which problems it chooses, which results it gets, and its part of several processes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest

from support import letters_recipe
from support.fake_renderer import END, VOCAB_SIZE, FakeRenderer, encode
from support.served import save_tiny_model
from unbroken.cli import main
from unbroken.engines.scripted import ScriptedEngine
from unbroken.errors import InvalidInputError
from unbroken.rollout.tool_env import ToolEnv
from unbroken.rollout.trajectory import TrajectoryGroup
from unbroken.runs.collector import CurriculumPart, Problems, Sampler, make_collector
from unbroken.runs.config import RolloutConfig
from unbroken.runs.processes import Rank
from unbroken.types import SamplingParams


class Hardest:
    """Problems in order; then the one with the lowest mean reward so far."""

    def __init__(self, part: CurriculumPart) -> None:
        assert part.num_problems is not None
        self.unseen = list(range(part.num_problems))
        self.means: dict[int, float] = {}

    def choose(self) -> int:
        return self.unseen.pop(0) if self.unseen else min(self.means, key=lambda problem: self.means[problem])

    def record(self, problem: int, group: TrajectoryGroup, /) -> None:
        rewards = [member.reward or 0.0 for member in group.trajectories]
        self.means[problem] = sum(rewards) / len(rewards)

    def state(self) -> Mapping[str, Any]:
        return {"unseen": self.unseen, "means": [list(pair) for pair in self.means.items()]}

    def restore(self, state: Mapping[str, Any], /) -> None:
        self.unseen, self.means = list(state["unseen"]), dict(state["means"])


async def reward(messages: Any) -> float:
    return abs(float(messages[0]["content"]) - 2)


def sampler() -> Sampler:
    return Sampler(
        engine=ScriptedEngine(lambda prompt_ids: [*encode("ok"), END], vocab_size=VOCAB_SIZE),
        renderer=FakeRenderer(),
        config=RolloutConfig(problems_per_step=4, group_size=2, sampling=SamplingParams(max_tokens=8)),
        problems=Problems(
            env=lambda number: ToolEnv([{"role": "user", "content": str(number)}], [], reward), num_problems=5
        ),
        seed=(0, 0),
    )


def content(group: TrajectoryGroup) -> int:
    return int(group.trajectories[0].messages[0]["content"])


async def test_the_problems_are_those_that_the_curriculum_chooses_by_the_results():
    collect = make_collector(sampler(), Hardest, seed=0, rank=Rank())
    for number in range(5):
        collect.record(number, await collect.sample(number))
    again = [await collect.sample(number) for number in (5, 6)]
    assert list(map(content, again)) == [2, 2]
    requests = collect._sampler.engine.requests
    assert len({request.params.seed for request in requests}) == 14, "a problem that is chosen again has another seed"


async def test_a_number_that_is_sampled_again_has_its_problem_also_in_a_run_that_goes_on():
    first, second = (make_collector(sampler(), Hardest, seed=0, rank=Rank()) for _ in range(2))
    sampled = await asyncio.gather(*map(first.sample, range(3)))
    first.record(0, sampled[0])
    second.restore_choices(first.choices())
    assert [content(await second.sample(number)) for number in (2, 1, 3)] == [2, 1, 3]
    assert content(await first.sample(2)) == 2


async def test_each_process_chooses_among_problems_of_its_own():
    collectors = [make_collector(sampler(), Hardest, seed=0, rank=Rank(index=k, num_processes=2)) for k in range(2)]
    chosen = [
        [content(await each.sample(number)) for number in range(n)] for each, n in zip(collectors, (3, 2), strict=True)
    ]
    assert chosen == [[0, 2, 4], [1, 3]]
    with pytest.raises(InvalidInputError, match="a problem for each of 6 processes, and the data has 5"):
        CurriculumPart.of(5, seed=0, rank=Rank(index=5, num_processes=6))


def test_without_a_curriculum_the_source_does_not_choose():
    assert make_collector(sampler(), None, seed=0, rank=Rank()).choices() is None
    assert isinstance(Hardest(CurriculumPart(num_problems=1, seed=0, rank=Rank())).choose(), int)


@pytest.mark.parametrize("wrong", [-1, None, 1.5])
async def test_a_choice_that_is_no_problem_is_refused(wrong):
    class Wrong(Hardest):
        def choose(self) -> int:
            return wrong

    collect = make_collector(sampler(), Wrong, seed=0, rank=Rank())
    with pytest.raises(InvalidInputError, match=r"Curriculum\.choose must return a problem's number"):
        await collect.sample(0)


CURRICULUM = """
import json

class Twice:
    def __init__(self, part):
        self.results, self.next = [], 0

    def choose(self):
        self.next += 1
        return (self.next - 1) // 2

    def record(self, problem, group):
        self.results.append([problem, group.group_id])

    def state(self):
        return {"results": self.results, "next": self.next}

    def restore(self, state):
        self.results, self.next = state["results"], state["next"]

def make(part):
    assert part.num_problems is None and part.rank.num_processes == 1
    return Twice(part)
"""


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_run_has_a_curriculum_by_name_and_goes_on_with_it(tmp_path, max_staleness):
    (tmp_path / "mine.py").write_text(CURRICULUM)
    model = save_tiny_model(tmp_path / "model")
    words = ["train", letters_recipe.__file__, f"--model={model}", f"--output={tmp_path / 'run'}"]
    words += [f"--loop.max-staleness={max_staleness}", f"--curriculum={tmp_path / 'mine.py'}:make"]
    for num_steps in (2, 4):
        assert main([*words, f"--loop.num-steps={num_steps}"]) == 0
    (state,) = (tmp_path / "run" / "checkpoints").glob("step-00000004/state.json")
    (process,) = json.loads(state.read_text())["processes"]
    results = process["extra"]["groups"]["choices"]["curriculum"]["results"]
    assert sorted(problem for problem, _ in results) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert len({group for _, group in results}) == 8


OWN_RECIPE = (
    CURRICULUM
    + """
from dataclasses import replace
from pathlib import Path
from support import letters_recipe
from support.letters_recipe import Config

SOURCE = Path(__file__).with_name("source")

async def make_task(config):
    task = await letters_recipe.make_task(config)
    return replace(task, curriculum={curriculum}, train_on=replace(task.train_on, source=SOURCE.read_text()))
"""
)


def test_a_curriculum_of_the_recipes_code_is_recorded_by_name_and_missed_by_it_as_other_problems_are(tmp_path, capsys):
    recipe, model = tmp_path / "own.py", save_tiny_model(tmp_path / "model")
    (tmp_path / "source").write_text("5 rows")
    recipe.write_text(OWN_RECIPE.replace("{curriculum}", "make"))
    words = ["train", str(recipe), f"--model={model}", f"--output={tmp_path / 'run'}", "--trainer.numerics=exact"]
    for num_steps in (1, 2):
        assert main([*words, f"--loop.num-steps={num_steps}"]) == 0
    stored = json.loads((tmp_path / "run" / "recipe.json").read_text())
    assert stored["curriculum"] == "own.py:make"
    capsys.readouterr()
    (tmp_path / "source").write_text("6 rows")
    assert main([*words, "--loop.num-steps=3"]) != 0
    assert "began with '5 rows' and cannot continue with '6 rows'" in capsys.readouterr().err.replace("\n", " ")
    assert main(["verify", str(tmp_path / "run")]) != 0
    assert "curriculum must be none: the state by which it chose" in (error := capsys.readouterr().err)
    assert "got own.py:make" in error
    digest = next(name for name in stored["files"] if "own.py" in name)  # null: with another file on purpose
    stored["files"][digest] = None
    (tmp_path / "run" / "recipe.json").write_text(json.dumps(stored))
    recipe.write_text(OWN_RECIPE.replace("{curriculum}", "None"))
    assert main([*words, "--loop.num-steps=3"]) != 0
    assert "curriculum must be own.py:make as in the run in" in capsys.readouterr().err.replace("\n", " ")
