"""A run of two turns under every control: the trainer follows the sampler to the bit, and all tools know of it."""

import itertools
import json
from pathlib import Path

import pytest

from support import turns_recipe
from support.served import save_tiny_model
from unbroken.cli import main
from unbroken.runs.records.recorded import read_step
from unbroken.types import LogitControls

END = 583
OPTIONS = (
    f"--rollouts.sampling.allowed-token-ids={','.join(map(str, [*range(300), END]))}",
    "--rollouts.sampling.logit-bias=[[583, 6.0], [40, -5], [41, 2.5]]",
    "--rollouts.sampling.min-tokens=3",
    "--rollouts.sampling.repetition-penalty=1.2",
    "--rollouts.sampling.presence-penalty=0.5",
    "--rollouts.sampling.frequency-penalty=-0.25",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    words = ["train", str(Path(turns_recipe.__file__)), f"--output={folder / 'run'}"]
    words += [f"--model={save_tiny_model(folder / 'model')}", "--trainer.numerics=exact", "--preflight=false"]
    assert main([*words, "--rollouts.sampling.temperature=0.8", *OPTIONS]) == 0
    return folder / "run"


def test_trainer_and_sampler_agree_under_all_controls_at_once(run):
    metrics = [json.loads(line) for line in (run / "metrics" / "metrics.jsonl").read_text().splitlines()]
    assert len(metrics) == 2
    for step in metrics:
        assert step["mismatch/k3"] <= 1e-10
        assert step["train/num_loss_tokens"] == step["rollout/num_sampled_tokens"] > 0


def test_the_record_says_what_each_turn_was_sampled_under(run):
    step = read_step(run / "rollouts" / "step-00000001.rank-0.jsonl.gz")
    turns = [turn for group in step.make_groups() for member in group.trajectories for turn in member.turns]
    assert len(turns) == 16
    for turn in turns:
        controls, ids = turn.sequence.controls, turn.sequence.completion_ids.tolist()
        assert isinstance(controls, LogitControls)
        assert controls.stop_token_ids == (END,)
        assert (controls.min_tokens, controls.repetition_penalty, controls.frequency_penalty) == (3, 1.2, -0.25)
        assert controls.logit_bias == ((END, 6.0), (40, -5.0), (41, 2.5))
        assert set(ids) <= {*range(300), END} - {7}
        assert END not in ids[:3]
        assert not any(pair in turns_recipe.BAD_WORDS for pair in itertools.pairwise(ids))


def test_the_run_is_verified(run, capsys):
    assert main(["verify", str(run)]) == 0
    assert "verified (2 of 2 steps" in capsys.readouterr().out


def test_an_export_says_it_too(run, tmp_path):
    path = tmp_path / "rows.jsonl"
    assert main(["export", str(run), str(path)]) == 0
    for row in map(json.loads, path.read_text().splitlines()):
        assert [controls["min_tokens"] for controls in row["controls"]] == [3, 3]
