"""Two processes with uneven rows train as one process with all of them (DDP and FSDP2 over gloo, on the CPU)."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from peft import PeftModel
from transformers import AutoModelForCausalLM

from support import train_process
from support.gradients import pull
from support.models import tiny_qwen3
from support.processes import run_two
from support.rows import unscored
from unbroken.engines.transformers.weights import UpdateLoader
from unbroken.training.backend import TrainerBackend

pytestmark = pytest.mark.e2e

MOVES = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    """The folder that two processes saved their weights and statistics into."""
    directory = tmp_path_factory.mktemp("processes")
    for config in train_process.ELASTIC:
        train_process.train_alone(config).save(directory / f"checkpoint-one-{config}", extra={"rank": 0})
    run_two("support.train_process", directory)
    return directory


def weights(results: Path, name: str) -> dict[str, torch.Tensor]:
    return torch.load(results / f"weights-{name}.pt")


def stats(results: Path, name: str) -> list[dict]:
    return [{**step, "seconds": 0.0} for step in json.loads((results / f"stats-{name}.json").read_text())]


@pytest.mark.parametrize("config", train_process.CONFIGS)
@pytest.mark.parametrize("kind", train_process.KINDS)
def test_all_processes_end_with_the_same_weights_and_statistics(results, kind, config):
    first, second = (weights(results, f"{kind}-{config}-{rank}") for rank in (0, 1))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert stats(results, f"{kind}-{config}-0") == stats(results, f"{kind}-{config}-1")


@pytest.mark.parametrize(
    "config", ["plain", "sequence", "lora", "dpo", "constant", "gspo", "reward", "shared", "followed"]
)
@pytest.mark.parametrize("kind", train_process.KINDS)
def test_two_processes_train_as_one_with_all_rows(results, kind, config):
    trainer = train_process.trainer_of(config)
    steps = [
        trainer.step([sample for rank in (0, 1) for sample in train_process.samples_of(config, rank, step)])
        for step in range(len(train_process.NUM_ROWS))
    ]
    together = weights(results, f"{kind}-{config}-0")
    untrained = dict(tiny_qwen3().named_parameters())
    for name, weight in trainer.named_weights():
        assert ((weight - untrained[name]).abs().max() > 1e-3) == train_process.trains(config, name), name
        torch.testing.assert_close(together[name], weight, atol=1e-5, rtol=0, msg=name)
    for ours, theirs in zip(steps, stats(results, f"{kind}-{config}-0"), strict=True):
        for name in ("num_rows", "num_tokens", "num_loss_tokens", "num_updates", "policy_version"):
            assert theirs[name] == getattr(ours, name)
        assert theirs["entropy_weight"] == pytest.approx(ours.entropy_weight)
        for name in ("loss", "grad_norm", "mean_ratio", "clip_fraction", "k3", "corrected_fraction", "entropy"):
            assert theirs[name] == pytest.approx(getattr(ours, name), rel=1e-3, abs=1e-5)
        assert theirs["reference_k3"] == (
            None if ours.reference_k3 is None else pytest.approx(ours.reference_k3, rel=1e-3, abs=1e-5)
        )
        pairs = None if ours.objective is None else pytest.approx(asdict(ours.objective), rel=1e-4)
        assert theirs["objective"] == pairs
        assert theirs["mismatch"]["max_abs"] == pytest.approx(ours.mismatch.max_abs, rel=1e-3)


@pytest.mark.parametrize("kind", train_process.KINDS)
def test_the_balance_of_experts_is_that_of_all_processes(results, kind, tmp_path):
    train_process.train_balanced("one", None, -1, tmp_path)
    alone, together = weights(tmp_path, "one-balanced--1"), weights(results, f"{kind}-balanced-0")
    for name, weight in alone.items():
        torch.testing.assert_close(together[name], weight, atol=1e-5, rtol=0, msg=name)


def test_a_teachers_most_likely_ids_are_learned_by_two_processes_as_by_one(results, tmp_path):
    train_process.train_taught(None, -1, tmp_path)
    alone, together = weights(tmp_path, "ddp-taught--1"), weights(results, "ddp-taught-0")
    for name, weight in alone.items():
        torch.testing.assert_close(together[name], weight, atol=1e-5, rtol=0, msg=name)


@pytest.mark.parametrize("kind", train_process.KINDS)
def test_supervised_rows_of_two_processes_train_as_those_of_one(results, kind, tmp_path):
    train_process.train_supervised("one", None, -1, tmp_path)
    alone, together = weights(tmp_path, "one-supervised--1"), weights(results, f"{kind}-supervised-0")
    for name, weight in alone.items():
        torch.testing.assert_close(together[name], weight, atol=1e-4, rtol=0, msg=name)
    steps = [
        json.loads((folder / f"stats-{each}.json").read_text())
        for folder, each in (
            (tmp_path, "one-supervised--1"),
            (results, f"{kind}-supervised-0"),
            (results, f"{kind}-supervised-1"),
        )
    ]
    for one, first, second in zip(*steps, strict=True):
        for name in ("loss", "num_rows", "num_tokens", "num_loss_tokens"):
            key = f"supervised/{name}"
            assert first[key] == second[key] == pytest.approx(one[key], rel=1e-3)


@pytest.mark.parametrize("kind", train_process.KINDS)
def test_gradients_of_several_calls_are_exchanged_once_each(results, kind):
    """As many calls as steps, of which one process has no rows in one, are one call with all rows in one process."""
    backend = TrainerBackend(tiny_qwen3(), train_process.CONFIGS["plain"], accelerator=Accelerator())
    samples = [row for step in range(3) for rank in (0, 1) for row in train_process.samples_of("plain", rank, step)]
    rows = unscored(samples)
    backend.forward_backward(rows, pull, weights=[0.1] * len(rows))
    backend.optimizer_step(1e-2)
    together = weights(results, f"{kind}-parts-0")
    for name, weight in backend.named_weights():
        torch.testing.assert_close(together[name], weight, atol=1e-5, rtol=0, msg=name)


def test_memory_that_is_out_in_one_process_makes_smaller_passes_in_all(results):
    found = [weights(results, f"ddp-memory-{size}-{rank}") for size in (50, 25) for rank in (0, 1)]
    for other in found[1:]:
        assert all(torch.equal(weight, other[name]) for name, weight in found[0].items())


def test_sharded_layers_that_are_compiled_train_as_they_are(results):
    plain, compiled = (weights(results, f"fsdp2-{config}-0") for config in ("plain", "compiled"))
    for name, weight in plain.items():
        torch.testing.assert_close(compiled[name], weight, atol=1e-6, rtol=0, msg=name)


@pytest.mark.parametrize("kind", train_process.KINDS)
def test_processes_share_prefixes_in_passes_of_their_own(results, kind):
    """With as many passes in each, whatever their trees save."""
    assert [step["shared_share"] > 0 for step in stats(results, f"{kind}-shared-0")] == [True] * 3
    assert all(step["shared_share"] == 0 for step in stats(results, f"{kind}-plain-0"))


@pytest.mark.parametrize("config", ["plain", "lora"])
@pytest.mark.parametrize("kind", train_process.KINDS)
def test_one_process_writes_the_model_of_all_as_transformers_loads_it(results, kind, config):
    folder = "merged" if config == "lora" else "final"
    loaded = dict(AutoModelForCausalLM.from_pretrained(results / f"{folder}-{kind}-{config}").named_parameters())
    trained = weights(results, f"{kind}-{config}-0")
    assert trained.keys() == loaded.keys()
    assert all(torch.equal(trained[name], loaded[name]) for name in trained)


@pytest.mark.parametrize("kind", train_process.KINDS)
def test_one_process_writes_the_adapters_of_all_as_peft_loads_them(results, kind):
    loaded = PeftModel.from_pretrained(tiny_qwen3(), results / f"final-{kind}-lora").merge_and_unload()
    trained = weights(results, f"{kind}-lora-0")
    for name, weight in loaded.named_parameters():
        torch.testing.assert_close(weight, trained[name], atol=1e-6, rtol=0, msg=name)


@pytest.mark.parametrize("kind", train_process.KINDS)
def test_each_process_gathers_the_whole_adapter_for_its_engines(results, kind):
    merged = weights(results, f"{kind}-lora-0")
    first, second = (weights(results, f"adapter-{kind}-lora-{rank}") for rank in (0, 1))
    assert all(torch.equal(first[name], second[name]) for name in first)
    untrained = tiny_qwen3()
    UpdateLoader().load(untrained, list(first.items()), policy_version=0)
    for name, weight in untrained.named_parameters():
        torch.testing.assert_close(weight, merged[name], atol=1e-6, rtol=0, msg=name)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("config", train_process.CONFIGS)
@pytest.mark.parametrize("kind", train_process.KINDS)
def test_each_process_goes_on_from_a_checkpoint_as_if_there_had_been_none(results, kind, config, rank):
    """Their generators differ by then, since they had different numbers of rows to deal."""
    whole, resumed = (weights(results, f"{how}-{kind}-{config}-{rank}") for how in ("whole", "resumed"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert not torch.equal(
        whole["model.layers.0.self_attn.q_proj.weight"],
        weights(results, f"{kind}-{config}-{rank}")["model.layers.0.self_attn.q_proj.weight"],
    )


@pytest.mark.parametrize("config", train_process.ELASTIC)
@pytest.mark.parametrize("kind", train_process.KINDS)
def test_a_checkpoint_of_two_processes_goes_on_in_one(results, kind, config):
    alone = train_process.trainer_of(config)
    assert alone.load(results / f"checkpoint-{kind}-{config}") == {"rank": 0}
    saved = weights(results, f"{kind}-{config}-0")
    assert all(torch.equal(weight, saved[name]) for name, weight in alone.named_weights())
    alone.step([sample for rank in (0, 1) for sample in train_process.samples_of(config, rank, 0)])
    went_on = weights(results, f"whole-{kind}-{config}-0")
    for name, weight in alone.named_weights():
        torch.testing.assert_close(weight, went_on[name], atol=5e-6, rtol=0, msg=name)


@pytest.mark.parametrize("config", train_process.ELASTIC)
@pytest.mark.parametrize("kind", train_process.KINDS)
@pytest.mark.parametrize("origin", ["ddp", "one"])
def test_a_checkpoint_goes_on_in_two_processes_whichever_wrote_it(results, origin, kind, config):
    """Also sharded, where it was not."""
    saved = weights(results, f"ddp-{config}-0")
    if origin == "one":
        alone = train_process.trainer_of(config)
        alone.load(results / f"checkpoint-one-{config}")
        saved = dict(alone.named_weights())
    loaded = weights(results, f"loaded-from-{origin}-{kind}-{config}-1")
    assert all(torch.equal(weight, saved[name]) for name, weight in loaded.items())
    went_on = weights(results, f"from-{origin}-{kind}-{config}-1")
    for name, weight in weights(results, f"whole-ddp-{config}-0").items():
        torch.testing.assert_close(weight, went_on[name], atol=5e-6, rtol=0, msg=name)


@pytest.mark.parametrize("kind", train_process.KINDS)
def test_one_process_publishes_the_weights_of_all(results, kind):
    first, second = (json.loads((results / f"loop-{kind}-{rank}.json").read_text()) for rank in (0, 1))
    assert first["version"] == 2
    assert first["published"] < 2e-6
    assert second["version"] == 0  # nobody published to its engine
    assert second["published"] > 1e-2
    lines = [json.loads(line) for line in (results / f"loop-{kind}" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1]
    assert [line["rollout/num_trajectories"] for line in lines] == [8, 8]
    assert [line["counters/dropped_rows/failed"] for line in lines] == [2, 2]
    assert [line["train/num_rows"] for line in lines] == [6, 6]
    assert [line.get("counters/dropped_rows/no_variance") for line in lines] == [None, None]
    assert first["checkpoints"] == ["step-00000003"]


@pytest.mark.parametrize("kind", train_process.KINDS)
def test_a_publisher_that_fails_halfway_is_heard_of_by_all_processes(results, kind):
    first, second = (json.loads((results / f"loop-{kind}-{rank}.json").read_text()) for rank in (0, 1))
    assert first["error"] == "OSError: no space left on device"
    assert second["error"] == "TrainingError: process 0 failed: OSError: no space left on device"


@pytest.mark.parametrize("kind", train_process.KINDS)
def test_what_one_process_loses_with_its_engine_it_samples_again_while_the_others_wait(results, kind):
    first, second = (json.loads((results / f"lost-{kind}-{rank}.json").read_text()) for rank in (0, 1))
    assert first == {"rows": [0, 1, 2], "loaded": [1, 1, 2, 3], "num_sampled": 3}
    assert second == {"rows": [0, 1, 2], "loaded": [1, 1, 2, 3], "num_sampled": 4}
    lines = [json.loads(line) for line in (results / f"lost-{kind}" / "metrics.jsonl").read_text().splitlines()]
    assert [line["outages/num_losses"] for line in lines] == [0, 1, 0]
    assert [line["train/num_rows"] for line in lines] == [8, 8, 8]


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("make_units", r"RewardError: group g, trajectories t, t: rewards\[0\] must be finite"),
        ("sample", "RewardError: row 5: nan"),
        ("record", "RuntimeError: no record"),
        ("choices", "RuntimeError: no choices"),
        ("before_update", "RuntimeError: no sleep"),
        ("on_step", "RuntimeError: no screen"),
        ("extra", "InvalidInputError: extra must consist of types that JSON has"),
    ],
)
def test_what_fails_in_one_process_is_raised_on_all(results, where, error):
    first, second = (json.loads((results / f"failing-{rank}.json").read_text())[where] for rank in (0, 1))
    assert re.match(error, second)
    assert re.match(f"TrainingError: process 1 failed: {error}", first)


def test_a_loss_where_one_process_does_not_wait_for_engines_ends_the_run_on_all(results):
    for rank in (0, 1):
        raised = json.loads((results / f"failing-{rank}.json").read_text())["engine"]
        assert raised.startswith("OutageError: rollouts were lost: ")
