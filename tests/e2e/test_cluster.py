"""The table of failures in docs/cluster.md: `unbroken cluster run` on three nodes of Ray inside this machine."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
from safetensors.torch import load_file

from support.clusters import ClusterRun, Nodes
from support.served import save_tiny_model
from unbroken.timeline import read_timeline

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.alone,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed (make e2e)"),
]

NUM_STEPS = 10
PARTS = ("--trainers", "2x1", "--engines", "2")
OWN = (
    f"--loop.num-steps={NUM_STEPS}", "--seed=1", "--checkpoints.every=1", "--rollouts.group-size=4",
    "--rollouts.sampling.max-tokens=16", "--trainer.optimizer.learning-rate=1e-2", "--trainer.optimizer.eps=1e-2",
)  # fmt: skip


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    nodes = Nodes(1, 1, 2)
    yield nodes
    nodes.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@contextmanager
def started(nodes: Nodes, output: Path, model: Path, *own: str, parts: tuple[str, ...] = PARTS) -> Iterator[ClusterRun]:
    run = ClusterRun(nodes, output, model, parts, [*OWN, *own])
    try:
        yield run
    finally:
        run.close()


@pytest.fixture(scope="module")
def undisturbed(nodes: Nodes, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The final model of a run in which nothing fails."""
    with started(nodes, tmp_path_factory.mktemp("undisturbed") / "run", model) as run:
        run.finish()
    check(run)
    return run.output / "final" / "model.safetensors"


def check(run: ClusterRun, undisturbed: Path | None = None) -> None:
    """The invariants of a run that has ended well."""
    steps = run.steps()
    assert [step["step"] for step in steps] == list(range(NUM_STEPS))
    versions = [step["train/policy_version"] for step in steps]
    assert versions == sorted(set(versions))  # trainers that start again publish theirs under a new number
    assert sorted(run.problems()) == list(range(2 * NUM_STEPS))
    assert all(step["staleness/max"] == 0 and step["mismatch/k3_lag_0"] < 1e-8 for step in steps)
    assert run.events()[-1]["what"] == "end"
    run.check_nothing_is_left()
    if undisturbed is not None:
        found, expected = load_file(run.output / "final" / "model.safetensors"), load_file(undisturbed)
        assert max(float((found[name] - expected[name]).abs().max()) for name in expected) <= 1e-5


def kill_part(run: ClusterRun, name: str) -> None:
    os.kill(run.part(name)["pid"], signal.SIGKILL)


@pytest.fixture
def disturbed(
    nodes: Nodes, model: Path, undisturbed: Path, tmp_path: Path
) -> Callable[[Callable[[ClusterRun], None]], ClusterRun]:
    """Runs until something is done to it after some steps, then to its end, and checks it."""

    def run_with(disturb: Callable[[ClusterRun], None]) -> ClusterRun:
        with started(nodes, tmp_path / "run", model) as run:
            run.wait_for_steps(3)
            disturb(run)
            run.finish()
        check(run, undisturbed)
        return run

    return run_with


def test_an_engine_that_is_killed_starts_again_while_the_run_goes_on(disturbed):
    def disturb(run: ClusterRun) -> None:
        kill_part(run, "engine-0")
        run.wait_until(lambda: run.reasons("engine-0"))

    run = disturbed(disturb)
    (reason,) = run.reasons("engine-0")
    assert reason.startswith("was killed by SIGKILL")
    assert run.reasons("trainers") == []


@pytest.mark.parametrize("rank", [0, 1])
def test_all_trainers_start_again_from_the_checkpoint_after_one_is_killed(disturbed, rank):
    run = disturbed(lambda run: kill_part(run, f"trainers-{rank}"))
    (reason,) = run.reasons("trainers")
    assert f"rank {rank} was killed by SIGKILL (node 127.0.0.1/" in reason
    assert run.reasons("engine-0") == run.reasons("engine-1") == []


def test_trainers_move_to_another_node_when_theirs_dies(disturbed, nodes):
    def disturb(run: ClusterRun) -> None:
        start_another = nodes.kill(run.part("trainers-0")["node"])
        run.wait_until(lambda: run.reasons("trainers"))
        start_another()

    run = disturbed(disturb)
    (reason,) = run.reasons("trainers")
    assert "was lost with its node" in reason
    assert "died" in [event["what"] for event in run.events()]


def test_engines_of_a_node_that_dies_wait_for_another_and_the_timeline_has_both(disturbed, nodes):
    gone: list[str] = []

    def disturb(run: ClusterRun) -> None:
        hosts = {run.part(f"trainers-{k}")["node"] for k in range(2)}
        (name,) = {run.part(f"engine-{k}")["node"] for k in range(2)} - hosts
        gone.append(name)
        start_another = nodes.kill(name)
        run.wait_until(lambda: any(event["what"] == "died" for event in run.events()))
        start_another()

    run = disturbed(disturb)
    lost = [part for part in ("engine-0", "engine-1") if any("died" in each for each in run.reasons(part))]
    assert lost
    assert run.reasons("trainers") == []
    lanes = read_timeline(run.output / "timeline" / "cluster.json")
    begun, ended = ([event["name"] for event in lanes if event["ph"] == phase] for phase in "be")
    assert sum(name.startswith("node ") for name in begun) == 5  # the head, three, and another
    assert {*lost, f"node {gone[0]}"} <= set(ended)


def test_a_registry_that_is_killed_knows_all_parts_again(disturbed):
    def disturb(run: ClusterRun) -> None:
        before = run.state()
        os.kill(before["pid"], signal.SIGKILL)
        run.wait_until(lambda: run.state()["pid"] != before["pid"] and run.part("engine-1")["state"] == "serves")

    run = disturbed(disturb)
    assert [run.reasons(part) for part in ("trainers", "engine-0", "engine-1")] == [[], [], []]


def test_nothing_is_left_after_a_signal_and_the_same_command_continues(nodes, model, undisturbed, tmp_path):
    ends = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGKILL: -9}
    for num_steps, number in zip((2, 4, 6), ends, strict=True):
        with started(nodes, tmp_path / "run", model) as run:
            run.wait_for_steps(num_steps)
            run.process.send_signal(number)
            assert run.wait_until_ended() == ends[number]
    with started(nodes, tmp_path / "run", model) as run:
        run.finish()
    check(run, undisturbed)
